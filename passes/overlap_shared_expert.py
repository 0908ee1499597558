"""What does not wait for dispatched tokens runs while they travel: a shared expert, between a dispatch and its arrival.

octavo.arrived stands where results of a dispatch are first needed; nothing in front of it reads them, and what was sent
stays as it is until then. Not moved: what itself meets other ranks, as collectives keep one order on all of them.
"""

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.legality import COLLECTIVES, named_arguments, op
from octavo.compiler.options import Parallel
from octavo.passes.rewrite import fake_mode, set_meta
from octavo.passes.rule import PassReport
from octavo.passes.sharding import placement_of

octavo = torch.ops.octavo


def overlap_shared_expert(graph_module: GraphModule, parallel: Parallel) -> PassReport:
    report = PassReport("overlap_shared_expert", "bitwise")
    moved = 0
    for dispatch in [n for n in graph_module.graph.nodes if op(n) == "octavo::dispatch"]:
        beside = _beside(graph_module, dispatch)
        if not beside:
            continue
        if meets := [n for n in beside if op(n) in COLLECTIVES]:
            report.reject(dispatch, f"what runs beside it meets other ranks too ({meets[0].name})")
            continue
        _await(graph_module, dispatch, beside)
        moved += 1
    report.notes["overlapped"] = str(moved)
    return report


def _beside(graph_module: GraphModule, dispatch: Node) -> list[Node]:
    """Calls behind the dispatch that need nothing of it, and that what needs it is joined with next."""
    order = list(graph_module.graph.nodes)
    behind = order[order.index(dispatch) + 1 :]
    waiting = {dispatch}
    for node in behind:
        if waiting & set(node.all_input_nodes):
            waiting.add(node)
    combine = next(n for n in behind if op(n) == "octavo::combine" and n in waiting)
    join = next((n for n in behind if combine in n.all_input_nodes), None)
    found: set[Node] = set()
    stack = [] if join is None else [n for n in join.all_input_nodes if n not in waiting]
    while stack:
        node = stack.pop()
        if node in behind and node.op == "call_function" and node not in found:
            found.add(node)
            stack += node.all_input_nodes
    return [node for node in behind if node in found]


def _await(graph_module: GraphModule, dispatch: Node, beside: list[Node]) -> None:
    """dispatch, its results, what runs beside it, its arrival; the rest reads what arrived."""
    results = sorted(dispatch.users, key=lambda n: int(n.args[1]))  # type: ignore[arg-type]
    assert [op(n) for n in results] == ["getitem"] * 4, "a dispatch has four results, all of them read"
    last = results[-1]
    for node in [*results, *beside]:
        (dispatch if node is results[0] else last).append(node)
        last = node
    given = named_arguments(dispatch)
    sent = [given[name] for name in ("x", "experts", "weights", "outer") if isinstance(given[name], Node)]
    readers = {result: [u for u in result.users] for result in results}
    with graph_module.graph.inserting_after(last):
        arrived = graph_module.graph.call_function(octavo.arrived.default, (*results, sent, given["axis"]))
    mode = fake_mode(graph_module)
    set_meta(arrived, mode, dispatch)
    arrived.meta["placements"] = [placement_of(result) for result in results]
    after: Any = arrived
    for index, result in enumerate(results):
        with graph_module.graph.inserting_after(after):
            after = graph_module.graph.call_function(operator.getitem, (arrived, index))
        set_meta(after, mode, dispatch)
        after.meta["placement"] = placement_of(result)
        for reader in readers[result]:
            reader.replace_input_with(result, after)
