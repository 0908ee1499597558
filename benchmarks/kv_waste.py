"""KV memory that holds nothing: contiguous, power-of-two and paged, on request lengths of published shapes.

    python -m benchmarks.kv_waste --requests 400 --plot build/kv_waste.png

All requests are there at the beginning; the first that fit run, each grows by a token a step, and one that ends makes
room for the next. contiguous: every request is given room for the longest (2048 tokens). power of two: the next power
of two of its final length, known beforehand within a factor of two as in Orca (Pow2), from a buddy allocator. paged:
PagedMemory as the engine uses it, which knows nothing beforehand; when it is full the youngest request gives way and
comes again later. Figures are means over steps while requests wait.
"""

import argparse
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console

from benchmarks.traces import CHAT, INSTRUCTIONS, MAX_LEN, Buddies
from octavo.compiler.errors import OutOfPages
from octavo.compiler.report import plain_table, titled
from octavo.runtime.paged_memory import PagedMemory, PageTable
from octavo.runtime.prefix_cache import SHARED_KEY

PAGE_SIZES = (8, 16, 32, 64)
LONG = 200  # a sequence above this many tokens is a long one
LONG_TARGET = 0.04
WIDTHS = (2, 4, 6)
SHARING_PAGE = 16


@dataclass(eq=False)
class Growing:
    """A request under way: tokens now and at its end, and what it holds."""

    length: int
    end: int
    table: PageTable | None = None
    block: tuple[int, int] = (0, 0)


class Memory(Protocol):
    """A way to give requests memory. admit and grow: False where there is none left."""

    def admit(self, sequence: Growing) -> bool: ...

    def grow(self, sequence: Growing) -> bool: ...

    def release(self, sequence: Growing) -> None: ...

    def held(self, sequence: Growing) -> int: ...


class Contiguous:
    def __init__(self, size: int) -> None:
        self._left = size

    def admit(self, sequence: Growing) -> bool:
        if self._left < MAX_LEN:
            return False
        self._left -= MAX_LEN
        return True

    def grow(self, sequence: Growing) -> bool:
        return True

    def release(self, sequence: Growing) -> None:
        self._left += MAX_LEN

    def held(self, sequence: Growing) -> int:
        return MAX_LEN


class PowersOfTwo:
    def __init__(self, size: int) -> None:
        self._buddies = Buddies(size)

    def admit(self, sequence: Growing) -> bool:
        block = self._buddies.allocate(sequence.end)
        if block is not None:
            sequence.block = block
        return block is not None

    def grow(self, sequence: Growing) -> bool:
        return True

    def release(self, sequence: Growing) -> None:
        self._buddies.free(sequence.block)

    def held(self, sequence: Growing) -> int:
        return sequence.block[1]


