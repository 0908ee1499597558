"""Which slots of its pages a draft model has filled. Page numbers are the target's, contents its own."""

from collections.abc import Sequence

import numpy as np

from octavo.runtime.kv_cache import NULL_PAGE, PagePool
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory, PageTable


class FilledSlots:
    """Of every page how many slots, from its first on, hold what the draft model makes of the page's tokens.

    A page that the prefix cache hands to another request keeps its count, so that request's draft need not be computed
    again; a page that is handed out as new has none.
    """

    def __init__(self, memory: PagedMemory, group: int) -> None:
        self._page_size = memory.page_size
        self._group = group
        self._pages = _Counts(memory.pool)
        self._slots = _Counts(memory.host)

    def move(self, moves: Sequence[Move]) -> None:
        """Contents moved."""
        for move in moves:
            # The pool of host memory numbers its slots from 1.
            source = self._slots.get(move.source + 1) if move.kind == "in" else self._pages.get(move.source)
            if move.kind == "out":
                self._slots.set(move.target + 1, source)
            else:
                self._pages.set(move.target, source)

    def fill(self, table: PageTable, start: int, end: int) -> None:
        """The draft model computed tokens start : end; those before are filled, those behind are not."""
        size = self._page_size
        row = table.groups[self._group]
        for index in range(start // size, -(-end // size)):
            if row[index] != NULL_PAGE:
                self._pages.set(row[index], min(end - index * size, size))

    def count(self, table: PageTable) -> int:
        """Tokens of the sequence, from its first on, that are filled. What a window passed counts as filled."""
        for index, page in enumerate(table.groups[self._group]):
            if page != NULL_PAGE and (count := self._pages.get(page)) < self._page_size:
                return index * self._page_size + count
        return len(table.groups[self._group]) * self._page_size


class _Counts:
    """A number for every page of a pool, 0 since it was last handed out."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._counts = np.zeros((pool.num_pages, 2), np.int64)  # generation, count

    def get(self, page: int) -> int:
        generation, count = self._counts[page].tolist()
        return int(count) if generation == self._pool.generations[page] else 0

    def set(self, page: int, count: int) -> None:
        self._counts[page] = self._pool.generations[page], count
