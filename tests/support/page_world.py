"""Paged memory and a plain model of what it must come to, driven by operations in any order."""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from page_model import (
    KEYS,
    Branch,
    Content,
    Draw,
    Family,
    Setting,
    all_collide,
    held,
    interrupt_at,
    run_moves,
    unheld,
)

from octavo.compiler.errors import OutOfPages
from octavo.runtime.kv_cache import NULL_PAGE
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory, PageTable
from octavo.runtime.prefix_cache import sha256

MAX_LENGTH, MAX_FAMILIES, MAX_BRANCHES = 32, 5, 3

# How often each operation is drawn.
OPERATIONS = {
    "admit": 12, "compute": 24, "fork": 3, "share_prefix": 3, "resume": 3, "finish": 4, "abort": 5, "preempt": 3,
    "swap_out": 3, "swap_in": 5, "pressure": 2, "flush": 1, "interrupt": 6, "lose_moves": 3,
}  # fmt: skip

DISTURBANCES = ("interrupt", "lose_moves")


class World:
    """PagedMemory, and what it must come to. Every operation ends with `check`.

    counts  operations by name; "hits", "hit_tokens", "refused" and what else happened
    """

    def __init__(self, setting: Setting) -> None:
        self.page_size = setting.page_size
        self.windows = setting.windows
        self.memory = PagedMemory(
            setting.num_pages, setting.page_size, setting.windows, num_host_pages=setting.num_host_pages,
            digest=all_collide if setting.is_weak else sha256,
        )  # fmt: skip
        self.garbage: Content = (-1,) * setting.page_size
        self.pages: list[Content] = [self.garbage] * setting.num_pages
        self.slots: list[Content] = [self.garbage] * setting.num_host_pages
        self.families: list[Family] = []
        self.ended: list[PageTable] = []  # given up by an operation that is not through
        self.history: list[list[int]] = [[]]  # what prompts begin with
        self.counts: Counter[str] = Counter()

    def do(self, name: str, draw: Draw) -> None:
        """An operation by its name in OPERATIONS; nothing happens where nothing fits it."""
        self.counts[name] += 1
        getattr(self, name)(draw)
        self.check()

    # Operations

    def admit(self, draw: Draw) -> None:
        """A new sequence; its prompt begins like an earlier one, as often as not."""
        if len(self.families) >= MAX_FAMILIES:
            return
        earlier = self.history[draw(len(self.history))]
        more = [draw(4) // 3 for _ in range(draw(6))]
        prompt = [*(earlier if draw(2) else earlier[: draw(len(earlier) + 1)]), *more][:MAX_LENGTH] or [0]
        key = max(0, draw(9) - 6)
        for _ in range(1 + draw(2)):  # two that ask the same at once compute the same pages
            family = Family(key)
            branch = self._new_branch(family, prompt)
            self.families.append(family)
            if not self._admit(branch):
                self.families.remove(family)
                return
        self.history = [*self.history[-7:], self.families[-1].branches[-1].tokens]

    def resume(self, draw: Draw) -> None:
        """A preempted branch comes back."""
        waiting = [
            b for f in self.families if not f.is_out for b in f.branches if b.table.is_empty and b.tokens
        ]
        if waiting:
            self._admit(waiting[draw(len(waiting))])

    def compute(self, draw: Draw) -> None:
        """A step: chunks of several branches."""
        chunks = []
        for _, branch in self._running():
            end = branch.table.num_tokens + 1 + draw(5)
            if draw(2) and end <= MAX_LENGTH:
                branch.extend([draw(4) // 3 for _ in range(end - len(branch.tokens))])
                if self._reserve(branch, end):
                    chunks.append((branch, end))
        self.flush(draw)
        self._write(chunks)
        for branch, end in chunks:
            self.memory.commit(branch.table, branch.tokens, end)
            self.counts["chunks"] += 1

    def fork(self, draw: Draw) -> None:
        running = [(f, b) for f, b in self._running() if len(f.branches) < MAX_BRANCHES]
        if running:
            family, branch = running[draw(len(running))]
            table = self.memory.fork(branch.table)
            child = Branch(family.key, table)
            child.extend(branch.tokens[: table.num_tokens])
            family.branches.append(child)

    def share_prefix(self, draw: Draw) -> None:
        running = [
            (f, b) for f, b in self._running() if len(f.branches) < MAX_BRANCHES and b.table.num_tokens
        ]
        if not running:
            return
        family, source = running[draw(len(running))]
        length = 1 + draw(source.table.num_tokens)
        child = self._new_branch(family, source.tokens[:length])
        is_there = all(
            NULL_PAGE not in row[self._first(window, length) : self._pages_of(length)]
            for row, window in zip(source.table.groups, self.windows, strict=True)
        )
        assert self.memory.share_prefix(child.table, source.table, length) == is_there
        if not is_there:
            family.branches.remove(child)

    def finish(self, draw: Draw) -> None:
        """A branch ends, wherever it is."""
        if self.families:
            family = self.families[draw(len(self.families))]
            self._end(family, [family.branches[draw(len(family.branches))]])

    def abort(self, draw: Draw) -> None:
        if self.families:
            family = self.families[draw(len(self.families))]
            self._end(family, list(family.branches))

    def preempt(self, draw: Draw) -> None:
        if self.families:
            for table in self.families[draw(len(self.families))].tables:
                self.memory.release(table)

    def swap_out(self, draw: Draw) -> None:
        families = [f for f in self.families if not f.is_out and not all(t.is_empty for t in f.tables)]
        if families:
            tables = families[draw(len(families))].tables
            needed = len(held(tables))
            self._attempt(needed <= unheld(self.memory.host), lambda: self.memory.swap_out(tables), "swaps")

    def swap_in(self, draw: Draw) -> None:
        families = [f for f in self.families if f.is_out]
        if families:
            tables = families[draw(len(families))].tables
            needed = len(held(tables))
            self._attempt(needed <= unheld(self.memory.pool), lambda: self.memory.swap_in(tables), "swaps")

    def pressure(self, draw: Draw) -> None:
        """Somebody needs many pages for a moment."""
        pool = self.memory.pool
        pool.free(pool.allocate(pool.num_free if draw(2) else draw(pool.num_free + 1)))

    def flush(self, draw: Draw) -> None:
        """What is queued is moved."""
        self.counts["moves"] += len(self.memory.moves)
        self.memory.run_moves(lambda moves: run_moves(moves, self.pages, self.slots))

    def lose_moves(self, draw: Draw) -> None:
        """The runner fails in the middle of the moves."""

        def fail(moves: Sequence[Move]) -> None:
            run_moves(moves[: draw(len(moves) + 1)], self.pages, self.slots)
            raise KeyboardInterrupt

        try:
            self.memory.run_moves(fail)
        except KeyboardInterrupt:
            self.counts["lost"] += 1
            self._recover()

    def interrupt(self, draw: Draw) -> None:
        """Another operation is interrupted at some line of the runtime."""
        names = [name for name in OPERATIONS if name not in DISTURBANCES]
        name, count = names[draw(len(names))], 1 + draw(6 + draw(60))
        previous = sys.gettrace()
        sys.settrace(interrupt_at(count))
        try:
            getattr(self, name)(draw)
        except KeyboardInterrupt:
            sys.settrace(previous)
            self.counts["interrupted"] += 1
            self._recover()
        finally:
            sys.settrace(previous)

    def _recover(self) -> None:
        is_lost = self.memory.is_moving
        self.memory.rebuild([t for f in self.families for t in f.tables], self.ended)
        self.ended = []
        for family in self.families:
            if is_lost or (family.is_out and not all(table.in_host for table in family.tables)):
                for table in family.tables:
                    self.memory.release(table)

    # Their parts

    def _new_branch(self, family: Family, tokens: Sequence[int]) -> Branch:
        branch = Branch(family.key, self.memory.new_table(KEYS[family.key]))
        branch.extend(tokens)
        family.branches.append(branch)
        return branch

    def _running(self) -> Iterator[tuple[Family, Branch]]:
        for family in self.families:
            if not family.is_out:
                for branch in family.branches:
                    if not branch.table.is_empty:
                        yield family, branch

    def _end(self, family: Family, branches: Sequence[Branch]) -> None:
        self.ended = [branch.table for branch in branches]
        family.branches = [branch for branch in family.branches if branch not in branches]
        if not family.branches:
            self.families.remove(family)
        for branch in branches:
            self.memory.release(branch.table)
        self.ended = []

    def _admit(self, branch: Branch) -> bool:
        """It must find the longest prefix that is there, and have room exactly if there is."""
        places, length = self._longest_hit(branch)
        num_full = sum(window is None for window in self.windows)
        num_new = num_full * (self._pages_of(len(branch.tokens)) - length)
        known = held(t for f in self.families for t in f.tables if not t.in_host)
        needed = num_new + sum(page not in known for page in places)
        hits: list[int] = []
        fits = self._attempt(
            needed <= unheld(self.memory.pool),
            lambda: hits.append(self.memory.admit(branch.table, branch.tokens, KEYS[branch.key])),
            "admitted",
        )
        if fits:
            assert hits == [length * self.page_size], f"found {hits[0]} tokens of {length * self.page_size}"
            self.counts["hits"] += length > 0
            self.counts["host_hits"] += -1 in places
            self.counts["hit_tokens"] += hits[0]
        return fits

    def _longest_hit(self, branch: Branch) -> tuple[list[int], int]:
        """By contents: the pages to use, -1 for each that is in host memory only; and how many pages are found."""
        pages, slots = self._after_moves()
        where = {slots[slot - 1][-1]: -1 for slot in self.memory.prefixes.slots}
        where |= {pages[page][-1]: page for page in self.memory.prefixes.pages}
        for length in range((len(branch.tokens) - 1) // self.page_size, 0, -1):
            wanted = [
                marks[(page + 1) * self.page_size - 1]
                for window, marks in zip(self.windows, branch.marks, strict=True)
                for page in range(self._first(window, length * self.page_size), length)
            ]
            if all(mark in where for mark in wanted):
                return [where[mark] for mark in wanted], length
        return [], 0

    def _reserve(self, branch: Branch, end: int) -> bool:
        holders = self._holders()
        start, last = branch.table.num_tokens // self.page_size, self._pages_of(end)
        needed = sum(
            column >= len(row) or holders[row[column]] > 1
            for row in branch.table.groups
            for column in range(start, last)
        )
        return self._attempt(
            needed <= unheld(self.memory.pool), lambda: self.memory.reserve(branch.table, end), "reserved"
        )

    def _attempt(self, fits: bool, run: Callable[[], Any], name: str) -> bool:
        """Whether it was done: exactly if it fits; otherwise nothing changed."""
        before = self._snapshot()
        try:
            run()
        except OutOfPages as error:
            assert not fits, f"refused although there is room: {error}"
            assert self._snapshot() == before, "a refused operation left something behind"
            self.counts["refused"] += 1
            return False
        assert fits, f"{name} although there is no room"
        self.counts[name] += 1
        return True

    def _write(self, chunks: Sequence[tuple[Branch, int]]) -> None:
        holders, findable = self._holders(), self.memory.prefixes.pages
        for branch, end in chunks:
            for row, marks in zip(branch.table.groups, branch.marks, strict=True):
                for position in range(branch.table.num_tokens, end):
                    page, place = row[position // self.page_size], position % self.page_size
                    assert page != NULL_PAGE, "the null page is written"
                    assert holders[page] == 1, f"page {page} is written, and {holders[page]} hold it"
                    assert page not in findable, f"page {page} is written, and the prefix cache has it"
                    old = self.pages[page]
                    self.pages[page] = (*old[:place], marks[position], *old[place + 1 :])

    # What must hold

    def check(self) -> None:
        """Books are in order, and every token that may still be attended to is where its table says."""
        tables = [table for family in self.families for table in family.tables]
        self.memory.check(tables)
        pages, slots = self._after_moves()
        for family in self.families:
            for branch in family.branches:
                self._check_branch(branch, pages, slots)
        if not self.memory.moves:  # nobody reads them any more
            for page in self.memory.pool._clean:
                self.pages[page] = self.garbage
            for slot in self.memory.host._clean:
                self.slots[slot - 1] = self.garbage

    def _check_branch(self, branch: Branch, pages: Sequence[Content], slots: Sequence[Content]) -> None:
        table, size = branch.table, self.page_size
        end = table.num_tokens
        assert not (table.is_empty and end), "tokens without pages"
        for window, row, marks in zip(self.windows, table.groups, branch.marks, strict=True):
            begin = 0 if window is None else max(0, end - window + 1)
            for column in range(begin // size, self._pages_of(end)):
                assert row[column] != NULL_PAGE, f"column {column} is the null page, {end} tokens"
                there = slots[row[column] - 1] if table.in_host else pages[row[column]]
                low, high = max(begin, column * size), min(end, (column + 1) * size)
                assert list(there[low - column * size : high - column * size]) == marks[low:high], (
                    f"{'slot' if table.in_host else 'page'} {row[column]} does not hold tokens {low}:{high}"
                )

    def close(self) -> None:
        """Everything ends: all pages are free, and can be handed out, and nothing is remembered then."""
        for family in list(self.families):
            self._end(family, list(family.branches))
        self.check()
        self.counts["evictions"] = self.memory.num_evicted
        for pool in (self.memory.pool, self.memory.host):
            assert pool.num_free == pool.capacity, "pages are held at idle"
            self.memory.pool.free(self.memory.pool.allocate(self.memory.pool.capacity))
            pool.free(pool.allocate(pool.capacity))
        self.memory.check([])
        prefixes = self.memory.prefixes
        assert not prefixes._nodes and not prefixes._by_page and not prefixes._by_slot

    def _after_moves(self) -> tuple[list[Content], list[Content]]:
        pages, slots = list(self.pages), list(self.slots)
        run_moves(self.memory.moves, pages, slots)
        return pages, slots

    def _holders(self) -> Counter[int]:
        rows = [row for f in self.families for t in f.tables if not t.in_host for row in t.groups]
        return Counter(page for row in rows for page in row)

    def _snapshot(self) -> tuple[Any, ...]:
        memory = self.memory
        tables = [t for f in self.families for t in f.tables]
        return (
            [(list(pool._holders), list(pool._is_kept), set(pool._clean)) for pool in (memory.pool, memory.host)],
            len(memory.moves), set(memory.prefixes.pages), set(memory.prefixes.slots),
            [([list(row) for row in t.groups], t.num_tokens, t.num_known, t.in_host, list(t.slid)) for t in tables],
        )  # fmt: skip

    def _first(self, window: int | None, position: int) -> int:
        return 0 if window is None else max(0, position - window + 1) // self.page_size

    def _pages_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)


def play(seed: int, operations: int, setting: Setting | None = None) -> World:
    """A world after that many operations drawn at random, everything ended."""
    rng = random.Random(seed)

    def draw(below: int) -> int:
        return int(rng.random() * below)

    world = World(setting or Setting.drawn(draw))
    # Interrupts empty the prefix cache, so half of the worlds know none.
    weights = {name: weight for name, weight in OPERATIONS.items() if seed % 2 or name not in DISTURBANCES}
    for name in rng.choices(list(weights), list(weights.values()), k=operations):
        world.do(name, draw)
    world.close()
    return world
