"""octavo.gated_mlp  ->  one matrix product for gate and up, act_mul, down.

One product reads the input once and fills the machine better than two. The merged weight is a constant,
folded by the next `fold_constants`.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Match, Var, aten, call
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rule, apply_rules

octavo = torch.ops.octavo
NAMES = ("x", "gate", "up", "down", "activation")
PATTERN = call(octavo.gated_mlp.default, args=tuple(Var(name) for name in NAMES))


def replacement(build: Builder, found: Match) -> Node:
    weight = build.call(aten.cat.default, [found["gate"], found["up"]])
    hidden = build.call(octavo.linear.default, found["x"], weight)
    activated = build.call(octavo.act_mul.default, hidden, found["activation"])
    return build.call(octavo.linear.default, activated, found["down"])


MERGE_GATE_UP = Rule("merge_gate_up", PATTERN, replacement, ("x", "gate", "up", "down"))


def merge_gate_up(graph_module: GraphModule) -> PassReport:
    return apply_rules([MERGE_GATE_UP], graph_module, PassReport("merge_gate_up", "reassociates"))
