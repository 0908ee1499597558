"""Memory of a step that a collective reads or fills, and who runs collectives. Knows no torch."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.program import ITEM_BYTES, Step

NUMPY = {"fp32": np.float32, "fp16": np.float16, "u8": np.uint8, "i32": np.int32, "i64": np.int64}


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


def array_of(region: Region) -> NDArray[Any]:
    """A view of memory of this machine, of a dtype that numpy has."""
    count = math.prod(region.shape)
    memory = (ctypes.c_uint8 * (count * ITEM_BYTES[region.dtype])).from_address(region.address)
    return np.frombuffer(memoryview(memory), NUMPY[region.dtype], count).reshape(region.shape)


class Collectives(Protocol):
    """What a runner of one rank of several asks for between its segments."""

    def run(self, step: Step, inputs: Sequence[Region | None], outputs: Sequence[Region]) -> None:
        """Take part in a collective with all ranks of step.axis; outputs are filled when it returns.

        inputs  in the order of the op's arguments that are tensors (compiler/ops/collectives.py); None: not given
        Raises ExecutionError, which names the rank at fault, where one does not take part in time.
        """
        ...


NUM_OUTPUTS = {"dispatch": 4, "arrived": 4}  # one of all others


def read_and_filled(step: Step, regions: Sequence[Region | None]) -> tuple[list[Region | None], list[Region]]:
    """What a collective reads and what it fills, of the regions of its arguments.

    A buffer may have other axes than the value that is read from it (heads and their widths, for channels), so what is
    joined or cut along an axis gets those of the result.
    """
    split = len(regions) - NUM_OUTPUTS.get(step.kernel, 1)
    inputs, outputs = list(regions[:split]), [region for region in regions[split:] if region is not None]
    if step.kernel in ("all_gather", "reduce_scatter") and inputs[0] is not None:
        dim, size = (int(option) for option in step.options)
        shape = list(outputs[0].shape)
        shape[dim] = shape[dim] // size if step.kernel == "all_gather" else shape[dim] * size
        inputs[0] = replace(inputs[0], shape=tuple(shape))
    return inputs, outputs
