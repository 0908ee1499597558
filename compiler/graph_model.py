"""A graph of kernels as an nn.Module: what an artifact made of it must compute."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from octavo.compiler.fresh_inputs import empty_pages, whole_sequences
from octavo.compiler.page_groups import page_windows
from octavo.compiler.program import FEATURES

UNIT = 2.0**-24
PRODUCTS = ("linear.default", "moe.default")  # plain and quantised


def copy_graph(graph_module: GraphModule) -> GraphModule:
    """The graph as it is, and what is known of it; weights are shared."""
    graph = Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    made = GraphModule(graph_module, graph)
    known = graph_module.meta.items()
    made.meta = {name: copy.copy(value) if isinstance(value, dict | list) else value for name, value in known}
    return made


class GraphModel(nn.Module):
    """From ids (and of a draft head features) to logits and hidden states of one sequence, by a graph at any stage, as
    it was when this was made."""

    def __init__(self, graph_module: GraphModule, page_size: int, seed: int | None = None) -> None:
        """seed: every product is off by about one rounding of fp32, in a way of this seed's own."""
        super().__init__()
        self.graph_module = copy_graph(graph_module)
        self.page_size = page_size
        self.seed = seed

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, features: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        inputs = [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        windows = page_windows(self.graph_module.graph)
        step = whole_sequences(input_ids.tolist(), self.page_size, windows)
        given = {**step.tensors, "position_ids": position_ids}
        for node in inputs:
            if node.name == FEATURES and features is not None:
                given[FEATURES] = features.to(node.meta["val"].dtype)
        values = [
            given[node.name] if node.name in given else empty_pages(node, step.num_pages) for node in inputs
        ]
        run = self.graph_module if self.seed is None else Moved(self.graph_module, self.seed).run
        results: tuple[Tensor, ...] = run(*values)
        return results


class Moved(Interpreter):
    """What sums in another order may do to products."""

    def __init__(self, graph_module: GraphModule, seed: int) -> None:
        super().__init__(graph_module)
        self.generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op == "call_function" and str(n.target).endswith(PRODUCTS):
            noise = torch.randn(value.shape, generator=self.generator, dtype=torch.float64)
            value = (value.double() * (1 + UNIT * noise)).to(value.dtype)
        return value
