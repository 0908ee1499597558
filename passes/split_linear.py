"""linear(x, W)[..., a:b]  ->  linear(x, W[a:b]), for models that keep several projections in one weight.

Later passes then see one spelling, and `merge_qkv` joins again what is worth joining. Not matched: a product
that is also used whole, which would be computed twice.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Match, Var, arguments, aten, call
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rule, apply_rules

octavo = torch.ops.octavo
LINEAR = call(octavo.linear.default, args=(Var("x"), Var("weight")), bind="linear")
PATTERN = call(aten.slice.Tensor, args=(LINEAR, Var("axis"), Var("start"), Var("end")))


def reject(found: Match) -> str | None:
    linear, weight = found["linear"], found["weight"]
    last = len(linear.meta["val"].shape) - 1
    for user in linear.users:
        if user.target is not aten.slice.Tensor or arguments(user)[1] % (last + 1) != last:
            return f"{linear.name} is also used by {user.name}, which is no part of its last axis"
    if weight.op != "get_attr":
        return f"the weight is {weight.name}, which is computed"
    if not isinstance(found["start"], int) or not isinstance(found["end"], int):
        return f"the part goes from {found['start']} to {found['end']}, which are not numbers"
    return f"the part takes every {found.root.args[4]}th element" if len(found.root.args) > 4 else None


def replacement(build: Builder, found: Match) -> Node:
    part = (0, found["start"], found["end"])
    parts = [build.call(aten.slice.Tensor, whole, *part) for whole in arguments(found["linear"])[1:] if whole]
    return build.call(octavo.linear.default, found["x"], *parts)


SPLIT_LINEAR = Rule("split_linear", PATTERN, replacement, ("x", "weight"), reject)


def split_linear(graph_module: GraphModule) -> PassReport:
    return apply_rules([SPLIT_LINEAR], graph_module, PassReport("split_linear", "reassociates"))
