"""x * cos + rotate(x) * sin  ->  octavo.rope on tokens-first tensors (Su et al. 2021, equation 34).

x is (1, heads, T, D) or (1, T, heads, D); cos and sin broadcast over heads. rotate takes the halves of x, or its
even and odd elements; or the halves are written out, cat(x1 cos - x2 sin, x2 cos + x1 sin), with tables of half the
width. Other tables narrower than D are `fuse_partial_rope`'s. Rotations the other way round negate the sines; a factor
for each token, behind a rotation, goes into the tables.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Match, Through, Var, add, aten, call, cast, mul
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rule, apply_rules

X = cast(Var("x"))
SECOND = call(aten.slice.Tensor, args=(X, Var("axis"), Var("half"), Var("end")), bind="second")
FIRST = call(aten.slice.Tensor, args=(X, Var("axis"), 0, Var("half")), bind="first")
ROTATED = call(aten.cat.default, args=([call(aten.neg.default, args=(SECOND,)), FIRST], Var("cat_axis")))
BACKWARDS = call(aten.cat.default, args=([SECOND, call(aten.neg.default, args=(FIRST,))], Var("cat_axis")))
ODD = call(aten.slice.Tensor, args=(X, Var("axis"), 1, Var("end"), 2))
EVEN = call(aten.slice.Tensor, args=(X, Var("axis"), 0, Var("end"), 2))
STACKED = call(aten.stack.default, args=([call(aten.neg.default, args=(ODD,)), EVEN], -1))
PAIRS = call(aten.reshape.default, args=(STACKED,))

COS, SIN = Var("cos"), Var("sin")
LEFT = call(aten.sub.Tensor, args=(mul(FIRST, COS), mul(SECOND, SIN)))
RIGHT = add(mul(SECOND, COS), mul(FIRST, SIN))
WRITTEN_OUT = cast(call(aten.cat.default, args=([cast(LEFT), cast(RIGHT)], Var("cat_axis"))))

HEADS_FIRST, TOKENS_FIRST = [0, 2, 1, 3], [0, 1, 2, 3]


def layout(x: Any, table: Any, repeats: int = 1) -> list[int] | None:
    """The permutation that puts tokens before heads, from which axis the table varies along."""
    if len(x.shape) != 4 or table.shape[-1] * repeats != x.shape[-1]:
        return None
    dims = (1,) * (4 - len(table.shape)) + tuple(table.shape)
    if dims[0] == 1 and dims[1] == 1 and dims[2] == x.shape[2]:
        return HEADS_FIRST
    if dims[0] == 1 and dims[2] == 1 and dims[1] == x.shape[1]:
        return TOKENS_FIRST
    return None


def reject(found: Match, repeats: int = 1) -> str | None:
    x, cos, sin = (found[name].meta["val"] for name in ("x", "cos", "sin"))
    if x.dtype != found.root.meta["val"].dtype:
        return f"the input is {x.dtype} and the result {found.root.meta['val'].dtype}"
    if x.shape[-1] % 2:
        return f"head_dim must be even, got {x.shape[-1]}"
    if found["axis"] % len(x.shape) != len(x.shape) - 1:
        return f"it rotates along axis {found['axis']}, expected the last"
    if found.values.get("cat_axis", -1) % len(x.shape) != len(x.shape) - 1:
        return f"it joins along axis {found['cat_axis']}, expected the last"
    if found.values.get("half", x.shape[-1] // 2) != x.shape[-1] // 2:
        return f"the halves split at {found['half']} of {x.shape[-1]}"
    if layout(x, cos, repeats) is None or layout(x, cos, repeats) != layout(x, sin, repeats):
        shapes = (tuple(t.shape) for t in (cos, sin, x))
        return "cos {} and sin {} do not broadcast over the heads of {}".format(*shapes)
    return None


def replacement(
    build: Builder, found: Match, interleaved: bool = False, repeats: int = 1, backwards: bool = False
) -> Node:
    x = found["x"]
    order = layout(x.meta["val"], found["cos"].meta["val"], repeats)
    assert order is not None
    width = x.meta["val"].shape[-1]
    tables = [found["cos"], build.call(aten.neg.default, found["sin"]) if backwards else found["sin"]]
    if repeats > 1:
        tables = [build.call(aten.cat.default, [table] * repeats, -1) for table in tables]
    cos, sin = (build.call(aten.reshape.default, table, [1, -1, width]) for table in tables)
    style = (True,) if interleaved else ()
    tokens_first = build.call(aten.permute.default, x, order)
    rotated = build.call(torch.ops.octavo.rope.default, tokens_first, cos, sin, *style)
    return build.call(aten.permute.default, rotated, order)


def _pattern(rotated: Any) -> Any:
    return cast(add(mul(X, COS), mul(rotated, SIN)))


NAMES = ("x", "cos", "sin")
RULES = (
    Rule("fuse_rope", _pattern(ROTATED), replacement, NAMES, reject),
    Rule(
        "fuse_backward_rope",
        _pattern(BACKWARDS),
        lambda b, m: replacement(b, m, backwards=True),
        NAMES,
        reject,
    ),
    Rule("fuse_interleaved_rope", _pattern(PAIRS), lambda b, m: replacement(b, m, True), NAMES, reject),
    Rule(
        "fuse_half_rope",
        WRITTEN_OUT,
        lambda b, m: replacement(b, m, repeats=2),
        NAMES,
        lambda m: reject(m, 2),
    ),
)

TURNED = call(torch.ops.octavo.rope.default, args=(Var("x"), COS, SIN), bind="rope")
SCALED = mul(Through((aten.permute.default,), TURNED), Var("scale"))


def reject_scale(found: Match) -> str | None:
    rope, scale, result = (value.meta["val"] for value in (found["rope"], found["scale"], found.root))
    if scale.dtype != result.dtype or rope.dtype != result.dtype:
        return f"the scale is {scale.dtype}, the rotation {rope.dtype} and the result {result.dtype}"
    if found["cos"].meta["val"].shape[-1] != rope.shape[-1]:
        return "a part of each head is not rotated"
    if layout(result, scale, result.shape[-1]) is None:
        return f"the scale {tuple(scale.shape)} is not one number for each token of {tuple(result.shape)}"
    return None


def replace_scaled(build: Builder, found: Match) -> Node:
    """A number for each token, times what is rotated, is a number times that token's cosines and sines."""
    scale = build.call(aten.reshape.default, found["scale"], [1, -1, 1])
    tables = [build.call(aten.mul.Tensor, found[name], scale) for name in ("cos", "sin")]
    value = build.call(torch.ops.octavo.rope.default, found["x"], *tables, *found["rope"].args[3:])
    for node in reversed([n for n in found.nodes if n.target is aten.permute.default]):
        value = build.call(aten.permute.default, value, node.args[1])
    return value


SCALED_ROPE = Rule("fuse_scaled_rope", SCALED, replace_scaled, ("x", "cos", "sin", "scale"), reject_scale)


def fuse_rope(graph_module: GraphModule) -> PassReport:
    report = apply_rules(RULES, graph_module, PassReport("fuse_rope", "reassociates"))
    graph_module.graph.eliminate_dead_code()
    return apply_rules([SCALED_ROPE], graph_module, report)
