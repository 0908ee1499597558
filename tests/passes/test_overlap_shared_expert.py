"""A shared expert runs while tokens travel: where it then stands, and what is left alone."""

import torch
from spread import logits_of_ranks, lowered, spread
from torch.fx import GraphModule

from octavo.compiler.legality import named_arguments, op
from octavo.compiler.mesh import ONE_RANK
from octavo.compiler.options import Parallel
from octavo.passes.insert_collectives import insert_collectives
from octavo.passes.overlap_shared_expert import overlap_shared_expert
from octavo.passes.plan_memory import plan_memory
from octavo.passes.shard_experts import shard_experts

PROMPTS = [[3, 99, 17, 64, 5], [7, 1]]


def between(graph_module: GraphModule) -> list[str]:
    """Ops from a dispatch to its arrival."""
    names = [op(n).removeprefix("octavo::") for n in graph_module.graph.nodes]
    return [n for n in names[names.index("dispatch") + 1 : names.index("arrived")] if n != "getitem"]


def test_the_shared_expert_stands_between_dispatch_and_arrival() -> None:
    graph_module = spread("deepseek_v3", ep=2, dp=2)
    assert between(graph_module) == ["linear", "act_mul", "linear"]
    mixture = next(n for n in graph_module.graph.nodes if op(n) == "octavo::moe")
    assert {op(a.args[0]) for a in mixture.args[:3]} == {"octavo::arrived"}
    mesh = Parallel(ep=2, dp=2).mesh
    for logits, ids in zip(logits_of_ranks(graph_module, mesh, PROMPTS), PROMPTS, strict=True):
        (wanted,) = logits_of_ranks(lowered("deepseek_v3"), ONE_RANK, [ids])
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-11)


def test_nothing_takes_the_memory_of_what_travels() -> None:
    graph_module = spread("deepseek_v3", ep=2, dp=2)
    nodes = list(graph_module.graph.nodes)
    memory = plan_memory(graph_module.graph)
    arrived = next(n for n in nodes if op(n) == "octavo::arrived")
    (dispatch,) = {n.args[0] for n in arrived.args[:4]}
    assert isinstance(dispatch, torch.fx.Node)
    used = [*dispatch.meta["buffer"], *(n.meta["buffer"] for n in named_arguments(arrived)["sent"])]
    beside = nodes[nodes.index(dispatch) + 1 : nodes.index(arrived)]
    for node in beside:
        made = node.meta.get("buffer")
        if op(node) != "getitem" and made is not None:
            for other in used:
                low, high = sorted((made, other), key=lambda place: place.offset.order)
                assert (high.offset - low.offset).has_room_for(low.width)
    assert memory.rows > 0


def test_a_mixture_without_a_shared_expert_is_not_awaited() -> None:
    graph_module = spread("mixtral", ep=2, dp=2)
    assert "octavo::arrived" not in {op(n) for n in graph_module.graph.nodes}


def test_what_meets_other_ranks_itself_is_left_where_it_is() -> None:
    """Two collectives at once might be in one order on one rank, and in the other on another."""
    graph_module = lowered("deepseek_v3")
    parallel = Parallel(ep=2, dp=2)
    shard_experts(graph_module, parallel)
    insert_collectives(graph_module, parallel)
    down = next(
        n for n in graph_module.graph.nodes if op(n) == "octavo::act_mul" and "experts" in str(n.meta)
    )
    with graph_module.graph.inserting_after(down):
        reduce = graph_module.graph.call_function(torch.ops.octavo.all_reduce.default, (down, "tp"))
    reduce.meta["val"] = down.meta["val"]
    down.replace_all_uses_with(reduce, delete_user_cb=lambda user: user is not reduce)
    report = overlap_shared_expert(graph_module, parallel)
    assert (
        report.notes["overlapped"] == "0" and "meets other ranks too (all_reduce" in report.rejected[0].reason
    )
