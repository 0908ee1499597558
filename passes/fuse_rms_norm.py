"""x * rsqrt(mean(x^2) + eps) * weight  ->  octavo.rms_norm, wherever the casts stand.

A norm without a weight gets one of ones; where the sum of squares stands in the mean's place, 1 / sqrt(width) follows.
Not matched: norms that subtract the mean, norms over another axis.
Source: Zhang and Sennrich 2019.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Call, Match, Var, add, aten, call, cast, mul, number
from octavo.passes.rewrite import Builder, Recipe, new_weight
from octavo.passes.rule import PassReport, Rule, apply_rules

X = cast(Var("x"))
MEAN = add(
    call(aten.mean.dim, args=(call(aten.pow.Tensor_Scalar, args=(X, 2)), [-1], True)), Var("eps", number)
)
SUM = add(
    call(aten.sum.dim_IntList, args=(call(aten.pow.Tensor_Scalar, args=(X, 2)), [-1], True)),
    Var("eps", number),
)
INVERSES = (call(aten.rsqrt.default, args=(MEAN,)), call(aten.pow.Tensor_Scalar, args=(MEAN, -0.5)))


def reject(found: Match) -> str | None:
    x, weight = found["x"].meta["val"], found["weight"].meta["val"]
    if x.dtype != found.root.meta["val"].dtype:
        return f"the input is {x.dtype} and the result {found.root.meta['val'].dtype}"
    if tuple(weight.shape) != (x.shape[-1],):
        return f"the weight has shape {tuple(weight.shape)}, expected ({x.shape[-1]},)"
    return None


def replacement(build: Builder, found: Match) -> Node:
    return build.call(torch.ops.octavo.rms_norm.default, found["x"], found["weight"], found["eps"])


def reject_plain(found: Match) -> str | None:
    x, result = found["x"].meta["val"], found.root.meta["val"]
    return f"the input is {x.dtype} and the result {result.dtype}" if x.dtype != result.dtype else None


def replace_plain(build: Builder, found: Match) -> Node:
    return _plain(build, found, found["eps"])


def replace_unit(build: Builder, found: Match) -> Node:
    """A sum is the width times a mean. A weight of 1 / sqrt(width) would be a rounded one."""
    width = int(found["x"].meta["val"].shape[-1])
    return build.call(aten.mul.Tensor, _plain(build, found, found["eps"] / width), width**-0.5)


def _plain(build: Builder, found: Match, eps: float) -> Node:
    x = found["x"].meta["val"]
    ones = _ones(build.graph_module, int(x.shape[-1]), x.dtype)
    return build.call(torch.ops.octavo.rms_norm.default, found["x"], ones, eps)


def _ones(graph_module: GraphModule, width: int, dtype: torch.dtype) -> Node:
    """One weight for all norms of a width."""
    name = f"folded.ones_{str(dtype).removeprefix('torch.')}_{width}"
    known = [n for n in graph_module.graph.nodes if n.op == "get_attr" and n.target == name]
    make = Recipe((), lambda _: torch.ones(width, dtype=dtype))
    return known[0] if known else new_weight(graph_module, name, make.make(()), make)


def _rules(inverse: Call) -> tuple[Rule, Rule]:
    plain = cast(mul(X, inverse))
    weighted = cast(mul(cast(Var("weight")), plain))
    return (
        Rule("fuse_rms_norm", weighted, replacement, ("x", "weight"), reject),
        Rule("fuse_plain_rms_norm", plain, replace_plain, ("x",), reject_plain),
    )


WEIGHTED, PLAIN = zip(*map(_rules, INVERSES), strict=True)
UNIT = Rule(
    "fuse_l2_norm", cast(mul(X, call(aten.rsqrt.default, args=(SUM,)))), replace_unit, ("x",), reject_plain
)
FUSE_RMS_NORM = WEIGHTED[0]


def fuse_rms_norm(graph_module: GraphModule) -> PassReport:
    report = apply_rules(WEIGHTED, graph_module, PassReport("fuse_rms_norm", "reassociates"))
    graph_module.graph.eliminate_dead_code()  # what the weighted norms left behind would match again
    return apply_rules((*PLAIN, UNIT), graph_module, report)
