"""Attention over pages  ->  the same, with a mask for each new token of which new tokens it sees.

The graph gets the step's input `tree`, so that a step may hold trees of drafts (Miao et al. 2024, SpecInfer). A mask of
0 stands for all that lies before a token: without trees the result is the same, bit for bit.
"""

import torch
from torch.fx import GraphModule

from octavo.compiler.program import TREE
from octavo.passes.rewrite import placeholder
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
ATTENTIONS = (octavo.paged_attention.default, octavo.paged_mla_attention.default)


def mask_trees(graph_module: GraphModule) -> PassReport:
    """Adds the placeholder `tree` (T,) i64 behind slot_mapping."""
    report = PassReport("mask_trees")
    inputs = {node.name: node for node in graph_module.graph.nodes if node.op == "placeholder"}
    attentions = [node for node in graph_module.graph.nodes if node.target in ATTENTIONS]
    if TREE in inputs or not attentions:
        return report
    slots = inputs["slot_mapping"]
    tree = placeholder(graph_module, TREE, slots.meta["val"], after=slots)
    for node in attentions:
        node.kwargs = {**node.kwargs, TREE: tree}
    report.notes["attentions"] = len(attentions)
    return report
