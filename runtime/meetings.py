"""The collectives of a step in order; a dispatch that is awaited later runs beside the kernels in between."""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise

from octavo.compiler.program import Program, Step
from octavo.runtime.regions import Collectives, Region

Regions = tuple[Sequence[Region | None], Sequence[Region]]


class Meetings:
    """Where one rank meets the others, one collective at a time."""

    def __init__(self, program: Program, collectives: Collectives) -> None:
        self._collectives = collectives
        steps = program.collectives
        self._early = {
            id(step) for step, then in pairwise(steps)
            if step.kernel == "dispatch" and then.kernel == "arrived"
        }  # fmt: skip
        self._pool = ThreadPoolExecutor(1, "dispatch") if self._early else None
        self._travelling: Future[None] | None = None

    def meet(self, step: Step, regions: Regions) -> None:
        """Run a collective, start one, or wait for that which was started; raises what it raised."""
        if step.kernel == "arrived":
            travelling, self._travelling = self._travelling, None
            assert travelling is not None, "nothing was sent that could arrive"
            travelling.result()
        elif id(step) in self._early:
            assert self._pool is not None and self._travelling is None
            self._travelling = self._pool.submit(self._collectives.run, step, *regions)
        else:
            self._collectives.run(step, *regions)

    def forget(self) -> None:
        """After a step that ended early: wait for what it had sent, whatever became of it."""
        travelling, self._travelling = self._travelling, None
        if travelling is not None:
            travelling.exception()
