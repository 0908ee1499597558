"""Bring a captured graph into one spelling, so that later patterns need only one.

Removed: assertions, conversions to the dtype a value has, copies, factors of one, full slices. Every reshape
is `aten.reshape` with at most one -1 for the symbolic size, every transpose `aten.permute`; chains of them
are one; equal calls are one; linear and embedding become ops of the dialect. Values keep every bit.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import Builder, held, make_site, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo

ASSERTIONS = (
    aten._assert_tensor_metadata.default, aten._assert_async.msg, aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default, aten._assert_scalar.default,
)  # fmt: skip
COPIES = (
    aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default,
    aten.lift_fresh_copy.default, aten.dropout.default,
)  # fmt: skip
CONVERSIONS = (
    aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout, aten.type_as.default,
)  # fmt: skip
RESHAPES = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default, aten.flatten.using_ints, aten.unflatten.int,
)  # fmt: skip
TRANSPOSES = (
    aten.transpose.int, aten.permute.default, aten.t.default, aten.mT.default, aten.numpy_T.default,
)  # fmt: skip
INFINITE = 1 << 62


def canonicalize(graph_module: GraphModule) -> PassReport:
    """Rewrite until nothing changes. Idempotent."""
    report = PassReport("canonicalize")
    _remove_assertions(graph_module)
    changed = True
    while changed:
        before = report.matched
        for node in list(graph_module.graph.nodes):
            if node.op == "call_function" and node.users and is_tensor(node):
                _simplify(graph_module, node, report)
        merged = _merge_equal_calls(graph_module, report)
        graph_module.graph.eliminate_dead_code()
        changed = report.matched > before or merged
    return report


def _remove_assertions(graph_module: GraphModule) -> None:
    for node in reversed(list(graph_module.graph.nodes)):
        if node.target in ASSERTIONS:
            graph_module.graph.erase_node(node)


def _simplify(graph_module: GraphModule, node: Node, report: PassReport) -> None:
    """Apply the first simplification that fits `node`."""
    for simplify in (
        _identity,
        _flat_product,
        _reshape,
        _transpose,
        _dialect,
        _square,
        _every_second,
        _select,
        _index,
        _slices,
        _join,
        _expand,
        _product,
        _conversion,
    ):
        build = simplify(node)
        if build is not None:
            inputs = build.inputs or node.all_input_nodes
            report.sites.append(replace(graph_module, [node], build.only, inputs))
            return


@dataclass(frozen=True)
class Build:
    """What takes a node's place; inputs are the values it starts from, by default the node's own."""

    make: Callable[[Builder], Node]
    inputs: tuple[Node, ...] = ()

    def only(self, builder: Builder) -> list[Node]:
        return [self.make(builder)]


def is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def shape(node: Node) -> tuple[Any, ...]:
    return tuple(node.meta["val"].shape)


def sizes_of(node: Node, end: int | None = None) -> list[str]:
    """The first sizes as text: comparing symbols with numbers would tie the graph to the sizes that it saw."""
    return [str(size) for size in shape(node)[:end]]


def _identity(node: Node) -> Build | None:
    source = node.args[0] if node.args else None
    if not isinstance(source, Node) or not is_tensor(source):
        return None
    same = sizes_of(source) == sizes_of(node) and source.meta["val"].dtype == node.meta["val"].dtype
    if same and (node.target in COPIES or node.target in CONVERSIONS or _is_neutral(node)):
        return Build(lambda _: source)
    return None


def _is_neutral(node: Node) -> bool:
    """x * 1, x / 1, x + 0, and a slice, expand or view that keeps everything."""
    args = arguments(node)
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        return not isinstance(args[1], Node) and bool(args[1] == 1)
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return not isinstance(args[1], Node) and bool(args[1] == 0)
    if node.target is aten.slice.Tensor:
        start, end, step = (*args[2:], 1)[:3]
        return step == 1 and start in (0, None) and isinstance(end, int) and end > INFINITE
    return node.target in (aten.expand.default, *RESHAPES)


def target_sizes(sizes: tuple[Any, ...]) -> list[int] | None:
    """Sizes as view takes them: -1 for the symbolic one; None where two are symbolic."""
    plain = [d if isinstance(d, int) else -1 for d in sizes]
    return plain if plain.count(-1) <= 1 else None


def _reshape(node: Node) -> Build | None:
    if node.target not in RESHAPES:
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    sizes = target_sizes(shape(node))
    chained = source.target is aten.reshape.default
    if sizes is None or (node.target is aten.reshape.default and node.args[1] == sizes and not chained):
        return None
    origin = source.args[0] if chained else source
    assert isinstance(origin, Node)
    return Build(lambda b: b.call(aten.reshape.default, origin, sizes), (origin,))


def _flat_product(node: Node) -> Build | None:
    """A product of flattened rows, brought back into shape, is the product of the rows as they were."""
    product = node.args[0] if node.target in RESHAPES else None
    if not isinstance(product, Node) or product.target is not octavo.linear.default:
        return None
    flat, *weights = product.args
    if not isinstance(flat, Node) or flat.target is not aten.reshape.default:
        return None
    origin = flat.args[0]
    assert isinstance(origin, Node)
    if sizes_of(origin, -1) != sizes_of(node, -1) or sizes_of(product)[-1:] != sizes_of(node)[-1:]:
        return None
    if sizes_of(origin)[-1:] != sizes_of(flat)[-1:]:
        return None
    inputs = (origin, *(w for w in weights if isinstance(w, Node)))
    return Build(lambda b: b.call(octavo.linear.default, origin, *weights), inputs)


def permutation(node: Node) -> list[int]:
    rank, args = len(shape(node)), arguments(node)
    order = list(range(rank))
    if node.target is aten.permute.default:
        return [d % rank for d in args[1]]
    if node.target is aten.numpy_T.default:
        return order[::-1]
    first, second = args[1:] if node.target is aten.transpose.int else (-2, -1)
    order[first], order[second] = order[second], order[first]
    return order


def _transpose(node: Node) -> Build | None:
    if node.target not in TRANSPOSES:
        return None
    source, order = node.args[0], permutation(node)
    assert isinstance(source, Node)
    if order == list(range(len(order))):
        return Build(lambda _: source)
    if source.target is aten.permute.default:
        inner = permutation(source)
        combined = [inner[d] for d in order]
        (origin,) = source.all_input_nodes
        return Build(lambda b: b.call(aten.permute.default, origin, combined), (origin,))
    if node.target is aten.permute.default and node.args[1] == order:
        return None
    return Build(lambda b: b.call(aten.permute.default, source, order))


def _dialect(node: Node) -> Build | None:
    """Ops of the framework that are ops of the dialect under another name."""
    args = arguments(node)
    if node.target is aten.linear.default:
        return Build(lambda b: b.call(octavo.linear.default, *args))
    if node.target is aten.embedding.default:
        return Build(lambda b: b.call(octavo.embedding.default, args[1], args[0]))
    is_plain = node.target is aten.addmm.default and not node.kwargs
    if is_plain and _is_weight(args[2]) and len(shape(args[0])) == 1:
        bias, x, weight = args
        return Build(
            lambda b: b.call(octavo.linear.default, x, b.call(aten.permute.default, weight, [1, 0]), bias)
        )
    if node.target in (aten.mm.default, aten.matmul.default) and _is_weight(args[1]):
        x, weight = args
        return Build(lambda b: b.call(octavo.linear.default, x, b.call(aten.permute.default, weight, [1, 0])))
    return None


def _is_weight(value: Any) -> bool:
    while isinstance(value, Node) and value.target is aten.permute.default:
        value = value.args[0]
    return isinstance(value, Node) and value.op == "get_attr" and len(shape(value)) == 2


def _join(node: Node) -> Build | None:
    """Parts of width zero add nothing to a join: the unrotated rest of a head that is rotated whole, say."""
    if node.target is not aten.cat.default:
        return None
    args: tuple[Any, ...] = (*arguments(node), 0)
    parts, axis = args[:2]
    if any(part.meta["val"].dtype != node.meta["val"].dtype for part in parts):
        return None
    kept = [part for part in parts if shape(part) != (0,) and shape(part)[axis] != 0]
    if len(kept) == 1:
        return Build(lambda _: kept[0])
    return Build(lambda b: b.call(aten.cat.default, kept, axis)) if 0 < len(kept) < len(parts) else None


def _expand(node: Node) -> Build | None:
    """Axes that an expand adds in front are axes of size one first."""
    if node.target is not aten.expand.default:
        return None
    source, sizes = arguments(node)[:2]
    missing = len(shape(node)) - len(shape(source))
    ones = target_sizes((1,) * missing + shape(source))
    if missing == 0 or ones is None:
        return None
    return Build(lambda b: b.call(aten.expand.default, b.call(aten.reshape.default, source, ones), sizes))


def _square(node: Node) -> Build | None:
    if node.target is aten.square.default:
        return Build(lambda b: b.call(aten.pow.Tensor_Scalar, node.args[0], 2))
    if node.target is aten.mul.Tensor and node.args[0] is node.args[1]:
        return Build(lambda b: b.call(aten.pow.Tensor_Scalar, node.args[0], 2))
    return None


def _select(node: Node) -> Build | None:
    """One element of an axis of fixed size is a part of width one, without that axis."""
    if node.target is not aten.select.int:
        return None
    source, axis, which = arguments(node)
    axis, sizes = axis % len(shape(source)), target_sizes(shape(node))
    width = shape(source)[axis]
    if sizes is None or not isinstance(width, int) or not isinstance(which, int):
        return None
    start = which % width
    return Build(
        lambda b: b.call(
            aten.reshape.default, b.call(aten.slice.Tensor, source, axis, start, start + 1), sizes
        ),
        (source,),
    )


def _index(node: Node) -> Build | None:
    """x[:, [i]] with one constant index is a part of width one."""
    if node.target is not aten.index.Tensor:
        return None
    source, indices = arguments(node)
    used = [(axis, index) for axis, index in enumerate(indices) if index is not None]
    module = node.graph.owning_module
    if len(used) != 1 or used[0][1].op != "get_attr" or shape(used[0][1]) != (1,) or module is None:
        return None
    axis, value = used[0][0], held(module, str(used[0][1].target))
    width = shape(source)[axis]
    if value.is_meta or value.dtype is torch.bool or not isinstance(width, int):
        return None
    start = int(value) % width
    return Build(lambda b: b.call(aten.slice.Tensor, source, axis, start, start + 1), (source,))


def _every_second(node: Node) -> Build | None:
    """The first or second of adjacent elements, taken apart as pairs (..., D / 2, 2), is every second element."""
    pairs = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(pairs, Node) and pairs.target is aten.unbind.int:
        (pairs, *dim), which = arguments(pairs), node.args[1]
    elif node.target is aten.select.int:
        pairs, *dim, which = arguments(node)
    else:
        return None
    if not isinstance(pairs, Node) or pairs.target is not aten.reshape.default:
        return None
    whole, axis = pairs.args[0], len(shape(pairs)) - 2
    assert isinstance(whole, Node)
    if (dim or [0])[0] not in (-1, axis + 1) or which not in (0, 1) or shape(pairs)[-1] != 2:
        return None
    joined = target_sizes((*shape(pairs)[:-2], 2 * shape(pairs)[-2]))
    if joined is None:
        return None

    def make(b: Builder) -> Node:
        return b.call(
            aten.slice.Tensor, b.call(aten.reshape.default, whole, joined), axis, which, (1 << 63) - 1, 2
        )

    return Build(make, (whole,))


def _slices(node: Node) -> Build | None:
    """An element of a split or chunk is a slice."""
    source = node.args[0] if node.args else None
    if node.target is not operator.getitem or not isinstance(source, Node):
        return None
    if source.target not in (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default):
        return None
    parts, whole = source.meta["val"], source.args[0]
    assert isinstance(whole, Node)
    args: tuple[Any, ...] = (*arguments(source), source.kwargs.get("dim", 0))
    dim = args[2] % len(shape(node))
    if not all(isinstance(p.shape[dim], int) for p in parts):
        return None
    index = node.args[1]
    assert isinstance(index, int)
    start = sum(p.shape[dim] for p in parts[:index])
    return Build(
        lambda b: b.call(aten.slice.Tensor, whole, dim, start, start + parts[index].shape[dim]), (whole,)
    )


def _product(node: Node) -> Build | None:
    """A contraction of two tensors over one axis is a matrix product of transposed operands."""
    if node.target is not aten.einsum.default or len(arguments(node)[1]) != 2:
        return None
    equation, (left, right) = arguments(node)
    terms, out = equation.replace(" ", "").split("->")
    first, second = terms.split(",")
    batch = [d for d in out if d in first and d in second]
    summed = [d for d in first if d in second and d not in out]
    rows, columns = [d for d in first if d not in second], [d for d in second if d not in first]
    if [len(summed), len(rows), len(columns)] != [1, 1, 1]:
        return None

    def make(b: Builder) -> Node:
        a = b.call(aten.permute.default, left, [first.index(d) for d in (*batch, *rows, *summed)])
        c = b.call(aten.permute.default, right, [second.index(d) for d in (*batch, *summed, *columns)])
        result = [*batch, *rows, *columns]
        return b.call(aten.permute.default, b.call(aten.matmul.default, a, c), [result.index(d) for d in out])

    return Build(make)


def _conversion(node: Node) -> Build | None:
    """Every way to change a dtype is `_to_copy` with the dtype and nothing else."""
    dtype = node.meta["val"].dtype
    if node.target not in CONVERSIONS or (
        node.target is aten._to_copy.default and node.kwargs == {"dtype": dtype}
    ):
        return None
    source = node.args[0]
    assert isinstance(source, Node)
    return Build(lambda b: b.call(aten._to_copy.default, source, dtype=dtype))


def _call_key(node: Node) -> Any:
    return (node.op, node.target, repr(node.args), repr(node.kwargs))


def _merge_equal_calls(graph_module: GraphModule, report: PassReport) -> bool:
    """Keep one of several calls with the same target and arguments: there is a proof if they only look the same."""
    seen: dict[Any, Node] = {}
    merged = False
    for node in list(graph_module.graph.nodes):
        if node.op not in ("call_function", "get_attr") or node.is_impure():
            continue
        first = seen.setdefault(_call_key(node), node)
        if first is not node:
            if (node.target, node.args, node.kwargs) != (first.target, first.args, first.kwargs):
                report.sites.append(make_site(graph_module, [node], [first], node.all_input_nodes))
            node.replace_all_uses_with(first)
            graph_module.graph.erase_node(node)
            merged = True
    return merged
