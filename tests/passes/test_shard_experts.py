"""Experts over ranks: every expert is somewhere, tables lead there, cut experts leave sums."""

import pytest
import torch
from spread import logits_of_ranks, lowered, spread
from torch.fx import GraphModule

from octavo.compiler.legality import named_arguments, op
from octavo.compiler.mesh import ONE_RANK
from octavo.compiler.options import Parallel
from octavo.passes.rewrite import held
from octavo.passes.shard_experts import shard_experts
from octavo.passes.sharding import piece, shards, whole_weights

IDS = [3, 99, 17, 64, 5]


def rewritten(name: str, parallel: Parallel) -> GraphModule:
    graph_module = lowered(name)
    report = shard_experts(graph_module, parallel)
    assert report.notes["mixtures"] == "2" and not report.rejected
    return graph_module


@pytest.mark.parametrize(
    "parallel", [Parallel(ep=2), Parallel(ep=3), Parallel(ep=3, redundant_experts=2)], ids=str
)
def test_tables_lead_to_the_weights_of_the_expert_that_was_meant(parallel: Parallel) -> None:
    graph_module = rewritten("mixtral", parallel)
    for layer in graph_module.meta["expert_layers"]:
        answered = []
        for rank in range(parallel.world):
            table = piece(whole_weights(graph_module)[layer.table], shards(graph_module)[layer.table], rank)
            for expert, local in enumerate(table.tolist()):
                if local >= 0:
                    answered.append(expert)
                    for name in layer.weights:
                        whole = whole_weights(graph_module)[name]
                        own = piece(whole, shards(graph_module)[name], rank)
                        assert torch.equal(own[local], whole[expert])
        assert sorted(answered) == [0, 1, 2, 3], "each by one rank"


def test_the_mixture_asks_with_the_numbers_of_the_table() -> None:
    graph_module = rewritten("gpt_oss", Parallel(ep=4))
    mixture = next(n for n in graph_module.graph.nodes if op(n) == "octavo::moe")
    given = named_arguments(mixture)
    assert op(given["experts"]) == "octavo::map_experts"
    assert {given[n].meta["val"].shape[0] for n in ("gate_up", "gate_up_bias", "down", "down_bias")} == {1}
    weights = graph_module.meta["expert_layers"][0].weights
    assert [n.rpartition(".")[2] for n in weights] == [
        "experts_gate_up_proj_cat_2", "experts_gate_up_proj_bias_cat_3", "experts_down_proj_permute_7",
        "down_proj_bias",
    ]  # fmt: skip


def test_experts_cut_along_their_width_add_up_and_their_bias_counts_once() -> None:
    graph_module = spread("gpt_oss", tp=2)
    mixture = next(n for n in graph_module.graph.nodes if op(n) == "octavo::moe")
    bias = named_arguments(mixture)["down_bias"]
    assert held(graph_module, str(bias.target)).any()
    assert not piece(
        whole_weights(graph_module)[str(bias.target)], shards(graph_module)[str(bias.target)], 1
    ).any()
    (wanted,) = logits_of_ranks(lowered("gpt_oss"), ONE_RANK, [IDS])
    for logits in logits_of_ranks(graph_module, Parallel(tp=2).mesh, [IDS]):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-12)


def test_widths_that_do_not_divide_are_left_with_a_reason() -> None:
    report = shard_experts(lowered("mixtral"), Parallel(tp=5))
    assert "width 96 cannot be cut into 5" in report.rejected[0].reason
