"""s = x + residual; y = rms_norm(s)  ->  octavo.add_rms_norm, which returns both.

The sum goes on as the next residual without another trip through memory. Not matched: a sum of different
shapes.
"""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Var, add, call, matches
from octavo.passes.rewrite import Builder, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
SUM = add(Var("x"), Var("residual"), bind="sum")
PATTERN = call(octavo.rms_norm.default, args=(SUM, Var("weight"), Var("eps")))


def fuse_add_norm(graph_module: GraphModule) -> PassReport:
    report = PassReport("fuse_add_norm", "bitwise")
    for node in list(graph_module.graph.nodes):
        found = next(matches(PATTERN, node), None)
        if found is None:
            continue
        x, residual, weight, total = (found[name] for name in ("x", "residual", "weight", "sum"))
        if not isinstance(residual, Node) or x.meta["val"].shape != residual.meta["val"].shape:
            report.reject(node, "the terms of the sum have different shapes")
            continue

        def build(b: Builder, args: tuple[Any, ...] = (x, residual, weight, *node.args[2:])) -> list[Node]:
            both = b.call(octavo.add_rms_norm.default, *args)
            return [b.call(operator.getitem, both, i) for i in (0, 1)]

        report.sites.append(replace(graph_module, [node, total], build, [x, residual, weight]))
    return report
