"""The engine's figures beside an answer that comes, on a terminal's standard error, and what is left of them."""

import os
import sys
import time
from collections import deque
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from octavo.compiler.report import size_text
from octavo.runtime.engine import Engine
from octavo.runtime.kv_cache import PageState
from octavo.runtime.stats import Snapshot

PERIOD_S = 0.25
BAR_WIDTH = 32
TAIL_ROWS = 6
# Rates are of the last second or so.
_KEPT = 5
_LOOKS = {
    PageState.PRIVATE: ("█", "green"),
    PageState.SHARED: ("▓", "cyan"),
    PageState.CACHED: ("▒", "yellow"),
    PageState.CLEAN: ("░", "bright_black"),
}


class LiveStats:
    """Draws the figures while it is entered, and remembers those of the step that held most pages.

    It is never drawn by a thread of its own: a snapshot is of the moment between two steps, and the caller of
    `tick` knows that it is there. What is written by `write` goes to standard output; where both are the same
    terminal, an unfinished line is shown above the figures until it ends.

    is_on  otherwise it does nothing but write
    """

    def __init__(self, engine: Engine, is_on: bool) -> None:
        self._engine = engine
        self._is_on = is_on
        self._fullest = engine.snapshot()
        self._drawn: deque[Snapshot] = deque([self._fullest], _KEPT)
        self._live: Live | None = None
        self._line: str | None = None  # not None: this class writes in the place of standard output
        self._next_s = 0.0
        self._num_steps = 0

    def __enter__(self) -> "LiveStats":
        console = Console(stderr=True)
        if self._is_on and console.is_terminal:
            self._line = "" if _is_one_terminal() else None
            self._live = Live(
                self._picture(self._fullest), console=console, auto_refresh=False, transient=True,
                redirect_stdout=False, redirect_stderr=False,
            )  # fmt: skip
            self._live.start(refresh=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        rest, self._line = self._line, None
        if rest:
            print(rest, end="", flush=True)

    def tick(self) -> None:
        """Look at the figures after a step, and draw them if it is time."""
        if not self._is_on or self._engine.stats.num_steps == self._num_steps:
            return
        self._num_steps = self._engine.stats.num_steps
        now = self._engine.snapshot()
        if now.held_pages > self._fullest.held_pages:
            self._fullest = now
        if self._live is not None and time.perf_counter() >= self._next_s:
            self._next_s = time.perf_counter() + PERIOD_S
            self._live.update(self._picture(now), refresh=True)
            self._drawn.append(now)

    def write(self, text: str) -> None:
        if self._line is None or self._live is None:
            print(text, end="", flush=True)
            return
        *whole, self._line = (self._line + text).split("\n")
        for line in whole:
            self._live.console.print(Text(line), soft_wrap=True)
        self._live.update(self._picture(self._drawn[-1]), refresh=True)

    def summary(self) -> RenderableType:
        """Pages at the fullest moment that was seen, and counts and rates of all."""
        now = self._engine.snapshot()
        return figures(self._fullest, now, now, "most pages")

    def _picture(self, now: Snapshot) -> RenderableType:
        shown = figures(now, now, now.since(self._drawn[0]), "pages")
        if not self._line:
            return shown
        width = self._live.console.width if self._live is not None else 80
        return Group(Text(self._line[-width * TAIL_ROWS :]), shown)


def figures(pages: Snapshot, counts: Snapshot, rates: Snapshot, name: str) -> RenderableType:
    """Four lines: pages by state, what is in them, requests, tokens."""
    by_state = ", ".join(f"{pages.pages[state]} {state.value}" for state in _LOOKS)
    held = size_text(pages.held_pages * pages.page_bytes)
    preemptions = f"{counts.num_preemptions} preemptions ({counts.num_swaps} swapped out)"
    return Group(
        Text.assemble(f"{name} ", _bar(pages), f" {held} held, {100 * pages.waste:.1f} % unused"),
        Text(f"  {by_state}"),
        Text(
            f"  requests: {pages.num_running} running, {pages.num_waiting} waiting, {pages.num_swapped} swapped; "
            f"{preemptions}"
        ),
        Text(
            f"  tokens/s: {rates.generated_per_second:.1f} generated, {rates.prefill_per_second:.1f} prefill; "
            f"prefix hits {100 * counts.hit_rate:.1f} %, {counts.num_evictions} evictions"
        ),
    )


def _bar(snapshot: Snapshot) -> Text:
    """A state that has pages has a cell at least; clean pages have what is left."""
    total = sum(snapshot.pages[state] for state in _LOOKS)
    bar = Text()
    num_later = sum(snapshot.pages[state] > 0 for state in _LOOKS)
    for state, (cell, style) in _LOOKS.items():
        count = snapshot.pages[state]
        num_later -= count > 0
        wanted = max(1, round(BAR_WIDTH * count / total)) if count else 0
        left = BAR_WIDTH - len(bar) - num_later
        bar.append(cell * (left if state is PageState.CLEAN else min(wanted, left)), style)
    return bar


def _is_one_terminal() -> bool:
    """Whether standard output and standard error are the same terminal."""
    try:
        ids = [os.fstat(stream.fileno()).st_rdev for stream in (sys.stdout, sys.stderr)]
    except (OSError, ValueError):
        return False
    return sys.stdout.isatty() and ids[0] == ids[1]
