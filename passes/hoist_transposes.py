"""op(transpose(x))  ->  transpose(op(x)) for ops that do not look at the axes that a transpose moves.

Norms over the last axis, slices and joins of any axis, arithmetic with numbers or with others transposed alike. The
transposes then meet those that attention and rotation brought, and canonicalize removes both.
"""

from collections.abc import Sequence

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import aten
from octavo.passes.rewrite import Builder, Site, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
NORMS = (octavo.rms_norm.default, octavo.layer_norm.default)


def hoist_transposes(graph_module: GraphModule) -> PassReport:
    report = PassReport("hoist_transposes", "bitwise")
    for node in list(graph_module.graph.nodes):
        site = _hoist(graph_module, node) if node.users else None
        if site is not None:
            report.sites.append(site)
    return report


def _hoist(graph_module: GraphModule, node: Node) -> Site | None:
    if node.target in NORMS:
        return _norm(graph_module, node)
    if node.target is aten.slice.Tensor:
        return _slice(graph_module, node)
    if node.target in ARITHMETIC:
        return _arithmetic(graph_module, node)
    return _cat(graph_module, node) if node.target is aten.cat.default else None


def _transposed(value: object) -> tuple[Node, list[int]] | None:
    """(x, order) of transpose(x)."""
    if isinstance(value, Node) and value.target is aten.permute.default:
        source, order = value.args
        assert isinstance(source, Node) and isinstance(order, Sequence)
        return source, [int(d) for d in order]  # type: ignore[arg-type]
    return None


def _norm(graph_module: GraphModule, node: Node) -> Site | None:
    found = _transposed(node.args[0])
    if found is None or found[1][-1] != len(found[1]) - 1:
        return None
    source, order = found

    def build(b: Builder) -> list[Node]:
        assert callable(node.target)
        return [b.call(aten.permute.default, b.call(node.target, source, *node.args[1:]), order)]

    weights = [n for n in node.all_input_nodes if n is not node.args[0]]
    return replace(graph_module, [node], build, [source, *weights])


def _slice(graph_module: GraphModule, node: Node) -> Site | None:
    found = _transposed(node.args[0])
    if found is None:
        return None
    source, order = found
    axis = order[int(node.args[1])]  # type: ignore[arg-type]

    def build(b: Builder) -> list[Node]:
        part = b.call(aten.slice.Tensor, source, axis, *node.args[2:])
        return [b.call(aten.permute.default, part, order)]

    return replace(graph_module, [node], build, [source])


def _cat(graph_module: GraphModule, node: Node) -> Site | None:
    parts = [_transposed(part) for part in node.args[0]]  # type: ignore[union-attr]
    orders = [part[1] for part in parts if part is not None]
    if len(orders) < len(parts) or any(order != orders[0] for order in orders):
        return None
    sources = [part[0] for part in parts if part is not None]
    axis = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]

    def build(b: Builder) -> list[Node]:
        joined = b.call(aten.cat.default, sources, orders[0][axis])
        return [b.call(aten.permute.default, joined, orders[0])]

    return replace(graph_module, [node], build, list(dict.fromkeys(sources)))


def _arithmetic(graph_module: GraphModule, node: Node) -> Site | None:
    operands = [_transposed(value) for value in node.all_input_nodes]
    found = [operand for operand in operands if operand is not None]
    shape = node.meta["val"].shape
    if not found or len(found) < len(operands) or any(order != found[0][1] for _, order in found):
        return None
    if any(str(value.meta["val"].shape) != str(shape) for value in node.all_input_nodes):
        return None
    sources = {value: source for value, (source, _) in zip(node.all_input_nodes, found, strict=True)}

    def build(b: Builder) -> list[Node]:
        assert callable(node.target)
        args = [sources[value] if isinstance(value, Node) else value for value in node.args]
        return [b.call(aten.permute.default, b.call(node.target, *args, **node.kwargs), found[0][1])]

    return replace(graph_module, [node], build, list(sources.values()))
