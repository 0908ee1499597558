"""Collectives in order; a dispatch that is awaited later runs beside what lies between."""

import threading
from collections.abc import Sequence

import pytest

from octavo.compiler.errors import ExecutionError
from octavo.compiler.program import Program, Step
from octavo.runtime.meetings import Meetings
from octavo.runtime.regions import Region

DISPATCH, ARRIVED, COMBINE = (Step(name, (), axis="dp") for name in ("dispatch", "arrived", "combine"))
NOTHING: tuple[list[Region | None], list[Region]] = ([], [])


class Slow:
    """A collective that ends when it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.log, self.error = threading.Event(), [], error  # type: ignore[var-annotated]

    def run(self, step: Step, inputs: Sequence[Region | None], outputs: Sequence[Region]) -> None:
        if step.kernel == "dispatch":
            assert self.go.wait(10)
        if self.error is not None:
            raise self.error
        self.log.append(step.kernel)


def meetings(collectives: Slow, *steps: Step) -> Meetings:
    return Meetings(Program((), steps, "0", 4), collectives)


def test_a_dispatch_that_is_awaited_does_not_wait() -> None:
    slow = Slow()
    between = meetings(slow, DISPATCH, ARRIVED, COMBINE)
    between.meet(DISPATCH, NOTHING)
    assert slow.log == []  # it is on its way
    slow.go.set()
    between.meet(ARRIVED, NOTHING)
    between.meet(COMBINE, NOTHING)
    assert slow.log == ["dispatch", "combine"]


def test_a_dispatch_that_nothing_awaits_ends_at_once() -> None:
    slow = Slow()
    slow.go.set()
    meetings(slow, DISPATCH, COMBINE).meet(DISPATCH, NOTHING)
    assert slow.log == ["dispatch"]


def test_what_failed_on_its_way_is_raised_on_arrival_and_forgotten_by_the_next_step() -> None:
    slow = Slow(ExecutionError("rank 1 is gone"))
    slow.go.set()
    between = meetings(slow, DISPATCH, ARRIVED, COMBINE)
    between.meet(DISPATCH, NOTHING)
    with pytest.raises(ExecutionError, match="rank 1 is gone"):
        between.meet(ARRIVED, NOTHING)
    between.meet(DISPATCH, NOTHING)
    between.forget()
    slow.error = None
    between.meet(DISPATCH, NOTHING)
    between.meet(ARRIVED, NOTHING)
    assert slow.log == ["dispatch"]
