"""Moves of pages written short, orders of them in which each counts, and what they come to."""

from collections.abc import Sequence
from typing import Any

from octavo.runtime.page_moves import Move

NUM_PAGES, NUM_SLOTS = 7, 3


def moves_of(text: str) -> list[Move]:
    """ "1>2 3>a b>4": pages are numbers, host slots letters."""
    found = []
    for move in text.split():
        source, target = move.split(">")
        kind = "in" if source.isalpha() else "out" if target.isalpha() else "copy"
        numbers = [ord(end) - ord("a") if end.isalpha() else int(end) for end in (source, target)]
        found.append(Move(kind, *numbers))  # type: ignore[arg-type]
    return found


def after(held: Sequence[Any], text: str) -> list[Any]:
    """What pages hold after the moves, one at a time."""
    places = {str(page): content for page, content in enumerate(held)}
    for move in text.split():
        source, target = move.split(">")
        places[target] = places[source]
    return [places[str(page)] for page in range(len(held))]


# A later move reads what an earlier one wrote; a page is taken by another as soon as it went out; slots are reused.
ORDERS = [
    "1>2", "1>2 2>3", "2>3 1>2", "1>a 5>1", "1>a 5>1 a>6", "1>a 2>a a>3", "1>a a>2 2>3 3>b b>1",
    "1>a 2>b 3>c 4>1 5>2 6>3 a>4 b>5 c>6", "1>2 3>1 2>3", "1>a 1>2 a>3 2>1",
]  # fmt: skip
