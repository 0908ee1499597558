"""Pieces of weights: what each rank holds, and what is kept beside the graph."""

import torch
from spread import lowered
from torch.fx import GraphModule, Node

from octavo.compiler.mesh import Mesh
from octavo.compiler.placement import Placement
from octavo.compiler.program import Shard
from octavo.passes.rewrite import held
from octavo.passes.sharding import by_coordinate, own_copy, piece, placement_of, shards, spread, whole_weights


def weight(graph_module: GraphModule, ending: str) -> Node:
    nodes = graph_module.graph.find_nodes(op="get_attr")
    found: list[Node] = [n for n in nodes if str(n.target).endswith(ending)]
    return found[0]


def test_a_piece_is_its_ranges_in_order_and_a_view_where_it_is_one() -> None:
    whole = torch.arange(12.0).reshape(6, 2)
    shard = Shard(0, (((4, 6), (0, 1)), ((1, 4),)))
    assert piece(whole, shard, 0).tolist() == [[8, 9], [10, 11], [0, 1]]
    assert piece(whole, shard, 1).data_ptr() == whole[1].data_ptr()
    assert [shard.length(rank) for rank in range(2)] == [3, 3]


def test_the_graph_has_the_piece_of_rank_0_and_the_whole_is_kept() -> None:
    graph_module = lowered("mixtral")
    node = weight(graph_module, "o_proj.weight")
    before = held(graph_module, str(node.target))
    spread(graph_module, node, 1, [[(32, 64)], [(0, 32)]], Placement(tp=1))
    assert torch.equal(held(graph_module, str(node.target)), before[:, 32:])
    assert whole_weights(graph_module)[str(node.target)] is before
    assert tuple(node.meta["val"].shape) == (64, 32) and placement_of(node) == Placement(tp=1)
    assert shards(graph_module)[str(node.target)].pieces == (((32, 64),), ((0, 32),))


def test_a_weight_with_two_readers_is_cut_for_one_of_them() -> None:
    graph_module = lowered("mixtral")
    node = weight(graph_module, "positions.cos")
    first, second, *_ = list(node.users)
    copy = own_copy(graph_module, node, second)
    assert copy is not node and copy in second.all_input_nodes and node in first.all_input_nodes
    assert own_copy(graph_module, copy, second) is copy
    assert held(graph_module, str(copy.target)).data_ptr() == held(graph_module, str(node.target)).data_ptr()


def test_ranges_by_a_coordinate() -> None:
    ranges = by_coordinate(Mesh(dp=2, ep=1, tp=2), "tp", lambda t: [(t, t + 1)])
    assert ranges == [[(0, 1)], [(1, 2)], [(0, 1)], [(1, 2)]]
