"""quantize(act_mul(gate_up))  ->  octavo.act_mul_quantize.

The activated rows then never reach memory. Not matched: rows that something else reads too, or that are quantised in
several forms.
"""

import torch
from torch.fx import GraphModule

from octavo.passes.fuse_norm_quantize import fuse_quantize
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo


def fuse_act_quantize(graph_module: GraphModule) -> PassReport:
    report = PassReport("fuse_act_quantize", "bitwise")
    for node in graph_module.graph.find_nodes(op="call_function", target=octavo.act_mul.default):
        fuse_quantize(graph_module, report, node, octavo.act_mul_quantize.default, node.args, num_tensors=1)
    return report
