"""Experts of a mixture over ranks: each rank holds some of them, or with tp alone a part of the width of each.

Spread, the router's numbers are looked up in a table of the rank's own before they reach the mixture (map_experts):
where the expert lies, or -1 where another rank answers for it. Cut, gates and ups are cut as rows and downs as columns.
Either leaves every rank with a part of a sum. Not cut: quantised experts, whose blocks lie along the width.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.expert_placement import contiguous_placement, expert_tables
from octavo.compiler.legality import named_arguments, op
from octavo.compiler.mesh import AXES, Mesh
from octavo.compiler.options import Parallel
from octavo.compiler.placement import Placement
from octavo.compiler.placement_rules import EXPERT_OPS, EXPERT_WEIGHTS
from octavo.compiler.program import ExpertLayer
from octavo.passes.rewrite import Builder, held, new_weight
from octavo.passes.rule import PassReport
from octavo.passes.sharding import by_coordinate, own_copy, spread

octavo = torch.ops.octavo


def shard_experts(graph_module: GraphModule, parallel: Parallel) -> PassReport:
    report = PassReport("shard_experts", "reassociates")
    layers: list[ExpertLayer] = graph_module.meta.setdefault("expert_layers", [])
    mixtures = [n for n in graph_module.graph.nodes if op(n) in EXPERT_OPS]
    for node in mixtures:
        if parallel.ep > 1:
            layers.append(_spread(graph_module, node, parallel))
        elif parallel.tp > 1:
            reason = _cut(graph_module, node, parallel.mesh)
            if reason:
                report.reject(node, reason)
    report.notes["mixtures"] = str(len(mixtures))
    return report


def _weights(graph_module: GraphModule, node: Node) -> dict[str, Node]:
    """Arguments with an axis of experts, of which this node is the only reader."""
    given = named_arguments(node)
    num_experts = given["down"].meta["val"].shape[0]
    found = {n: given[n] for n in EXPERT_WEIGHTS if isinstance(given.get(n), Node)}
    return {
        name: own_copy(graph_module, weight, node)
        for name, weight in found.items()
        if weight.op == "get_attr" and weight.meta["val"].shape[:1] == (num_experts,)
    }


def _spread(graph_module: GraphModule, node: Node, parallel: Parallel) -> ExpertLayer:
    mesh, weights = parallel.mesh, _weights(graph_module, node)
    num_experts = weights["down"].meta["val"].shape[0]
    placement = contiguous_placement(num_experts, mesh.world, parallel.redundant_experts)
    ranges = [placement.pieces(rank) for rank in range(mesh.world)]
    where = Placement(**{axis: 0 for axis in AXES if mesh.size(axis) > 1})
    for weight in weights.values():
        spread(graph_module, weight, 0, ranges, where)
    tables = torch.tensor(expert_tables(placement, mesh), dtype=torch.int64).reshape(-1)
    table = new_weight(graph_module, f"{weights['down'].target}_table", tables)
    spread(
        graph_module,
        table,
        0,
        [[(r * num_experts, (r + 1) * num_experts)] for r in range(mesh.world)],
        Placement(),
    )
    experts = named_arguments(node)["experts"]
    with graph_module.graph.inserting_before(node):
        mapped = Builder(graph_module, node).call(octavo.map_experts.default, experts, table)
    node.args = tuple(mapped if arg is experts else arg for arg in node.args)
    return ExpertLayer(str(table.target), tuple(str(weight.target) for weight in weights.values()))


def _cut(graph_module: GraphModule, node: Node, mesh: Mesh) -> str | None:
    """Cut every expert along its width; or why not."""
    if op(node) != "octavo::moe":
        return f"{op(node)} is not cut along its width, where its blocks lie; spread its experts with ep"
    width = named_arguments(node)["down"].meta["val"].shape[2]
    if width % mesh.tp:
        return f"experts of width {width} cannot be cut into {mesh.tp} equal parts"
    weights, step = _weights(graph_module, node), width // mesh.tp
    columns = by_coordinate(mesh, "tp", lambda t: [(t * step, (t + 1) * step)])
    both = by_coordinate(
        mesh, "tp", lambda t: [(t * step + half, (t + 1) * step + half) for half in (0, width)]
    )
    for name, dim, ranges in (("gate_up", 1, both), ("gate_up_bias", 1, both), ("down", 2, columns)):
        if name in weights:
            spread(graph_module, weights[name], dim, ranges, Placement(tp=dim))
    if "down_bias" in weights:
        first_rank_only(graph_module, weights["down_bias"], mesh)
    return None


def first_rank_only(graph_module: GraphModule, node: Node, mesh: Mesh) -> None:
    """A weight that is added to parts of a sum: rank 0 along tp has it, the others have zeros."""
    tensor = held(graph_module, str(node.target))
    rows = tensor.shape[0]
    ranges = by_coordinate(mesh, "tp", lambda t: [(0, rows)] if t == 0 else [(rows, 2 * rows)])
    whole = torch.cat((tensor, torch.zeros_like(tensor)))
    spread(graph_module, node, 0, ranges, Placement(tp="partial"), whole)
