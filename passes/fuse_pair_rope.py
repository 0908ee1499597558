"""Rotations of adjacent pairs in the spellings of DeepSeek and Llama  ->  octavo.rope, interleaved.

Complex numbers: view_as_real(view_as_complex(pairs of x) * table), the table holding cos + i sin of each pair.
Stacked: stack(x[0::2] cos - x[1::2] sin, x[1::2] cos + x[0::2] sin) as one axis again.
Even and odd: cat(x[0::2] cos - x[1::2] sin, x[1::2] cos + x[0::2] sin), or x sorted into its even and then its odd
elements before its halves are rotated; that order stays behind as a cat of slices. x is (1, heads, T, D) or
(1, T, heads, D).
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.fuse_rope import HEADS_FIRST, TOKENS_FIRST
from octavo.passes.pattern import Match, Through, Var, add, arguments, aten, call, cast, mul
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rule, apply_rules

octavo = torch.ops.octavo
X = cast(Var("x"))
ENDLESS = (1 << 63) - 1

PAIRS = call(aten.reshape.default, args=(X, Var("pairs")))
TURNED = mul(call(aten.view_as_complex.default, args=(PAIRS,), bind="numbers"), Var("table"))
COMPLEX = cast(
    call(aten.reshape.default, args=(call(aten.view_as_real.default, args=(TURNED,)), Var("sizes")))
)

EVEN = call(aten.slice.Tensor, args=(X, Var("axis"), 0, Var("end"), 2))
ODD = call(aten.slice.Tensor, args=(X, Var("axis"), 1, Var("end"), 2))
FIRST = call(aten.sub.Tensor, args=(mul(EVEN, Var("cos")), mul(ODD, Var("sin"))))
SECOND = add(mul(ODD, Var("cos")), mul(EVEN, Var("sin")))
STACKED = cast(
    call(aten.reshape.default, args=(call(aten.stack.default, args=([cast(FIRST), cast(SECOND)], -1)),))
)
EVEN_ODD = cast(call(aten.cat.default, args=([cast(FIRST), cast(SECOND)], Var("axis_of_cat"))))

SORTED = call(
    aten.permute.default, args=(call(aten.reshape.default, args=(Var("x"), Var("pairs"))), [0, 1, 2, 4, 3])
)
HALVES = Through((aten.permute.default,), call(aten.reshape.default, args=(SORTED, Var("sizes"))))
SORTED_HALVES = call(octavo.rope.default, args=(HALVES, Var("cos"), Var("sin")))


def layout(x: Sequence[Any], table: Sequence[Any]) -> list[int] | None:
    """The permutation that puts tokens before heads, from which axis a table of one angle a pair varies along."""
    if len(x) != 4 or x[-1] != 2 * table[-1] or len(table) > 4:
        return None
    dims = (1,) * (4 - len(table)) + tuple(table)
    if dims[:2] == (1, 1) and dims[2] == x[2]:
        return HEADS_FIRST
    return TOKENS_FIRST if dims[0] == 1 and dims[2] == 1 and dims[1] == x[1] else None


def _shape(found: Match) -> torch.Size:
    """Of the value that is rotated: that of the result, whose complex form may be a view with fewer axes."""
    if "numbers" not in found.values:
        return found.root.meta["val"].shape  # type: ignore[no-any-return]
    *lead, pairs = found["numbers"].meta["val"].shape
    return torch.Size((*lead, 2 * pairs))


def _reject(found: Match, tables: tuple[str, ...]) -> str | None:
    x, result, shape = found["x"].meta["val"], found.root.meta["val"], _shape(found)
    if x.dtype != result.dtype:
        return f"the input is {x.dtype} and the result {result.dtype}"
    orders = [layout(shape, found[name].meta["val"].shape) for name in tables]
    if orders[0] is None or any(order != orders[0] for order in orders):
        shapes = ", ".join(f"{name} {tuple(found[name].meta['val'].shape)}" for name in tables)
        return f"{shapes} do not broadcast over the heads of {tuple(shape)}"
    return None


def reject_complex(found: Match) -> str | None:
    if not found["table"].meta["val"].dtype.is_complex:
        return f"the table is {found['table'].meta['val'].dtype}, not complex"
    result, shape = found.root.meta["val"].shape, _shape(found)
    if result[-1] != shape[-1]:
        return f"pairs of {shape[-1]} elements become rows of {result[-1]}"
    return _reject(found, ("table",))


def reject_even_odd(found: Match) -> str | None:
    shape = found["x"].meta["val"].shape
    last = len(shape) - 1
    if shape != _shape(found):
        return f"it makes {tuple(_shape(found))} of {tuple(shape)}"
    axes = (found["axis"], found.values.get("axis_of_cat", last))
    if any(axis % (last + 1) != last for axis in axes):
        return f"it rotates along axis {found['axis']}, expected the last"
    return _reject(found, ("cos", "sin"))


def _rotated(b: Builder, found: Match, cos: Node, sin: Node) -> Node:
    """cos and sin hold one angle a pair."""
    shape = _shape(found)
    order = layout(shape, cos.meta["val"].shape)
    assert order is not None
    cos, sin = (
        b.call(aten.reshape.default, b.call(aten.repeat_interleave.self_int, t, 2, -1), [1, -1, shape[-1]])
        for t in (cos, sin)
    )
    x = b.call(aten.reshape.default, found["x"], _sizes(shape))
    tokens_first = b.call(aten.permute.default, x, order)
    return b.call(aten.permute.default, b.call(octavo.rope.default, tokens_first, cos, sin, True), order)


def _sizes(shape: Sequence[Any]) -> list[int]:
    return [d if isinstance(d, int) else -1 for d in shape]


def replace_complex(b: Builder, found: Match) -> Node:
    table = b.call(aten.view_as_real.default, found["table"])
    cos, sin = (b.call(aten.select.int, table, -1, i) for i in (0, 1))
    rotated = _rotated(b, found, cos, sin)
    return b.call(aten.reshape.default, rotated, _sizes(found.root.meta["val"].shape))


def replace_stacked(b: Builder, found: Match) -> Node:
    return _rotated(b, found, found["cos"], found["sin"])


def replace_even_odd(b: Builder, found: Match) -> Node:
    return _even_first(b, _rotated(b, found, found["cos"], found["sin"]))


def _even_first(b: Builder, x: Node) -> Node:
    return b.call(
        aten.cat.default, [b.call(aten.slice.Tensor, x, 3, start, ENDLESS, 2) for start in (0, 1)], 3
    )


def reject_sorted(found: Match) -> str | None:
    result, pairs = found.root.meta["val"], found["pairs"]
    half = result.shape[-1] // 2
    if len(found.root.args) > 3 and found.root.args[3]:
        return "it is interleaved already"
    if len(pairs) != 5 or list(pairs[-2:]) != [half, 2] or found["cos"].meta["val"].shape[-1] != 2 * half:
        return f"the pairs are {pairs}, expected {half} pairs of two"
    return None


def replace_sorted(b: Builder, found: Match) -> Node:
    """Tables of halves hold the angles of even elements and then those of odd ones; here they alternate."""
    turned = arguments(found.root)[0]
    x = b.call(aten.reshape.default, found["x"], found["sizes"])
    if turned.target is aten.permute.default:
        x = b.call(aten.permute.default, x, arguments(turned)[1])
    width = found.root.meta["val"].shape[-1]
    tables = []
    for name in ("cos", "sin"):
        halves = b.call(aten.reshape.default, found[name], [1, -1, 2, width // 2])
        alternating = b.call(aten.permute.default, halves, [0, 1, 3, 2])
        tables.append(b.call(aten.reshape.default, alternating, [1, -1, width]))
    return _even_first(b, b.call(octavo.rope.default, x, *tables, True))


RULES = (
    Rule("fuse_complex_rope", COMPLEX, replace_complex, ("x", "table"), reject_complex),
    Rule("fuse_stacked_rope", STACKED, replace_stacked, ("x", "cos", "sin"), reject_even_odd),
    Rule("fuse_even_odd_rope", EVEN_ODD, replace_even_odd, ("x", "cos", "sin"), reject_even_odd),
    Rule("fuse_sorted_rope", SORTED_HALVES, replace_sorted, ("x", "cos", "sin"), reject_sorted),
)


def fuse_pair_rope(graph_module: GraphModule) -> PassReport:
    return apply_rules(RULES, graph_module, PassReport("fuse_pair_rope", "reassociates"))
