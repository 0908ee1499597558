"""Heads and widths over the ranks of tp."""

from typing import Any

import pytest
import torch
from spread import PAGE_SIZE, SETTINGS, logits_of_ranks, lowered, spread
from torch.fx import GraphModule
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.compiler.capture import capture
from octavo.compiler.graph_model import copy_graph
from octavo.compiler.legality import named_arguments, op
from octavo.compiler.mesh import ONE_RANK
from octavo.compiler.options import CompileOptions, Parallel, QuantConfig
from octavo.compiler.parallelize import parallelize
from octavo.compiler.pipeline import lower
from octavo.compiler.progress import progress_bars
from octavo.compiler.quantize_model import quantize_model
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


def quantized(kv_heads: int) -> GraphModule:
    """Four heads of 64; weights of four bits whose block scales are swizzled."""
    torch.manual_seed(0)
    shape: Any = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    model = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=kv_heads, **shape)
    )
    graph_module = lower(capture(model.eval()), CompileOptions(verify="off"), SETTINGS).graph_module
    config = QuantConfig("nvfp4_weight_only", weights="nearest")
    with progress_bars(False) as bars:
        quantize_model(graph_module, config, None, PAGE_SIZE, "swizzled_128x4", bars, None)
    return graph_module


def test_swizzled_scales_are_cut_between_their_tiles() -> None:
    graph_module = quantized(kv_heads=4)
    reports = parallelize(graph_module, Parallel(tp=2), PAGE_SIZE, copy_graph(graph_module))
    assert reports[1].notes["cut"] == "1 attentions, 1 FFNs" and reports[-1].proof.worst == 0.0
    (scale,) = (n for n, s in shards(graph_module).items() if "q_proj" in n and s.pieces[1][0][1] > 768)
    # 768 rows of 16 blocks: 16 bytes a row; queries, keys and values of two heads each
    assert shards(graph_module)[scale].pieces[1] == ((2048, 4096), (6144, 8192), (10240, 12288))


def test_tiles_of_scales_are_not_cut() -> None:
    """Two heads of keys make 64 rows a rank, half a tile."""
    report = shard_tensors(quantized(kv_heads=2), Parallel(tp=2))
    assert "lie in tiles of 128 rows, and one of 2 parts would end at row 320" in report.rejected[0].reason


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
