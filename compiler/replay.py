"""Runs a lowered graph over token sequences once, and again from any product on, with products replaced.

Every sequence has pages of its own. What a product and those behind it read of earlier nodes is kept, so a second run
costs what lies behind the product. Runs from later products must come before those from earlier ones: a run writes
pages behind where it starts, which a run from an earlier product writes anew and one from a later product reads.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from octavo.compiler.fresh_inputs import empty_pages, fresh_features, is_cache, whole_sequences
from octavo.compiler.program import FEATURES
from octavo.passes.rewrite import held

octavo = torch.ops.octavo
# What becomes of a node's arguments in place of its call.
Replacement = Callable[..., Tensor]


class Replay:
    """kept: nodes to run again from later. After `reference`, `inputs` has the arguments that each of them had."""

    def __init__(
        self, graph_module: GraphModule, sequences: Sequence[Sequence[int]], page_size: int,
        kept: Collection[Node] = (),
    ) -> None:  # fmt: skip
        self.graph_module = graph_module
        self.nodes = [n for n in graph_module.graph.nodes if n.op == "call_function"]
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.kept = set(kept)
        self.constants = _constants(graph_module, sequences, page_size)
        self.output: Node = graph_module.graph.output_node().args[0][0]  # type: ignore[index, assignment]
        self.last_reads = self._last_reads()
        self.values: dict[Node, dict[Node, Any]] = {}

    def _last_reads(self) -> list[list[Node]]:
        """By the index of a node: the values that nobody reads behind it."""
        last = {
            arg: i for i, node in enumerate(self.nodes) for arg in node.all_input_nodes if arg in self.index
        }
        last[self.output] = len(self.nodes)
        dead: list[list[Node]] = [[] for _ in self.nodes]
        for value, i in last.items():
            if i < len(self.nodes):
                dead[i].append(value)
        return dead

    def reference(self) -> Tensor:
        """The logits (tokens, vocabulary), fp32."""
        return self._run(0, {}, {}, keep=True)

    def again(self, start: Node | None, replaced: Mapping[Node, Replacement]) -> Tensor:
        """The logits with nodes replaced, none of them in front of `start` (None: of the whole graph)."""
        if start is None:
            return self._run(0, {}, replaced)
        return self._run(self.index[start], dict(self.values[start]), replaced)

    def arguments(self, node: Node) -> tuple[Any, ...]:
        """Of a kept node, as they were in the reference run."""
        found: tuple[Any, ...] = self._mapped(node.args, self.values[node])
        return found

    def _mapped(self, given: Any, values: Mapping[Node, Any]) -> Any:
        return map_arg(given, lambda n: self.constants[n] if n in self.constants else values[n])

    def _run(
        self, first: int, values: dict[Node, Any], replaced: Mapping[Node, Replacement], keep: bool = False
    ) -> Tensor:
        with torch.no_grad():
            for i in range(first, len(self.nodes)):
                node = self.nodes[i]
                if keep and node in self.kept:
                    self.values[node] = dict(values)
                args = self._mapped(node.args, values)
                if node in replaced:
                    values[node] = replaced[node](*args)
                else:
                    values[node] = evaluate(node, args, self._mapped(node.kwargs, values))
                for dead in self.last_reads[i]:
                    values.pop(dead, None)
        logits: Tensor = values[self.output]
        return logits[0].float()


def evaluate(node: Node, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> Any:
    """What the node makes of arguments."""
    assert callable(node.target)
    if node.target is octavo.linear.default:
        return linear(*args)
    return node.target(*args, **(kwargs or {}))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """In fp32, rounded to x's dtype: CPUs without bf16 products take many times as long for one."""
    wide = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    return wide.to(x.dtype)


def _constants(
    graph_module: GraphModule, sequences: Sequence[Sequence[int]], page_size: int
) -> dict[Node, Any]:
    """Weights, the inputs of one step with all sequences, and pages. Features of a draft head are fresh numbers."""
    step = whole_sequences(sequences, page_size)
    found: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            found[node] = held(graph_module, str(node.target))
        elif node.op == "placeholder" and is_cache(node.name):
            found[node] = empty_pages(node, step.num_pages)
        elif node.op == "placeholder" and node.name == FEATURES:
            found[node] = fresh_features(node, step.tensors["input_ids"].shape[1])
        elif node.op == "placeholder":
            found[node] = step.tensors[node.name]
    return found
