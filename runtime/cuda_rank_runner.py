"""One rank of several on a GPU of its own: kernels from the artifact, collectives between them by torch.distributed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.artifact import Artifact
from octavo.compiler.expert_placement import ExpertPlacement
from octavo.compiler.program import Step
from octavo.runtime.batch import Batch
from octavo.runtime.cuda import Driver
from octavo.runtime.cuda_launch import Sizes
from octavo.runtime.cuda_runner import DEFAULT_MAX_REQUESTS, CudaRunner
from octavo.runtime.expert_layers import CountsExperts, placed_weights
from octavo.runtime.meetings import Meetings
from octavo.runtime.regions import NUMPY, Collectives, Region, read_and_filled


class Meeting(NamedTuple):
    """A collective with the memory that it reads and fills, and the places of every buffer when it is reached."""

    step: Step
    inputs: list[Region | None]
    outputs: list[Region]
    places: Mapping[str, int]
    sizes: Sizes


class CudaRankRunner(CountsExperts, CudaRunner):
    """Steps are launched kernel by kernel and not from CUDA graphs, as a collective ends on the host; none is padded.

    agree  makes of the pages that this rank has room for those that all ranks of its batch have
    Others as of CudaRunner.
    """

    def __init__(
        self, artifact: Artifact, collectives: Collectives, rank: int, num_pages: int | None = None,
        num_host_pages: int = 0, *, agree: Callable[[int], int], max_requests: int = DEFAULT_MAX_REQUESTS,
        driver: Driver | None = None,
    ) -> None:  # fmt: skip
        self._meetings = Meetings(artifact.program, collectives)
        self._agree = agree
        self._artifact = artifact
        self._buffers = {buffer.name: buffer for buffer in artifact.program.buffers}
        super().__init__(
            artifact, num_pages, num_host_pages=num_host_pages, max_requests=max_requests, graphs=False,
            driver=driver, rank=rank,
        )  # fmt: skip

    def _default_num_pages(self) -> int:
        return self._agree(super()._default_num_pages())

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits (L, vocab), valid until the next run; all ranks run a step together."""
        self._driver.activate()
        self._meetings.forget()
        self._driver.synchronize(self._stream)
        self._run_eagerly(batch.inputs, {**batch.dims, "num_pages": self.num_pages})
        return self._download(batch.dims["L"])

    def _prepare(self, step: Step, places: Mapping[str, int], sizes: Sizes) -> Any:
        if not step.axis:
            return super()._prepare(step, places, sizes)
        regions = [self._device_region(str(name), places, sizes) if name else None for name in step.args]
        return Meeting(step, *read_and_filled(step, regions), places, sizes)

    def _device_region(self, name: str, places: Mapping[str, int], sizes: Sizes) -> Region:
        buffer = self._buffers[name]
        shape = tuple(int(sizes(size)) for size in buffer.shape)
        return Region(buffer.dtype, shape, places[name], "cuda")

    def _launch(self, launches: list[tuple[str, Any]]) -> None:
        """Kernels in order; where ranks meet, all that was launched is waited for."""
        segment: list[tuple[str, Any]] = []
        number = 0
        for name, prepared in launches:
            if not isinstance(prepared, Meeting):
                segment.append((name, prepared))
                continue
            super()._launch(segment)
            self._driver.synchronize(self._stream)
            if self._loads is not None:
                self._loads.see(number, lambda buffer, at=prepared: self._read(buffer, at))  # type: ignore[misc]
            self._meetings.meet(prepared.step, (prepared.inputs, prepared.outputs))
            segment, number = [], number + 1
        super()._launch(segment)

    def _read(self, name: str, at: Meeting) -> NDArray[Any]:
        """A buffer's content, on the host."""
        region = self._device_region(name, at.places, at.sizes)
        array: NDArray[Any] = np.empty(region.shape, NUMPY[region.dtype])
        self._driver.download(array.reshape(-1).view(np.uint8), region.address, self._stream)
        self._driver.synchronize(self._stream)
        return array

    def place_experts(self, placements: Sequence[ExpertPlacement], loads: NDArray[Any] | None = None) -> None:
        """As NativeRunner.place_experts: the new experts are copied over those that were there."""
        self._driver.activate()
        for name, held in placed_weights(self._artifact, self.rank, placements, loads).items():
            content = np.ascontiguousarray(held).reshape(-1).view(np.uint8)
            self._driver.upload(self.addresses[name], content, self._stream)
            self._driver.synchronize(self._stream)