class Paged:
    def __init__(self, size: int, page_size: int) -> None:
        self.memory = PagedMemory(size // page_size + 1, page_size, use_prefix_cache=False)

    def admit(self, sequence: Growing) -> bool:
        table = self.memory.new_table(SHARED_KEY)
        try:
            self.memory.admit(table, [0] * sequence.length, SHARED_KEY)
        except OutOfPages:
            return False
        self.memory.commit(table, (), sequence.length)
        sequence.table = table
        return True

    def grow(self, sequence: Growing) -> bool:
        assert sequence.table is not None
        try:
            self.memory.reserve(sequence.table, sequence.length + 1)
        except OutOfPages:
            return False
        self.memory.commit(sequence.table, (), sequence.length + 1)
        return True

    def release(self, sequence: Growing) -> None:
        assert sequence.table is not None
        self.memory.release(sequence.table)

    def held(self, sequence: Growing) -> int:
        assert sequence.table is not None
        return self.memory.page_size * len(sequence.table.groups[0])


@dataclass(frozen=True)
class Replay:
    """waste: share of held slots without a token; fit: requests that ran at once; both means over steps.

    Of sequences above LONG tokens, over steps: long_waste and what the rule (page - 1) / 2 / length says.
    """

    waste: float
    fit: float
    long_waste: float
    long_rule: float


def replay(memory: Memory, lengths: Sequence[tuple[int, int]], page_size: int = 1) -> Replay:
    waiting = deque(Growing(prompt, prompt + output) for prompt, output in lengths)
    running: list[Growing] = []
    wastes: list[float] = []
    fits: list[int] = []
    long_waste, long_rule, num_long = 0.0, 0.0, 0
    while True:
        while waiting and memory.admit(waiting[0]):
            running.append(waiting.popleft())
        if not waiting:
            assert fits, f"expected more requests than memory holds at once, got {len(lengths)}"
            return Replay(
                float(np.mean(wastes)), float(np.mean(fits)), long_waste / max(1, num_long),
                long_rule / max(1, num_long),
            )  # fmt: skip
        held = [memory.held(sequence) for sequence in running]
        wastes.append(1 - sum(sequence.length for sequence in running) / sum(held))
        fits.append(len(running))
        for sequence, own in zip(running, held, strict=True):
            if sequence.length > LONG:
                long_waste += 1 - sequence.length / own
                long_rule += (page_size - 1) / 2 / sequence.length
                num_long += 1
        step(memory, running, waiting)


def step(memory: Memory, running: list[Growing], waiting: deque[Growing]) -> None:
    """A token more for each, oldest first; who is at its end leaves, and the youngest gives way to others."""
    for sequence in list(running):
        if sequence not in running:
            continue
        if sequence.length == sequence.end:
            memory.release(sequence)
            running.remove(sequence)
            continue
        while sequence in running and not memory.grow(sequence):
            victim = running.pop()
            memory.release(victim)
            waiting.appendleft(victim)
        if sequence in running:
            sequence.length += 1


def sharing_saved(
    lengths: Sequence[tuple[int, int]], branches: int, move_rate: float, page_size: int
) -> float:
    """The share of pages that forks save against as many sequences alone, over all steps of all requests.

    move_rate  how often a sequence goes on from a random other one, as beams do: 0 for parallel sampling
    """
    random = np.random.default_rng(1)
    alone = shared = 0
    for prompt, output in lengths:
        memory = PagedMemory(
            1 + branches * (-(-(prompt + output) // page_size) + 1), page_size, use_prefix_cache=False
        )
        first = memory.new_table(SHARED_KEY)
        memory.admit(first, [0] * prompt, SHARED_KEY)
        memory.commit(first, (), prompt)
        tables = [first, *(memory.fork(first) for _ in range(branches - 1))]
        for length in range(prompt + 1, prompt + output + 1):
            for table in tables:
                memory.reserve(table, length)
                memory.commit(table, (), length)
            alone += sum(len(table.groups[0]) for table in tables)
            shared += memory.pool.capacity - memory.pool.num_free
            if move_rate:
                parents = np.where(
                    random.random(branches) < move_rate,
                    random.integers(0, branches, branches),
                    range(branches),
                )
                old, tables = tables, [memory.fork(tables[parent]) for parent in parents]
                for table in old:
                    memory.release(table)
        memory.check(tables)
    return 1 - shared / alone


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--requests", type=int, default=400, help="chats; 5 times as many instructions (default: 400)"
    )
    parser.add_argument(
        "--slots", type=int, default=1 << 14, help="tokens that memory holds (default: 16384)"
    )
    parser.add_argument("--forked", type=int, default=40, help="requests that fork (default: 40)")
    parser.add_argument("--move-rate", type=float, default=0.25, help="of beams, a step (default: 0.25)")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths (default: 0)")
    parser.add_argument("--plot", type=Path, default=Path("build/kv_waste.png"), help="default: %(default)s")
    options = parser.parse_args()
    replays, saved = {}, {}
    for shape, count in ((CHAT, options.requests), (INSTRUCTIONS, 5 * options.requests)):
        lengths = shape.draw(count, options.seed)
        replays[shape.name] = {
            "contiguous": replay(Contiguous(options.slots), lengths),
            "power of two": replay(PowersOfTwo(options.slots), lengths),
            **{
                f"paged, {size}": replay(Paged(options.slots, size), lengths, size) for size in PAGE_SIZES
            },
        }  # fmt: skip
        for name, rate in (("parallel", 0.0), ("beams", options.move_rate)):
            for width in WIDTHS:
                forked = lengths[: options.forked]
                saved[shape.name, name, width] = sharing_saved(forked, width, rate, SHARING_PAGE)
        show_shape(shape.name, lengths, replays[shape.name], options)
    show_sharing(saved, options)
    options.plot.parent.mkdir(parents=True, exist_ok=True)
    draw(replays, saved).savefig(options.plot, dpi=120)
    print(f"picture: {options.plot}")


def show_shape(
    name: str, lengths: Sequence[tuple[int, int]], replays: Mapping[str, Replay], options: argparse.Namespace
) -> None:
    prompt, output = np.mean(lengths, axis=0)
    title = (
        f"{name}: {len(lengths)} requests, mean prompt {prompt:.0f} and output {output:.0f} tokens, "
        f"{options.slots} slots"
    )
    table = plain_table(
        "memory", "waste %", "run at once", f"waste % above {LONG}", "rule %", left=("memory",)
    )
    for kind, result in replays.items():
        is_paged = kind.startswith("paged")
        long = (f"{100 * result.long_waste:.2f}", f"{100 * result.long_rule:.2f}") if is_paged else ("", "")
        table.add_row(kind, f"{100 * result.waste:.1f}", f"{result.fit:.1f}", *long)
    Console(highlight=False, width=100).print(titled(title, table))
    wanted = f"wanted: under {100 * LONG_TARGET:.0f}"
    waste = 100 * replays[f"paged, {SHARING_PAGE}"].long_waste
    print(f"waste of sequences above {LONG} tokens at page {SHARING_PAGE}: {waste:.2f} % ({wanted})")
    print("rule: (page - 1) / 2 / length, averaged over the same sequences and steps")
    print()


def show_sharing(saved: Mapping[tuple[str, str, int], float], options: argparse.Namespace) -> None:
    title = (
        f"pages saved by sharing, %, page {SHARING_PAGE}, {options.forked} requests; a beam goes on from a random "
        f"one in {100 * options.move_rate:.0f} % of steps"
    )
    table = plain_table("requests", "search", *map(str, WIDTHS), left=("requests", "search"))
    for shape, search in dict.fromkeys((shape, search) for shape, search, _ in saved):
        table.add_row(shape, search, *(f"{100 * saved[shape, search, width]:.1f}" for width in WIDTHS))
    Console(highlight=False, width=100).print(titled(title, table))


def draw(replays: Mapping[str, Mapping[str, Replay]], saved: Mapping[tuple[str, str, int], float]) -> Figure:
    """Waste, requests at once, and pages saved: a group of bars for each kind, a bar for each shape."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    waste, fit, sharing = figure.subplots(1, 3)
    kinds = list(next(iter(replays.values())))
    searches = list(dict.fromkeys((search, width) for _, search, width in saved))
    for index, (shape, results) in enumerate(replays.items()):
        for axes, values, form in (
            (waste, [100 * results[kind].waste for kind in kinds], "%.1f"),
            (fit, [results[kind].fit for kind in kinds], "%.0f"),
            (sharing, [100 * saved[shape, *search] for search in searches], "%.0f"),
        ):
            places = np.arange(len(values)) + 0.4 * index - 0.2
            bars = axes.bar(places, values, 0.38, label=shape)
            axes.bar_label(bars, fmt=form, fontsize=7)
    for axes, title, names in (
        (waste, "KV slots held without a token, %", kinds),
        (fit, "requests that run at once", kinds),
        (sharing, "pages saved by sharing, %", [f"{search} {width}" for search, width in searches]),
    ):
        axes.set_title(title)
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    waste.legend(frameon=False)
    return figure


if __name__ == "__main__":
    main()
