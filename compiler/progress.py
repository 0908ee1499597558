"""A progress bar on a terminal's standard error, and nothing elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class Report(Protocol):
    """Called with the name of the work at hand, how many are done and how many there are."""

    def __call__(self, name: str, done: int, total: int) -> None: ...


class Bars(Protocol):
    """Gives the bar of one phase of the work."""

    def __call__(self, phase: str) -> Report: ...


@contextmanager
def progress_bars(show: bool | None) -> Iterator[Bars]:
    """show None: on a terminal only. The bars vanish when the work ends or is interrupted."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda phase: lambda name, done, total: None
        return
    columns = (
        TextColumn("{task.fields[phase]:<9}"), BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:

        def start(phase: str) -> Report:
            task = progress.add_task("", total=None, phase=phase)

            def update(name: str, done: int, total: int) -> None:
                progress.update(task, description=name, completed=done, total=total)

            return update

        yield start
