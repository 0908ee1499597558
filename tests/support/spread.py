"""Lowered graphs of tiny models, and the graphs that their ranks run. Lowering is slow, so each is lowered once."""

import functools
from typing import Any

import torch
import zoo
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.capture import capture
from octavo.compiler.graph_model import copy_graph
from octavo.compiler.mesh import Mesh
from octavo.compiler.options import CompileOptions, Parallel
from octavo.compiler.parallelize import parallelize
from octavo.compiler.pipeline import Settings, lower
from octavo.compiler.simulate import simulate

PAGE_SIZE = 4
SETTINGS = Settings(PAGE_SIZE, 64)


@functools.cache
def _lowered(name: str) -> GraphModule:
    return lower(capture(zoo.build(name)), CompileOptions(verify="off"), SETTINGS).graph_module


def lowered(name: str) -> GraphModule:
    """The whole graph, to be rewritten at will."""
    return copy_graph(_lowered(name))


def spread(name: str, **sizes: Any) -> GraphModule:
    """The graph of every rank; not proven."""
    graph_module = lowered(name)
    parallelize(graph_module, Parallel(**sizes), PAGE_SIZE, whole=None)
    return graph_module


def prefill(graph_module: GraphModule, ids: list[int], row_ranks: Tensor | None = None) -> dict[str, Tensor]:
    """Inputs of a step with one prompt (or none) over pages of its own, in fp64; logits of every token."""
    count, pages = len(ids), -(-len(ids) // PAGE_SIZE)
    given = {
        "input_ids": torch.tensor([ids], dtype=torch.int64), "positions": torch.arange(count)[None],
        "slot_mapping": torch.arange(count) + PAGE_SIZE,
        "page_table": torch.arange(1, pages + 1, dtype=torch.int32)[None][: min(count, 1)],
        "seq_lens": torch.tensor([count] if count else [], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, count] if count else [0], dtype=torch.int32),
        "logit_rows": torch.arange(count), "row_ranks": row_ranks,
    }  # fmt: skip
    inputs: dict[str, Tensor] = {}
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = given.get(node.name)
        if value is not None:
            inputs[node.name] = value
        else:
            shape = node.meta["val"].shape
            inputs[node.name] = torch.zeros(pages + 1, *(int(d) for d in shape[1:]), dtype=torch.float64)
    return inputs


def wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def logits_of_ranks(graph_module: GraphModule, mesh: Mesh, prompts: list[list[int]]) -> list[Tensor]:
    """(tokens, vocab) of every rank, in fp64. prompts: by the coordinate along dp."""
    row_ranks = torch.tensor([d for d, ids in enumerate(prompts) for _ in ids], dtype=torch.int64)
    own = [prompts[mesh.coordinates(rank)["dp"]] for rank in range(mesh.world)]
    with torch.no_grad():
        results = simulate(graph_module, mesh, [prefill(graph_module, ids, row_ranks) for ids in own], wide)
    return [logits[0][0] for logits in results]
