"""What a caller may rely on about a graph's outputs: which of them share memory, and their strides.

Passes treat a copy as its source, which is right for values and wrong for who may write where.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import Builder


@dataclass(frozen=True)
class Outputs:
    """roots: the node whose memory each output shows, by name; strides as text, since some are symbols."""

    roots: tuple[str | None, ...]
    strides: tuple[str, ...]

    @classmethod
    def of(cls, graph_module: GraphModule) -> "Outputs":
        outputs = _outputs(graph_module)
        return cls(tuple(_root(o) for o in outputs), tuple(_strides(o) for o in outputs))

    def restore(self, graph_module: GraphModule) -> None:
        """Copy what shares memory that it did not share before, or lies in it in another order."""
        output = graph_module.graph.output_node()
        outputs, seen = list(_outputs(graph_module)), dict[str, int]()
        for index, node in enumerate(outputs):
            root = _root(node)
            if not isinstance(node, Node) or root is None:
                continue
            first = seen.setdefault(root, index)
            joined = first != index and self.roots[first] != self.roots[index]
            is_input = root != self.roots[index] and _is_input(graph_module, root)
            dense = str(
                tuple(torch.empty_like(node.meta["val"], memory_format=torch.contiguous_format).stride())
            )
            is_other_order = _strides(node) != self.strides[index] == dense
            if joined or is_input or is_other_order:
                outputs[index] = _copied(graph_module, node)
        output.args = (tuple(outputs),)
        graph_module.recompile()


def _outputs(graph_module: GraphModule) -> tuple[Any, ...]:
    (values,) = arguments(graph_module.graph.output_node())
    return tuple(values) if isinstance(values, tuple | list) else (values,)


def _root(value: Any) -> str | None:
    """The node that owns the memory; what may be a view counts as one."""
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), Tensor):
        return None
    while _may_alias(value):
        value = value.all_input_nodes[0]
    return str(value.name)


def _may_alias(node: Node) -> bool:
    if node.target in (aten.reshape.default, aten.contiguous.default, aten.to.dtype):
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or not node.all_input_nodes:
        return False
    return any(result.alias_info is not None for result in node.target._schema.returns)


def _is_input(graph_module: GraphModule, name: str) -> bool:
    return any(n.name == name and n.op in ("placeholder", "get_attr") for n in graph_module.graph.nodes)


def _strides(value: Any) -> str:
    if not isinstance(value, Node) or not isinstance(value.meta.get("val"), Tensor):
        return ""
    return str(tuple(value.meta["val"].stride()))


def _copied(graph_module: GraphModule, node: Node) -> Node:
    writes = [n for n in graph_module.graph.nodes if _writes(n)]
    with graph_module.graph.inserting_before(writes[0] if writes else graph_module.graph.output_node()):
        builder = Builder(graph_module, node)
        return builder.call(aten.clone.default, node, memory_format=torch.contiguous_format)


def _writes(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
