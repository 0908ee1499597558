"""The projections of q, k and v become one, with their biases, if one kernel can read the parts in place."""

import pytest
import torch
from models import HEAD_DIM, HEADS, KV_HEADS, LAYERS, llama
from stages import BF16, FP32, SETTINGS, after, assert_idempotent, assert_same_numbers, before, calls, count

from octavo.compiler.capture import capture
from octavo.compiler.pipeline import PIPELINE, apply_step
from octavo.passes.merge_qkv import merge_qkv
from octavo.passes.pattern import aten
from octavo.passes.rule import run_pass

octavo = torch.ops.octavo
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama", "biased"])
def test_fires_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("merge_qkv", name, dtype)
    merged = [n for n in calls(graph_module, octavo.linear.default) if n.meta["val"].shape[-1] == QKV]
    assert report.matched == len(merged) == LAYERS
    assert [len(n.args) for n in merged] == [3 if name == "biased" else 2] * LAYERS
    assert_same_numbers(graph_module, name, dtype)


def test_parts_are_q_then_k_then_v() -> None:
    graph_module, _ = after("merge_qkv")
    parts = [n.args[2:4] for n in calls(graph_module, aten.slice.Tensor) if n.args[1] == 2]
    assert parts == [(0, 64), (64, 96), (96, 128)] * LAYERS


def test_refuses_projections_without_rotation() -> None:
    report = merge_qkv(before("merge_qkv", "fused"))
    expected = "q and k are not views of a projection each, rotated by tables, and v a view of one"
    assert [r.reason for r in report.rejected] == [expected] * LAYERS
    assert report.matched == 0


def test_refuses_a_bias_on_some() -> None:
    graph_module = before("merge_qkv", "biased")
    query = next(
        n for n in calls(graph_module, octavo.linear.default) if str(n.args[1]).endswith("_q_weight")
    )
    query.args = query.args[:2]
    reasons = [r.reason for r in run_pass(merge_qkv, graph_module).rejected]
    assert reasons == ["some of the projections have a bias and some have none"]


def test_refuses_different_inputs() -> None:
    graph_module = before("merge_qkv")
    queries = [n for n in calls(graph_module, octavo.linear.default) if "q_proj" in str(n.args[1])]
    queries[1].args = (calls(graph_module, octavo.rms_norm.default)[0], queries[1].args[1])
    report = run_pass(merge_qkv, graph_module)
    assert report.matched == LAYERS - 1
    assert [r.reason for r in report.rejected] == ["q and k do not share their input and their tables"]


def test_idempotent() -> None:
    assert_idempotent("merge_qkv")


def test_attention_biases_of_a_library_model_lower() -> None:
    graph_module = capture(llama(attention_bias=True, num_hidden_layers=1)).graph_module
    for step in PIPELINE:
        apply_step(step, graph_module, SETTINGS)
    assert count(graph_module, octavo.rope_kv_write.default) == 1
