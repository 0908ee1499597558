"""octavo.mla_attention  ->  octavo.latent_attention between two products for each head (DeepSeek-V2, 2024).

q_nope . (W_uk c) = (W_uk^T q_nope) . c, and sum_j p_j W_uv c_j = W_uv sum_j p_j c_j: keys and values of the heads
are never made, and only the latent and the rotated key part are kept of a token.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import Builder, Site, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo


def absorb_mla(graph_module: GraphModule) -> PassReport:
    report = PassReport("absorb_mla", "reassociates")
    for node in list(graph_module.graph.nodes):
        if node.target is octavo.mla_attention.default:
            report.sites.append(_absorb(graph_module, node))
    return report


def _absorb(graph_module: GraphModule, node: Node) -> Site:
    q_nope, q_rope, latent, k_rope, w_uk, w_uv, *options = arguments(node)
    heads, rank = q_nope.meta["val"].shape[2], w_uk.meta["val"].shape[1]

    def build(b: Builder) -> list[Node]:
        up_keys = b.call(aten.reshape.default, w_uk, [heads, -1, rank])
        up_values = b.call(aten.reshape.default, w_uv, [heads, -1, rank])
        q_latent = b.call(
            octavo.head_linear.default, q_nope, b.call(aten.permute.default, up_keys, [0, 2, 1])
        )
        mixed = b.call(octavo.latent_attention.default, q_latent, q_rope, latent, k_rope, *options)
        return [b.call(octavo.head_linear.default, mixed, up_values)]

    return replace(graph_module, [node], build, list(dict.fromkeys(node.all_input_nodes)))
