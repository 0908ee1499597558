"""The options of `octavo compile` that make a target of drafts, or a draft."""

import re
from dataclasses import dataclass
from typing import Annotated

import typer


@dataclass(frozen=True)
class Numbers:
    """Layers or hidden states, in the order given."""

    numbers: tuple[int, ...]


def features_of(text: str) -> Numbers:
    """`2,15,-1`. Raises typer.BadParameter for what is not whole numbers."""
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"-?\d{1,6}", part) for part in parts):
        raise typer.BadParameter(f"expected numbers such as 2,15,-1, got {text}")
    return Numbers(tuple(map(int, parts)))


def layers_of(text: str) -> Numbers:
    """`8-20,25`: both ends are among them. Raises typer.BadParameter for what is no range."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
        if first > last:
            raise typer.BadParameter(f"expected layers such as 8-20,25, got {text}")
        numbers += range(first, last + 1)
    return Numbers(tuple(numbers))


Features = Annotated[
    Numbers | None,
    typer.Option(
        parser=features_of,
        metavar="I,...",
        help="Hand out hidden states for draft heads: 0 the embeddings, i what layer i makes, -1 what the last product "
        "reads, as EAGLE-1, Medusa and MTP heads do.",
    ),
]
SkipLayers = Annotated[
    Numbers | None,
    typer.Option(
        parser=layers_of,
        metavar="A-B,...",
        help="Leave out these layers, counted from 0: a draft of itself, for `run --speculate self=ARTIFACT`.",
    ),
]
DraftOf = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        help="MODEL is a directory with a draft head (EAGLE, EAGLE-3, Medusa, MTP) of the model TARGET, for `run "
        "--speculate draft=ARTIFACT`. Give the target's --dtype and --page-size.",
    ),
]
