"""aten arithmetic that no fusion took  ->  ops of the dialect that every target has a kernel for."""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Match, Var, add
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rule, apply_rules


def reject(found: Match) -> str | None:
    x, y = found["x"], found["y"]
    if not isinstance(x, Node) or not isinstance(y, Node):
        return f"the addend is {y}, not a tensor"
    a, b = x.meta["val"], y.meta["val"]
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"the terms are {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"
    return None


def replacement(build: Builder, found: Match) -> Node:
    return build.call(torch.ops.octavo.add.default, found["x"], found["y"])


LOWER_ADD = Rule("lower_add", add(Var("x"), Var("y")), replacement, ("x", "y"), reject)


def lower_elementwise(graph_module: GraphModule) -> PassReport:
    return apply_rules([LOWER_ADD], graph_module, PassReport("lower_elementwise", "bitwise"))
