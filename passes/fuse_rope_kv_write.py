"""Rotation of q and k and the write of k and v  ->  octavo.rope_kv_write.

The kernel reads q, k and v where the merged projection left them.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Match, Var, aten, call, matches
from octavo.passes.rewrite import Builder, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo


def _part(name: str) -> object:
    piece = call(aten.slice.Tensor, args=(Var("qkv"), 2, Var(f"{name}_start"), Var(f"{name}_end")))
    return call(aten.reshape.default, args=(piece,))


def _rotated(name: str) -> object:
    cos, sin = (call(octavo.embedding.default, args=(Var("positions"), Var(t))) for t in ("cos", "sin"))
    return call(octavo.rope.default, args=(_part(name), cos, sin), bind=f"{name}_rope")


QUERY = _rotated("q")
WRITE = call(
    octavo.kv_write.default,
    args=(_rotated("k"), _part("v"), Var("k_cache"), Var("v_cache"), Var("slot_mapping")),
)


def fuse_rope_kv_write(graph_module: GraphModule) -> PassReport:
    report = PassReport("fuse_rope_kv_write", "reassociates")
    writes = {n.args[2]: n for n in graph_module.graph.nodes if n.target is octavo.kv_write.default}
    for node in list(graph_module.graph.nodes):
        if node.target is octavo.paged_attention.default and node.args[1] in writes:
            reason = _fuse(graph_module, node, writes[node.args[1]], report)
            if reason is not None:
                report.reject(node, reason)
    return report


def _fuse(graph_module: GraphModule, attention: Node, write: Node, report: PassReport) -> str | None:
    query = attention.args[0]
    assert isinstance(query, Node)
    q, kv = next(matches(QUERY, query), None), next(matches(WRITE, write), None)
    if q is None or kv is None:
        return "q, k and v are not rotated parts of one projection"
    if any(q[name] is not kv[name] for name in ("qkv", "cos", "sin", "positions")):
        return "q and k do not share their projection and their tables"
    if (q["q_start"], q["q_end"], kv["k_end"]) != (0, kv["k_start"], kv["v_start"]):
        return f"the parts do not follow each other: q ends at {q['q_end']}, k at {kv['k_end']}"
    if _interleaved(q, "q") != _interleaved(kv, "k"):
        return "q and k are rotated in different styles"
    inputs = [
        q["qkv"],
        kv["cos"],
        kv["sin"],
        kv["positions"],
        kv["slot_mapping"],
        kv["k_cache"],
        kv["v_cache"],
    ]
    options = (query.meta["val"].shape[2], _interleaved(q, "q"))

    def build(b: Builder) -> list[Node]:
        fused = b.call(octavo.rope_kv_write.default, *inputs, *options)
        return [fused]

    report.sites.append(replace(graph_module, [query], build, inputs, effects=[write]))
    return None


def _interleaved(found: Match, name: str) -> bool:
    args = found[f"{name}_rope"].args
    return bool(args[3]) if len(args) > 3 else False
