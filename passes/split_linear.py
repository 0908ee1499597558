"""linear(x, W)[..., a:b]  ->  linear(x, W[a:b]), for models that keep several projections in one weight.

The slice may be of the product itself or of its view as (1, T, ..., D), transposed or not: then it takes rows of
the weight seen through the same view (one head's q, k and v next to each other, say). Later passes see one
spelling, and `merge_qkv` joins again what is worth joining. Not matched: a product that is also used whole, which
would be computed twice, and parts that are joined again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import Builder, Site, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
ELEMENTWISE = (
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten._to_copy.default,
)  # fmt: skip
DEEPEST = 5  # calls from a part to a join of rotated halves, conversions included


@dataclass(frozen=True)
class _Part:
    """A slice of a product: `axis` and `sizes` are of its view without the token axes; order puts a transpose back."""

    linear: Node
    axis: int
    start: int
    end: int
    sizes: list[int]
    order: list[int] | None
    result: list[int] | None = None  # sizes of a view that only adds axes of size one


def split_linear(graph_module: GraphModule) -> PassReport:
    report = PassReport("split_linear", "reassociates")
    for node in list(graph_module.graph.nodes):
        if node.target is aten.slice.Tensor and node.users:
            found = _part(node)
            if isinstance(found, str):
                report.reject(node, found)
            elif found is not None:
                report.sites.append(_split(graph_module, node, found))
    return report


def _part(node: Node) -> _Part | str | None:
    """What to split, why not to, or None for a slice of something else than a product."""
    chain = [node]
    args = arguments(node)
    padded: tuple[Any, ...] = (*args, *(0, None, None)[len(args) - 1 :])
    source, axis, start, end = padded[:4]
    order = None
    if isinstance(source, Node) and source.target is aten.permute.default:
        chain.append(source)
        order = [int(d) for d in arguments(source)[1]]
        axis, source = order[axis], arguments(source)[0]
    view = source if isinstance(source, Node) and source.target is aten.reshape.default else None
    if view is not None:
        chain.append(view)
        source = arguments(view)[0]
    if not isinstance(source, Node) or source.target is not octavo.linear.default:
        return None
    if len(chain) > 1 and _used_whole(source, chain) is not None:
        return None  # the view of one projection, of which rotation reads halves: nothing to split
    whole = (view or source).meta["val"].shape
    axis = axis % len(whole)
    refusal = _refusal(node, source, chain, axis, start, end)
    if refusal is not None:
        return refusal
    if view is not None and _adds_ones(view, source):
        first, last, _ = slice(start, end).indices(int(whole[-1]))
        return _Part(source, 0, first, last, [int(whole[-1])], None, [*_plain(whole[:-1]), last - first])
    sizes = [int(d) for d in whole[2:]]
    first, last, _ = slice(start, end).indices(sizes[axis - 2])
    return _Part(source, axis - 2, first, last, sizes, order)


def _refusal(
    node: Node, linear: Node, chain: list[Node], axis: int, start: object, end: object
) -> str | None:
    if axis < 2:
        return f"{linear.name} is also used by {node.name}, which is no part of its last axis"
    whole = _used_whole(linear, chain)
    if whole is not None:
        return f"{whole}, which is no part of its last axis"
    view, product = tuple(chain[-1].meta["val"].shape), tuple(linear.meta["val"].shape)
    if len(chain) > 1 and _adds_ones(chain[-1], linear):
        if len(chain) > 2 or axis != len(view) - 1:
            return f"it is a part of axis {axis} of {view}, which adds axes to {product}"
    elif len(chain) > 1 and _without_ones(view[:2]) != _without_ones(product[:-1]):
        return f"the view {view} does not keep the token axes of {product}"
    if len(chain) == 1 and len(product) != 3:
        return f"the product {product} has {len(product)} axes, expected (1, T, N)"
    parts = [user for user in arguments(node)[0].users if user.target is aten.slice.Tensor]
    for join in _joins(parts):
        if sum(_comes_from(value, parts) for value in join.all_input_nodes) > 1:
            return f"{join.name} joins the parts again: they are one value, rotated in part, say"
    weight = arguments(linear)[1]
    if weight.op != "get_attr":
        return f"the weight is {weight.name}, which is computed"
    if not isinstance(start, int) or not isinstance(end, int):
        return f"the part goes from {start} to {end}, which are not numbers"
    step = node.args[4] if len(node.args) > 4 else 1
    return f"the part takes every {step}th element" if step != 1 else None


def _joins(parts: list[Node]) -> list[Node]:
    """Every cat of the parts, or of what elementwise arithmetic makes of them."""
    level = parts
    found: dict[Node, None] = {}
    for _ in range(DEEPEST):
        users = dict.fromkeys(user for node in level for user in node.users)
        found.update({user: None for user in users if user.target is aten.cat.default})
        level = [user for user in users if user.target in ELEMENTWISE]
    return list(found)


def _adds_ones(view: Node, product: Node) -> bool:
    """Whether the view's other axes before the last are the product's, with axes of size one between them."""
    new, old = (value.meta["val"].shape for value in (view, product))
    return (
        view.target is aten.reshape.default
        and [str(d) for d in new[:2]] != [str(d) for d in old[:2]]
        and len(new) > len(old)
        and [str(d) for d in _without_ones(tuple(new))] == [str(d) for d in _without_ones(tuple(old))]
    )


def _plain(sizes: Any) -> list[int]:
    return [d if isinstance(d, int) else -1 for d in sizes]


def _without_ones(sizes: tuple[Any, ...]) -> list[Any]:
    return [d for d in sizes if not (isinstance(d, int) and d == 1)]


def _used_whole(linear: Node, chain: list[Node]) -> str | None:
    """Who reads more than a part of the product or of its view."""
    for value in (*chain[1:], linear):
        for user in value.users:
            if user not in chain and not _is_part(user):
                return f"{value.name} is also used by {user.name}"
    return None


def _comes_from(value: Node, parts: list[Node], depth: int = 12) -> bool:
    """Whether `value` is one of the parts or was made of one, by a rotation at most."""
    level, seen = [value], {value}
    for _ in range(depth):
        if any(node in parts for node in level):
            return True
        level = [n for n in dict.fromkeys(n for node in level for n in node.all_input_nodes) if n not in seen]
        seen.update(level)
    return False


def _is_part(user: Node) -> bool:
    """A slice of another axis than tokens, or a transpose of which only such slices are taken."""
    if user.target is aten.permute.default:
        order = arguments(user)[1]
        return all(u.target is aten.slice.Tensor and order[arguments(u)[1]] >= 2 for u in user.users)
    rank = len(user.meta["val"].shape) if user.target is aten.slice.Tensor else 0
    return rank > 0 and arguments(user)[1] % rank >= 2


def _split(graph_module: GraphModule, node: Node, part: _Part) -> Site:
    x, *wholes = arguments(part.linear)
    sizes = [*part.sizes]
    sizes[part.axis] = part.end - part.start

    def rows(b: Builder, whole: Node) -> Node:
        rest = list(whole.meta["val"].shape[1:])
        if len(part.sizes) == 1:
            return b.call(aten.slice.Tensor, whole, 0, part.start, part.end)
        seen = b.call(aten.reshape.default, whole, [*part.sizes, *rest])
        return b.call(
            aten.reshape.default,
            b.call(aten.slice.Tensor, seen, part.axis, part.start, part.end),
            [-1, *rest],
        )

    def build(b: Builder) -> list[Node]:
        value = b.call(octavo.linear.default, x, *(rows(b, whole) for whole in wholes if whole is not None))
        if part.result is not None:
            value = b.call(aten.reshape.default, value, part.result)
        if len(sizes) > 1:
            value = b.call(aten.reshape.default, value, [1, -1, *sizes])
        return [value if part.order is None else b.call(aten.permute.default, value, part.order)]

    return replace(graph_module, [node], build, [x, *(w for w in wholes if w is not None)])
