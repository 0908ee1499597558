"""aten.layer_norm, or (x - mean(x)) * rsqrt(var(x) + eps) * weight spelled out  ->  octavo.layer_norm (Ba et al. 2016).

Not matched: norms over more than the last axis.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Call, Match, Var, add, aten, call, cast, mul, number
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rule, apply_rules

octavo = torch.ops.octavo
X = cast(Var("x"))
CENTRED = Call((aten.sub.Tensor,), (X, call(aten.mean.dim, args=(X, [-1], True))))
SQUARE = call(aten.pow.Tensor_Scalar, args=(CENTRED, 2))
VARIANCE = call(aten.mean.dim, args=(SQUARE, [-1], True))
INVERSE = call(aten.rsqrt.default, args=(add(VARIANCE, Var("eps", number)),))
SPELLED = cast(mul(cast(Var("weight")), cast(mul(CENTRED, INVERSE))))
WHOLE = call(aten.layer_norm.default, args=(Var("x"), Var("sizes")))


def reject_whole(found: Match) -> str | None:
    width = found["x"].meta["val"].shape[-1]
    if list(found["sizes"]) != [width]:
        return f"it normalises over {found['sizes']}, expected the last axis [{width}]"
    return None


def reject_spelled(found: Match) -> str | None:
    x, weight = found["x"].meta["val"], found["weight"].meta["val"]
    if x.dtype != found.root.meta["val"].dtype:
        return f"the input is {x.dtype} and the result {found.root.meta['val'].dtype}"
    return None if tuple(weight.shape) == (x.shape[-1],) else f"the weight has shape {tuple(weight.shape)}"


def from_whole(build: Builder, found: Match) -> Node:
    defaults = (None, None, 1e-5)
    given = tuple(found.root.args[2:5])
    return build.call(octavo.layer_norm.default, found["x"], *given, *defaults[len(given) :])


def from_spelled(build: Builder, found: Match) -> Node:
    return build.call(octavo.layer_norm.default, found["x"], found["weight"], None, found["eps"])


RULES = (
    Rule("fuse_layer_norm", WHOLE, from_whole, ("x",), reject_whole),
    Rule("fuse_spelled_layer_norm", SPELLED, from_spelled, ("x", "weight"), reject_spelled),
)


def fuse_layer_norm(graph_module: GraphModule) -> PassReport:
    return apply_rules(RULES, graph_module, PassReport("fuse_layer_norm", "reassociates"))
