"""A graph of kernels as an nn.Module: what an artifact made of it must compute."""

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from octavo.compiler.fresh_inputs import Chunk, step_inputs


class GraphModel(nn.Module):
    """From ids to logits of one sequence, by a graph at any stage, as it was when this was made."""

    def __init__(self, graph_module: GraphModule, page_size: int) -> None:
        super().__init__()
        graph = Graph()
        graph.output(graph.graph_copy(graph_module.graph, {}))
        self.graph_module = GraphModule(graph_module, graph)
        self.page_size = page_size

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        inputs = [n for n in self.graph_module.graph.nodes if n.op == "placeholder"]
        length = input_ids.shape[1]
        step = step_inputs([Chunk(0, 0, length)], self.page_size, 1, torch.Generator(), length)
        given = {
            **step.tensors, "input_ids": input_ids, "position_ids": position_ids,
            "logit_rows": torch.arange(length),
        }  # fmt: skip
        for node in inputs:
            if node.name not in given:
                value = node.meta["val"]
                given[node.name] = torch.zeros(step.num_pages, *value.shape[1:], dtype=value.dtype)
        logits: Tensor = self.graph_module(*(given[node.name] for node in inputs))[0]
        return logits
