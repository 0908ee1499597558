"""Phases of a long piece of work: a bar for each on a terminal's standard error, and how long each took."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text


class Report(Protocol):
    """Called with the name of the work at hand, how many are done and how many there are."""

    def __call__(self, name: str, done: int, total: int) -> None: ...


class Bars(Protocol):
    """Begins a phase, which ends the one before, and gives its bar. seconds: of the phases that ended."""

    seconds: dict[str, float]

    def __call__(self, phase: str) -> Report: ...


class _Count(ProgressColumn):
    """3/16, and nothing where there is one piece of work."""

    def render(self, task: Task) -> Text:
        many = task.total is not None and task.total > 1
        return Text(f"{int(task.completed)}/{int(task.total or 0)}" if many else "")


class _Phases:
    """Times the phases; draws nothing."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._phase = ""
        self._began = 0.0

    def __call__(self, phase: str) -> Report:
        self.end()
        self._phase, self._began = phase, time.perf_counter()
        return self._bar(phase)

    def end(self) -> None:
        """End the open phase. A phase that comes twice counts both times."""
        if self._phase:
            spent = time.perf_counter() - self._began
            self.seconds[self._phase] = self.seconds.get(self._phase, 0.0) + spent
            self._phase = ""

    def _bar(self, phase: str) -> Report:
        return lambda name, done, total: None

    def __enter__(self) -> "_Phases":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()


class _Drawn(_Phases):
    """Draws one line for each phase; the lines vanish at the end, also of work that is interrupted."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._task: TaskID | None = None
        self._progress = Progress(
            TextColumn("{task.fields[phase]:<8}"),
            BarColumn(24),
            _Count(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            console=console,
            transient=True,
        )

    def _bar(self, phase: str) -> Report:
        task = self._task = self._progress.add_task("", total=None, phase=phase)

        def update(name: str, done: int, total: int) -> None:
            # One piece of work says nothing of how far it is: the bar moves to show that something happens.
            self._progress.update(task, description=name, completed=done, total=total if total > 1 else None)

        return update

    def end(self) -> None:
        if self._task is not None:
            self._progress.update(self._task, description="", total=1, completed=1)
            self._progress.stop_task(self._task)
            self._task = None
        super().end()

    def __enter__(self) -> "_Drawn":
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._progress.stop()


@contextmanager
def progress_bars(show: bool | None = None) -> Iterator[Bars]:
    """show None: on a terminal only. Nothing else may draw bars meanwhile."""
    drawn = sys.stderr.isatty() if show is None else show
    with _Drawn(Console(stderr=True)) if drawn else _Phases() as phases:
        yield phases
