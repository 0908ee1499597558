"""Which collectives come where; what a rank's reshapes and counts become; graphs that no collective mends."""

from collections import Counter
from typing import Any

import pytest
import torch
from spread import lowered, spread
from torch.fx import GraphModule

from octavo.compiler.check_placements import check_placements
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.legality import COLLECTIVES, named_arguments, op
from octavo.compiler.options import Parallel
from octavo.compiler.placement import Placement
from octavo.passes.insert_collectives import insert_collectives
from octavo.passes.sharding import spread as spread_weight


def collectives(graph_module: GraphModule) -> Counter[str]:
    found = [n for n in graph_module.graph.nodes if op(n) in COLLECTIVES]
    return Counter(f"{op(n).removeprefix('octavo::')} {named_arguments(n)['axis']}" for n in found)


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        ("mixtral", {"ep": 2}, {"all_reduce ep": 2}),
        ("mixtral", {"ep": 2, "tp": 2}, {"all_reduce tp": 4, "all_gather tp": 1}),
        ("mixtral", {"ep": 2, "dp": 2}, {"dispatch dp": 2, "combine dp": 2}),
        (
            "mixtral",
            {"ep": 4, "dp": 2, "tp": 2},
            {"dispatch dp": 2, "combine dp": 2, "all_reduce tp": 4, "all_gather tp": 1},
        ),
        ("mixtral", {"ep": 4, "dp": 2}, {"dispatch dp": 2, "combine dp": 2, "all_reduce ep": 2}),
        # two attentions, an FFN, and a mixture whose sum with its cut shared expert is one sum
        ("deepseek_v3", {"ep": 2, "tp": 2}, {"all_reduce tp": 4, "all_gather tp": 1}),
        # the shared expert is whole on every rank, so only the mixture is summed
        ("deepseek_v3", {"ep": 2}, {"all_reduce ep": 1}),
    ],
)
def test_collectives_follow_from_where_values_lie(
    name: str, sizes: dict[str, int], expected: dict[str, int]
) -> None:
    assert collectives(spread(name, **sizes)) == expected


def test_the_sum_of_experts_is_made_before_a_whole_shared_expert_is_added() -> None:
    """Added to the parts, it would count once a rank."""
    graph_module = spread("deepseek_v3", ep=2)
    (reduce,) = (n for n in graph_module.graph.nodes if op(n) == "octavo::all_reduce")
    assert op(reduce.all_input_nodes[0]) == "octavo::moe"
    assert {op(user) for user in reduce.users} <= {"octavo::add", "octavo::add_rms_norm"}


def lose(graph_module: GraphModule, name: str) -> None:
    node = next(n for n in graph_module.graph.nodes if op(n) == name)
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph_module.graph.erase_node(node)


@pytest.mark.parametrize(
    ("name", "sizes", "lost"),
    [
        ("deepseek_v3", {"ep": 2}, "octavo::all_reduce"),
        ("mixtral", {"ep": 2, "tp": 2}, "octavo::all_reduce"),
        ("mixtral", {"tp": 2}, "octavo::all_gather"),
    ],
)
def test_a_graph_that_lost_a_collective_is_refused(name: str, sizes: dict[str, Any], lost: str) -> None:
    graph_module = spread(name, **sizes)
    mesh = Parallel(**sizes).mesh
    check_placements(graph_module, mesh, after="test")
    lose(graph_module, lost)
    with pytest.raises(IllegalGraphError, match=r"test: .* along (ep|tp), and it is (partial|sharded)"):
        check_placements(graph_module, mesh, after="test")


def test_a_graph_that_sums_a_whole_value_is_refused() -> None:
    """The shared expert of every rank in the sum: eight times itself on eight ranks."""
    graph_module = spread("deepseek_v3", ep=2)
    (reduce,) = (n for n in graph_module.graph.nodes if op(n) == "octavo::all_reduce")
    with graph_module.graph.inserting_after(reduce):
        again = graph_module.graph.call_function(torch.ops.octavo.all_reduce.default, (reduce, "ep"))
    again.meta["val"] = reduce.meta["val"]
    reduce.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    with pytest.raises(IllegalGraphError, match="needs x partial along ep, and it is replicated"):
        check_placements(graph_module, Parallel(ep=2).mesh, after="test")


def test_experts_along_dp_without_tokens_sent_to_them_are_refused() -> None:
    graph_module = spread("mixtral", ep=2, dp=2)
    mixture = next(n for n in graph_module.graph.nodes if op(n) == "octavo::moe")
    sent = named_arguments(mixture)["x"].args[0]
    mixture.replace_input_with(named_arguments(mixture)["x"], sent.args[0])
    with pytest.raises(IllegalGraphError, match="along dp"):
        check_placements(graph_module, Parallel(ep=2, dp=2).mesh, after="test")


def test_a_value_that_no_collective_brings_is_refused_with_its_node() -> None:
    """A norm's weight in parts: nothing gathers weights."""
    graph_module = lowered("llama")
    node = next(
        n for n in graph_module.graph.find_nodes(op="get_attr") if str(n.target) == "model.norm.weight"
    )
    spread_weight(graph_module, node, 0, [[(0, 32)], [(32, 64)]], Placement(tp="tokens"))
    with pytest.raises(IllegalGraphError, match=r"add_rms_norm needs \S*norm_weight\S* replicated along tp"):
        insert_collectives(graph_module, Parallel(tp=2))


def test_sizes_of_reshapes_are_the_ranks_own() -> None:
    graph_module = spread("qwen3", tp=2)
    sizes = [n.args[1] for n in graph_module.graph.nodes if op(n) == "aten::reshape"]
    assert sizes[:4] == [[1, -1, 2, 16], [1, -1, 1, 16], [1, -1, 1, 16], [1, -1, 32]]
