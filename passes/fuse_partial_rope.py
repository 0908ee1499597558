"""The rotated first part of each head joined with the rest  ->  octavo.rope of whole heads with narrower tables.

Runs after `hoist_transposes`, when parts and joins stand on tokens-first tensors.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Match, Var, aten, call
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rule, apply_rules

octavo = torch.ops.octavo
X = Var("x")
ROTARY = call(aten.slice.Tensor, args=(X, Var("axis"), 0, Var("width")))
REST = call(aten.slice.Tensor, args=(X, Var("axis"), Var("width"), Var("end")))
ROTATED = call(octavo.rope.default, args=(ROTARY, Var("cos"), Var("sin")), bind="rope")
PATTERN = call(aten.cat.default, args=([ROTATED, REST], Var("cat_axis")))


def reject(found: Match) -> str | None:
    x = found["x"].meta["val"]
    last = len(x.shape) - 1
    if found["axis"] % len(x.shape) != last or found["cat_axis"] % len(x.shape) != last:
        return f"the parts are along axes {found['axis']} and {found['cat_axis']}, expected {last}"
    joined = found.root.meta["val"].shape[-1]
    return f"the parts cover {joined} of {x.shape[-1]}" if joined != x.shape[-1] else None


def replacement(build: Builder, found: Match) -> Node:
    style = found["rope"].args[3:]
    return build.call(octavo.rope.default, found["x"], found["cos"], found["sin"], *style)


RULE = Rule("fuse_partial_rope", PATTERN, replacement, ("x", "cos", "sin"), reject)


def fuse_partial_rope(graph_module: GraphModule) -> PassReport:
    return apply_rules([RULE], graph_module, PassReport("fuse_partial_rope", "bitwise"))
