"""What a program on a GPU makes: logits, fetched behind every step, and hidden states, fetched where they are asked."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.program import ITEM_BYTES, Program
from octavo.runtime.cuda_memory import ALIGNMENT, DeviceMemory, Region
from octavo.runtime.features import HOLDERS, joined
from octavo.runtime.model_runner import num_bytes


class Outputs:
    """One region of device memory, logits first, and page-locked memory as large."""

    def __init__(self, memory: DeviceMemory, program: Program) -> None:
        self._memory = memory
        self._logits, *self._hidden_states = program.of_kind("output")
        self._region = Region(memory, 0)
        self._host = memory.allocate_host(1)

    def num_bytes(self, dims: Mapping[str, int]) -> int:
        """Of a step of these sizes."""
        return self._starts(dims)[""]

    def grow(self, num_bytes: int) -> bool:
        """Hold so much at least; whether addresses changed. The device must be done with the old memory."""
        if not self._region.grow(num_bytes):
            return False
        self._memory.free_host(self._host)
        self._host = self._memory.allocate_host(num_bytes)
        return True

    def places(self, dims: Mapping[str, int]) -> dict[str, int]:
        """The address of every output in a step of these sizes."""
        starts = self._starts(dims)
        return {b.name: self._region.address + starts[b.name] for b in (self._logits, *self._hidden_states)}

    def logits(self, count: int, width: int, stream: int) -> NDArray[np.float32]:
        """Of the first rows, (count, width), once all work is done."""
        size = count * width * ITEM_BYTES["fp32"]
        found = self._fetch(0, size, stream)
        self._memory.driver.synchronize(stream)
        return found.view(np.float32).reshape(count, width)

    def features(self, dims: Mapping[str, int], num_tokens: int, stream: int) -> NDArray[np.generic] | None:
        """Of the first tokens of a step of these sizes, (num_tokens, F); None where the program makes none."""
        starts, found = self._starts(dims), []
        for buffer in self._hidden_states:
            size = num_bytes(buffer, {**dims, "T": num_tokens})
            content = self._fetch(starts[buffer.name], size, stream)
            found.append(content.view(HOLDERS[buffer.dtype]).reshape(num_tokens, -1))
        if found:
            self._memory.driver.synchronize(stream)
        return joined(found)

    def _fetch(self, start: int, size: int, stream: int) -> NDArray[np.uint8]:
        """Bytes of the region, on the host when the stream has come so far."""
        host = self._host[start : start + size]
        if size:
            self._memory.driver.download(host, self._region.address + start, stream)
        return host

    def _starts(self, dims: Mapping[str, int]) -> dict[str, int]:
        """Where each output begins; "": the end of all."""
        starts, end = {}, 0
        for buffer in (self._logits, *self._hidden_states):
            starts[buffer.name] = end
            end += -(-num_bytes(buffer, dims) // ALIGNMENT) * ALIGNMENT
        return {**starts, "": end}
