"""Runs an artifact's lowered graph with the eager references: the fall-back where no C++ compiler is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.fx import GraphModule

from octavo.compiler.artifact import Artifact
from octavo.compiler.build import LOWERED_GRAPH
from octavo.compiler.dims import DTYPE_NAMES
from octavo.compiler.dump_load import load_graph
from octavo.compiler.program import FEATURES
from octavo.runtime.batch import Batch
from octavo.runtime.features import HOLDERS, check_features, joined
from octavo.runtime.model_runner import default_num_pages, page_bytes
from octavo.runtime.page_moves import HostPages, Move

RAW = {HOLDERS[name]: dtype for dtype, name in DTYPE_NAMES.items() if name in HOLDERS}
TORCH = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class EagerRunner:
    """A ModelRunner in plain torch: the same graph and pages, many times slower than the host program."""

    def __init__(self, artifact: Artifact, num_pages: int | None = None, num_host_pages: int = 0) -> None:
        self.page_size = artifact.program.page_size
        self.page_windows = artifact.program.page_windows
        self.page_bytes = page_bytes(artifact.program)
        self.num_pages = default_num_pages(artifact) if num_pages is None else num_pages
        weights = {
            name: _tensor(weight.array, weight.dtype, weight.shape)
            for name, weight in artifact.weights.items()
        }
        self.graph_module: GraphModule = load_graph(artifact.read(LOWERED_GRAPH).decode(), weights)
        self.caches = {
            b.name: torch.zeros([self.num_pages, *(int(d) for d in b.shape[1:])], dtype=TORCH[b.dtype])
            for b in artifact.program.of_kind("cache")
        }
        self.num_host_pages = num_host_pages
        pages = [cache.view(self.num_pages, -1).view(torch.uint8).numpy() for cache in self.caches.values()]
        self._pages = HostPages(pages, num_host_pages)
        self.features: NDArray[np.generic] | None = None
        self.program = artifact.program

    def move_pages(self, moves: Sequence[Move]) -> None:
        self._pages.move(moves)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        inputs: dict[str, Any] = {name: torch.from_numpy(array) for name, array in batch.inputs.items()}
        check_features(self.program, batch)
        for name in ("input_ids", "positions"):
            inputs[name] = inputs[name][None]
        if batch.features is not None:
            inputs[FEATURES] = inputs[FEATURES].view(RAW[batch.features.dtype.type])[None]
        names = [n.name for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        with torch.no_grad():
            logits, *hidden_states = self.graph_module(*({**inputs, **self.caches}[name] for name in names))
        self.features = joined([_raw(states[0]) for states in hidden_states])
        result: NDArray[np.float32] = logits[0].float().numpy()
        return result


def _raw(states: torch.Tensor) -> NDArray[np.generic]:
    """As the runtime passes hidden states on."""
    if states.dtype is torch.bfloat16:
        return states.contiguous().view(torch.int16).numpy().view(np.uint16)
    return states.numpy()


def _tensor(array: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(array.copy()).view(TORCH[dtype]).reshape(shape)
