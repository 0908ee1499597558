"""All ranks of an artifact in one process, one after another between collectives: what torchrun starts as processes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from octavo.compiler.artifact import Artifact
from octavo.compiler.mesh import Mesh
from octavo.compiler.program import Step
from octavo.compiler.simulate_collectives import COLLECTIVES
from octavo.runtime.batch import Batch
from octavo.runtime.collectives import tensor_of
from octavo.runtime.distributed_runner import no_tokens
from octavo.runtime.model_runner import NativeRunner
from octavo.runtime.page_moves import Move


class SimulatedRunner:
    """The first rank's logits. Along dp the batch is the first rank's, and the others have no tokens.

    It is for proofs and for looking: ranks take turns, so nothing is faster than on one.
    """

    def __init__(
        self, artifact: Artifact, num_pages: int | None = None, num_threads: int | None = None,
        num_host_pages: int = 0,
    ) -> None:  # fmt: skip
        self.mesh: Mesh = artifact.program.mesh
        self.program = artifact.program
        first = NativeRunner(artifact, num_pages, num_threads, num_host_pages)
        rest = [
            NativeRunner(artifact, first.num_pages, num_threads, num_host_pages, rank)
            for rank in range(1, self.mesh.world)
        ]
        self.ranks = [first, *rest]
        self.num_pages, self.page_size = first.num_pages, first.page_size
        self.num_host_pages, self.page_windows = num_host_pages, first.page_windows
        self.page_bytes = first.page_bytes

    def move_pages(self, moves: Sequence[Move]) -> None:
        for rank in self.ranks:
            rank.move_pages(moves)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        others = dataclasses.replace(
            no_tokens(len(self.page_windows)), row_ranks=np.zeros(len(batch.input_ids), np.int64)
        )
        first = dataclasses.replace(batch, row_ranks=others.row_ranks) if self.mesh.dp > 1 else batch
        batches = [
            first if self.mesh.coordinates(rank)["dp"] == 0 else others for rank in range(self.mesh.world)
        ]
        return self.run_all(batches)[0]

    @property
    def features(self) -> NDArray[np.generic] | None:
        return self.ranks[0].features

    def run_all(self, batches: Sequence[Batch]) -> list[NDArray[np.float32]]:
        """A step of every rank with a batch of its own; their logits."""
        for rank, batch in zip(self.ranks, batches, strict=True):
            rank.begin(batch)
            rank.run_segment(0)
        for segment, step in enumerate(self.program.collectives, 1):
            self._together(step)
            for rank in self.ranks:
                rank.run_segment(segment)
        return [rank.logits() for rank in self.ranks]

    def _together(self, step: Step) -> None:
        if step.kernel == "arrived":
            return  # nothing travels here
        regions = [rank.regions(step) for rank in self.ranks]
        for group in self.mesh.groups(step.axis):
            given: list[tuple[Any, ...]] = []
            for rank in group:
                inputs = [None if region is None else tensor_of(region) for region in regions[rank][0]]
                given.append((*_as_in_graphs(step, inputs), *step.options, step.axis))
            if step.kernel in ("all_gather", "reduce_scatter"):
                given = [(x, dim, axis, size) for x, dim, size, axis in given]
            for rank, result in zip(group, COLLECTIVES[step.kernel](given), strict=True):
                made = result if isinstance(result, tuple) else (result,)
                for region, value in zip(regions[rank][1], made, strict=True):
                    tensor_of(region).copy_(value.reshape(region.shape))


def _as_in_graphs(step: Step, inputs: Sequence[Tensor | None]) -> list[Tensor | None]:
    """With the leading 1 of token values: all of dispatch but row_ranks and outer, all of combine but source."""
    flat = {"dispatch": (3, 4), "combine": (1,)}.get(step.kernel, ())
    return [x if x is None or i in flat else x[None] for i, x in enumerate(inputs)]
