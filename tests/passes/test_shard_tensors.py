"""Heads and widths over the ranks of tp."""

import pytest
import torch
from spread import logits_of_ranks, lowered, spread
from torch.fx import GraphModule

from octavo.compiler.legality import named_arguments, op
from octavo.compiler.mesh import ONE_RANK
from octavo.compiler.options import Parallel
from octavo.passes.rewrite import held
from octavo.passes.shard_tensors import shard_tensors
from octavo.passes.sharding import piece, shards, whole_weights

IDS = [3, 99, 17, 64, 5]


def first(graph_module: GraphModule, name: str) -> dict[str, object]:
    return named_arguments(next(n for n in graph_module.graph.nodes if op(n) == name))


# Merged projections; a norm of each head; a bias behind the sum, sinks; no gate; latents; slopes; one head of keys.
@pytest.mark.parametrize(
    ("name", "tp"),
    [
        ("llama", 2),
        ("llama", 4),
        ("qwen3", 2),
        ("gpt_oss", 2),
        ("gpt2", 2),
        ("deepseek_v3", 2),
        *(
            pytest.param(name, tp, marks=pytest.mark.slow)
            for name, tp in (("bloom", 2), ("falcon", 2), ("gemma3", 4))
        ),
    ],
)
def test_ranks_make_the_same_logits(name: str, tp: int) -> None:
    graph_module = spread(name, tp=tp)
    (wanted,) = logits_of_ranks(lowered(name), ONE_RANK, [IDS])
    for logits in logits_of_ranks(graph_module, Parallel(tp=tp).mesh, [IDS]):
        torch.testing.assert_close(logits, wanted, rtol=0, atol=1e-11 * float(wanted.abs().max()))


def test_a_merged_projection_is_cut_part_by_part() -> None:
    """4 heads of queries and 2 of keys of 16: rank 1 has heads 2, 3 and the second key and value head."""
    graph_module = spread("llama", tp=2)
    node = next(n for n in graph_module.graph.nodes if op(n) == "octavo::rope_kv_write")
    weight = named_arguments(named_arguments(node)["qkv"])["weight"]
    assert shards(graph_module)[str(weight.target)].pieces[1] == ((32, 64), (80, 96), (112, 128))
    assert named_arguments(node)["num_heads"] == 2
    assert tuple(named_arguments(node)["k_cache"].meta["val"].shape[1:]) == (1, 4, 16)


def test_ranks_share_a_key_head_where_there_are_fewer() -> None:
    graph_module = spread("llama", tp=4)
    node = next(n for n in graph_module.graph.nodes if op(n) == "octavo::rope_kv_write")
    weight = named_arguments(named_arguments(node)["qkv"])["weight"]
    pieces = shards(graph_module)[str(weight.target)].pieces
    assert pieces[0][1] == pieces[1][1] == (64, 80) and pieces[2][1] == pieces[3][1] == (80, 96)


def test_a_bias_behind_a_sum_is_added_by_one_rank() -> None:
    graph_module = spread("gpt2", tp=2)
    biases = [name for name in shards(graph_module) if name.endswith("c_proj.bias")]
    assert len(biases) == 4
    for name in biases:
        assert held(graph_module, name).any()
        assert not piece(whole_weights(graph_module)[name], shards(graph_module)[name], 1).any()


def test_what_does_not_divide_is_left_with_a_reason() -> None:
    report = shard_tensors(lowered("llama"), Parallel(tp=3))
    assert any(
        "4 heads of queries and 2 of keys do not divide over 3 ranks" in r.reason for r in report.rejected
    )


def test_attention_over_latents_is_cut_by_heads_over_whole_latents() -> None:
    graph_module = spread("deepseek_v3", tp=2)
    node = next(n for n in graph_module.graph.nodes if op(n) == "octavo::paged_mla_attention")
    assert node.meta["val"].shape[2] == 2, "of four heads"
    assert "placement" not in named_arguments(node)["cache"].meta
    into = named_arguments(named_arguments(node)["q_latent"])["weight"]
    assert shards(graph_module)[str(into.target)].pieces == (((0, 2),), ((2, 4),))
