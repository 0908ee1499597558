"""The three projections that feed one attention  ->  one matrix product and its three parts.

Needs the same input, equal presence of biases, and q and k rotated by tables, since only `fuse_rope_kv_write`
reads the parts in place. The merged weight is a constant, folded by the next `fold_constants`.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import Var, aten, call, matches
from octavo.passes.rewrite import Builder, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo


def _projection(name: str) -> Any:
    linear = call(octavo.linear.default, args=(Var("x"), Var(f"{name}_weight")), bind=name)
    return call(aten.reshape.default, args=(linear,))


def _rotated(name: str) -> Any:
    cos, sin = (call(octavo.embedding.default, args=(Var("positions"), Var(t))) for t in ("cos", "sin"))
    return call(octavo.rope.default, args=(_projection(name), cos, sin))


QUERY = _rotated("q")
WRITE = call(octavo.kv_write.default, args=(_rotated("k"), _projection("v"), Var("k_cache"), Var("v_cache")))


def merge_qkv(graph_module: GraphModule) -> PassReport:
    report = PassReport("merge_qkv", "reassociates")
    writes = {n.args[2]: n for n in graph_module.graph.nodes if n.target is octavo.kv_write.default}
    for node in list(graph_module.graph.nodes):
        if node.target is octavo.paged_attention.default:
            reason = _merge(graph_module, node, writes[node.args[1]], report)
            if reason is not None:
                report.reject(node, reason)
    return report


def _merge(graph_module: GraphModule, attention: Node, write: Node, report: PassReport) -> str | None:
    query = attention.args[0]
    assert isinstance(query, Node)
    q = next(matches(QUERY, query), None)
    kv = next(matches(WRITE, write), None)
    if q is None or kv is None:
        return "q and k are not views of a projection each, rotated by tables, and v a view of one"
    if any(q[name] is not kv[name] for name in ("x", "cos", "sin", "positions")):
        return "q and k do not share their input and their tables"
    linears = [q["q"], kv["k"], kv["v"]]
    biases = [n.args[2] if len(n.args) > 2 else None for n in linears]
    if any(b is None for b in biases) and any(b is not None for b in biases):
        return "some of the projections have a bias and some have none"

    computed = [n.args[1] for n in linears if n.args[1].op != "get_attr"]
    if computed:
        return (
            f"the weight {computed[0].name} is computed: it may not be there yet where the first part is read"
        )

    def build(b: Builder) -> list[Node]:
        weight = b.call(aten.cat.default, [n.args[1] for n in linears])
        bias = [] if biases[0] is None else [b.call(aten.cat.default, biases)]
        merged = b.call(octavo.linear.default, q["x"], weight, *bias)
        ends = [0]
        for linear in linears:
            ends.append(ends[-1] + linear.meta["val"].shape[-1])
        return [b.call(aten.slice.Tensor, merged, 2, *ends[i : i + 2]) for i in range(3)]

    leaves = [q["x"], *(n for linear in linears for n in linear.args[1:] if isinstance(n, Node))]
    report.sites.append(replace(graph_module, linears, build, leaves))
    return None
