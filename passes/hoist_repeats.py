"""op(repeat(x))  ->  repeat(op(x)), and op(repeat(x)) -> op(x) for ops that repeat by themselves.

Keys and values that are repeated for groups of queries before they are rotated, normed or transposed are repeated
last, where attention takes one key head for several query heads without it. Arithmetic spreads an expanded operand
over the other by itself; one that lacks the axis of size one in front gets it. Not matched: repeats of whole
sequences of heads, which pair heads with queries otherwise.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import Builder, Site, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
EXPANDS = (aten.expand.default, aten.broadcast_to.default, aten.expand_as.default)
ARITHMETIC = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)
ROWS = (octavo.rms_norm.default, octavo.layer_norm.default, octavo.rope.default)
REPEAT = aten.repeat_interleave.self_int
HEADS = 2  # the axis of the heads in what rotation and attention read


def hoist_repeats(graph_module: GraphModule) -> PassReport:
    report = PassReport("hoist_repeats", "bitwise")
    for node in list(graph_module.graph.nodes):  # inputs first, so that a repeat moves past all that follows
        site = _hoist(graph_module, node) if node.users else None
        if site is not None:
            report.sites.append(site)
    return report


def _hoist(graph_module: GraphModule, node: Node) -> Site | None:
    if node.target is aten.reshape.default:
        return _group(graph_module, node)
    if node.target is aten.permute.default:
        return _transpose(graph_module, node)
    if node.target in ROWS:
        return _rows(graph_module, node)
    if node.target is octavo.attention.default:
        return _attention(graph_module, node)
    return _arithmetic(graph_module, node) if node.target in ARITHMETIC else None


def _sizes(node: Node) -> list[str]:
    """As text: comparing symbols with numbers would tie the graph to the sizes that it saw."""
    return [str(d) for d in node.meta["val"].shape]


def _plain(sizes: Any) -> list[int]:
    return [d if isinstance(d, int) else -1 for d in sizes]


def _repeat(value: Any) -> tuple[Node, int, int] | None:
    """(x, times, axis) of a value that repeats each element of an axis."""
    if not isinstance(value, Node) or value.target is not REPEAT or len(value.args) < 3:
        return None
    x, times, axis = arguments(value)[:3]
    if not isinstance(times, int) or not isinstance(axis, int):
        return None
    return x, times, axis % len(value.meta["val"].shape)


def _group(graph_module: GraphModule, node: Node) -> Site | None:
    """reshape(expand(x)), where an axis of size one behind another is spread and then joins that other."""
    spread = node.args[0]
    if not isinstance(spread, Node) or spread.target not in EXPANDS:
        return None
    x = arguments(spread)[0]
    before, after, joined = (value.meta["val"].shape for value in (x, spread, node))
    if len(before) != len(after) or len(joined) != len(after) - 1:
        return None
    spread_axes = [i for i, (a, b) in enumerate(zip(_sizes(x), _sizes(spread), strict=True)) if a != b]
    if len(spread_axes) != 1 or spread_axes[0] == 0 or not isinstance(after[spread_axes[0]], int):
        return None
    axis, times = spread_axes[0] - 1, after[spread_axes[0]]
    if not isinstance(before[axis], int):
        return None
    wanted = [*after[:axis], before[axis] * times, *after[axis + 2 :]]
    if [str(d) for d in wanted] != _sizes(node):
        return None
    sizes = _plain([*before[: axis + 1], *before[axis + 2 :]])
    if sizes.count(-1) > 1:
        return None

    def build(b: Builder) -> list[Node]:
        return [b.call(REPEAT, b.call(aten.reshape.default, x, sizes), times, axis)]

    return replace(graph_module, [node], build, [x])


def _transpose(graph_module: GraphModule, node: Node) -> Site | None:
    found = _repeat(node.args[0])
    if found is None:
        return None
    x, times, axis = found
    order = arguments(node)[1]

    def build(b: Builder) -> list[Node]:
        return [b.call(REPEAT, b.call(aten.permute.default, x, order), times, list(order).index(axis))]

    return replace(graph_module, [node], build, [x])


def _rows(graph_module: GraphModule, node: Node) -> Site | None:
    found = _repeat(node.args[0])
    if found is None or found[2] != HEADS or len(node.meta["val"].shape) != HEADS + 2:
        return None
    x, times, axis = found

    def build(b: Builder) -> list[Node]:
        assert callable(node.target)
        return [b.call(REPEAT, b.call(node.target, x, *node.args[1:]), times, axis)]

    rest = [n for n in node.all_input_nodes if n is not node.args[0]]
    return replace(graph_module, [node], build, [x, *rest])


def _attention(graph_module: GraphModule, node: Node) -> Site | None:
    q, k, v, *rest = arguments(node)
    key, value = _repeat(k), _repeat(v)
    if key is None or value is None or key[1:] != value[1:] or key[2] != HEADS:
        return None

    def build(b: Builder) -> list[Node]:
        return [b.call(octavo.attention.default, q, key[0], value[0], *rest)]

    inputs = [q, key[0], value[0], *(n for n in rest if isinstance(n, Node))]
    return replace(graph_module, [node], build, inputs)


def _arithmetic(graph_module: GraphModule, node: Node) -> Site | None:
    for index, value in enumerate(arguments(node)[:2]):
        other = node.args[1 - index]
        if not isinstance(value, Node) or not isinstance(other, Node) or _sizes(other) != _sizes(node):
            continue
        if value.target in EXPANDS:
            return _with_operand(graph_module, node, index, arguments(value)[0], None)
        if _lacks_ones(value, node):
            return _with_operand(graph_module, node, index, value, _plain(node.meta["val"].shape))
    return None


def _lacks_ones(value: Node, result: Node) -> bool:
    """Whether it is (T, N) where the result is (1, T, N)."""
    short, long = _sizes(value), _sizes(result)
    lead = len(long) - len(short)
    one_symbol = sum(not isinstance(d, int) for d in value.meta["val"].shape) == 1
    return one_symbol and len(short) > 1 and lead > 0 and long == ["1"] * lead + short


def _with_operand(
    graph_module: GraphModule, node: Node, index: int, x: Node, sizes: list[int] | None
) -> Site:
    """The node with x as its operand `index`, seen as `sizes` if they are given."""
    other = node.args[1 - index]
    assert isinstance(other, Node)

    def build(b: Builder) -> list[Node]:
        assert callable(node.target)
        seen = x if sizes is None else b.call(aten.reshape.default, x, sizes)
        operands = [seen, other] if index == 0 else [other, seen]
        return [b.call(node.target, *operands, **node.kwargs)]

    return replace(graph_module, [node], build, [x, other])
