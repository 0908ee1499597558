"""What the tests of paged memory compare it with: sequences and their tokens, and pages whose contents can be read.

What a token leaves in a page stands for its keys and values: a number made of all tokens up to it, the key of its
cache and the page group. So a page of other tokens, at another place, or of another tenant is told apart.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from octavo.runtime import paged_memory
from octavo.runtime.kv_cache import NULL_PAGE, PagePool
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PageTable
from octavo.runtime.prefix_cache import CacheKey

_RUNTIME = str(paged_memory.__file__).rpartition("/")[0] + "/"

# n -> a number below n; all chance comes from there.
Draw = Callable[[int], int]
Content = tuple[int, ...]

KEYS = (CacheKey(), CacheKey("salt"), CacheKey(adapter="salt"))
WINDOWS: tuple[tuple[int | None, ...], ...] = ((None,), (None, 5), (7,), (None, 5, 5))


def all_collide(parent: bytes, tokens: bytes) -> bytes:
    """The weakest hash there is."""
    return b""


@dataclass(frozen=True)
class Setting:
    num_pages: int
    page_size: int
    windows: tuple[int | None, ...]
    num_host_pages: int
    is_weak: bool

    @classmethod
    def drawn(cls, draw: Draw) -> "Setting":
        """4 to 20 pages of 1 to 4 tokens, 0 to 8 host slots."""
        return cls(5 + draw(17), 1 + draw(4), WINDOWS[draw(len(WINDOWS))], draw(3) and draw(9), draw(3) == 0)


@dataclass(eq=False)
class Branch:
    """One sequence. marks: for each page group, what each token leaves in a page."""

    key: int
    table: PageTable
    tokens: list[int] = field(default_factory=list)
    marks: list[list[int]] = field(default_factory=list)

    def extend(self, tokens: Sequence[int]) -> None:
        num_groups = len(self.table.groups)
        self.marks = self.marks or [[] for _ in range(num_groups)]
        for token in tokens:
            before = self.marks[0][-1] if self.tokens else self.key
            mark = hash((before, token)) // 8 * 8
            for group in range(num_groups):
                self.marks[group].append(mark + group)
            self.tokens.append(token)


@dataclass(eq=False)
class Family:
    """Branches of a request: they are swapped and preempted together."""

    key: int
    branches: list[Branch] = field(default_factory=list)

    @property
    def is_out(self) -> bool:
        return any(branch.table.in_host for branch in self.branches)

    @property
    def tables(self) -> list[PageTable]:
        return [branch.table for branch in self.branches]


def run_moves(moves: Sequence[Move], pages: list[Content], slots: list[Content]) -> None:
    for move in moves:
        source = (slots if move.kind == "in" else pages)[move.source]
        (slots if move.kind == "out" else pages)[move.target] = source


def held(tables: Iterable[PageTable]) -> set[int]:
    return {page for table in tables for row in table.groups for page in row} - {NULL_PAGE}


def unheld(pool: PagePool) -> int:
    return sum(not holders for holders in pool._holders[1:])


def interrupt_at(count: int) -> Callable[[FrameType, str, Any], Any]:
    """A trace that raises KeyboardInterrupt at the count-th line of the runtime."""
    seen = 0

    def trace_line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal seen
        if event == "line":
            seen += 1
            if seen == count:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace_line

    def trace_call(frame: FrameType, event: str, arg: object) -> Any:
        return trace_line if frame.f_code.co_filename.startswith(_RUNTIME) else None

    return trace_call
