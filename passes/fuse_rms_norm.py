"""x * rsqrt(mean(x^2) + eps) * weight  ->  octavo.rms_norm, wherever the casts stand.

Not matched: norms that subtract the mean, norms over another axis than the last, norms without a weight.
Source: Zhang and Sennrich 2019.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Match, Var, add, aten, call, cast, mul, number
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rule, apply_rules

X = cast(Var("x"))
INVERSE = call(
    aten.rsqrt.default,
    args=(
        add(
            call(aten.mean.dim, args=(call(aten.pow.Tensor_Scalar, args=(X, 2)), [-1], True)),
            Var("eps", number),
        ),
    ),
)
PATTERN = cast(mul(cast(Var("weight")), cast(mul(X, INVERSE))))


def reject(found: Match) -> str | None:
    x, weight = found["x"].meta["val"], found["weight"].meta["val"]
    if x.dtype != found.root.meta["val"].dtype:
        return f"the input is {x.dtype} and the result {found.root.meta['val'].dtype}"
    if tuple(weight.shape) != (x.shape[-1],):
        return f"the weight has shape {tuple(weight.shape)}, expected ({x.shape[-1]},)"
    return None


def replacement(build: Builder, found: Match) -> Node:
    return build.call(torch.ops.octavo.rms_norm.default, found["x"], found["weight"], found["eps"])


FUSE_RMS_NORM = Rule("fuse_rms_norm", PATTERN, replacement, ("x", "weight"), reject)


def fuse_rms_norm(graph_module: GraphModule) -> PassReport:
    report = PassReport("fuse_rms_norm", "reassociates")
    return apply_rules([FUSE_RMS_NORM], graph_module, report)
