"""Moves of KV pages: from page to page, out to a host slot, in again; and pages in this machine's memory.

A host slot keeps what a page holds, of all layers: codes and block scales too. Slots are numbered from 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.runtime.kv_cache import NULL_PAGE


@dataclass(frozen=True)
class Move:
    """What `source` holds comes to `target`, and `source` keeps it.

    kind  "copy" from page to page, "out" from page to host slot, "in" from host slot to page
    """

    kind: Literal["copy", "out", "in"]
    source: int
    target: int


def check_moves(moves: Sequence[Move], num_pages: int, num_host_pages: int) -> None:
    """ExecutionError for a move from or to what is no page or slot of the runner. The null page never moves."""
    pages, slots = range(NULL_PAGE + 1, num_pages), range(num_host_pages)
    for move in moves:
        sources = slots if move.kind == "in" else pages
        targets = slots if move.kind == "out" else pages
        if move.source not in sources or move.target not in targets:
            expected = f"pages 1 to {num_pages - 1} and host slots below {num_host_pages}"
        elif move.kind == "copy" and move.source == move.target:
            expected = "two pages"
        else:
            continue
        raise ExecutionError(
            f"move_pages: expected {expected}, got '{move.kind}' from {move.source} to {move.target}; "
            "give num_host_pages for host slots"
        )


class HostPages:
    """Pages in this machine's memory, with slots for others beside them.

    caches          for each cache buffer a view of its pages, (num_pages, bytes) u8 or of any other dtype
    num_host_pages  slots; their memory is taken once they are written
    """

    def __init__(self, caches: Iterable[NDArray[Any]], num_host_pages: int = 0) -> None:
        self._caches = tuple(caches)
        self._slots = tuple(
            np.zeros((num_host_pages, *cache.shape[1:]), cache.dtype) for cache in self._caches
        )
        self.num_host_pages = num_host_pages

    def move(self, moves: Sequence[Move]) -> None:
        """All of them in order, or none and ExecutionError."""
        if moves:
            check_moves(moves, len(self._caches[0]), self.num_host_pages)
        for move in moves:
            sources = self._slots if move.kind == "in" else self._caches
            targets = self._slots if move.kind == "out" else self._caches
            for source, target in zip(sources, targets, strict=True):
                target[move.target] = source[move.source]
