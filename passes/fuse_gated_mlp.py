"""down(activation(gate(x)) * up(x))  ->  octavo.gated_mlp (Shazeer 2020).

Not matched: biases, and products in which both or neither factor is activated.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Match, Var, aten, call, mul
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rule, apply_rules

octavo = torch.ops.octavo
GATE = call(octavo.linear.default, args=(Var("x"), Var("gate")), bind="gate_linear")
UP = call(octavo.linear.default, args=(Var("x"), Var("up")), bind="up_linear")
ACTIVATED = call(aten.silu.default, aten.gelu.default, aten.relu.default, args=(GATE,), bind="activation")
PATTERN = call(octavo.linear.default, args=(mul(ACTIVATED, UP), Var("down")))


def activation(node: Node) -> str:
    if node.target is aten.gelu.default:
        return "gelu_tanh" if node.kwargs.get("approximate", "none") == "tanh" else "gelu"
    return "silu" if node.target is aten.silu.default else "relu"


def reject(found: Match) -> str | None:
    for linear in (found["gate_linear"], found["up_linear"], found.root):
        if len(linear.args) > 2 and linear.args[2] is not None:
            return f"{linear.name} has a bias"
    return None


def replacement(build: Builder, found: Match) -> Node:
    weights = (found["gate"], found["up"], found["down"])
    return build.call(octavo.gated_mlp.default, found["x"], *weights, activation(found["activation"]))


FUSE_GATED_MLP = Rule("fuse_gated_mlp", PATTERN, replacement, ("x", "gate", "up", "down"), reject)


def fuse_gated_mlp(graph_module: GraphModule) -> PassReport:
    return apply_rules([FUSE_GATED_MLP], graph_module, PassReport("fuse_gated_mlp", "reassociates"))
