"""Memory of a step that a collective reads or fills, and who runs collectives. Knows no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from octavo.compiler.program import Step


@dataclass(frozen=True)
class Region:
    """A tensor in a runner's memory, contiguous.

    dtype    a name of program.ITEM_BYTES
    device   "cpu" or "cuda"
    """

    dtype: str
    shape: tuple[int, ...]
    address: int
    device: str = "cpu"


class Collectives(Protocol):
    """What a runner of one rank of several asks for between its segments."""

    def run(self, step: Step, inputs: Sequence[Region | None], outputs: Sequence[Region]) -> None:
        """Take part in a collective with all ranks of step.axis; outputs are filled when it returns.

        inputs  in the order of the op's arguments that are tensors (compiler/ops/collectives.py); None: not given
        Raises ExecutionError, which names the rank at fault, where one does not take part in time.
        """
        ...


NUM_OUTPUTS = {"dispatch": 4}  # one of all others
