"""x * rsqrt(mean(x^2) + eps) * weight becomes octavo.rms_norm, and nothing else does."""

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, calls, count
from torch import fx

from octavo.compiler.verify import prove_report
from octavo.passes.fuse_rms_norm import fuse_rms_norm
from octavo.passes.pattern import aten
from octavo.passes.rule import run_pass

rms_norm = torch.ops.octavo.rms_norm.default


def norm_of(
    dtype: torch.dtype = FP32, width: int = 64, axis: int = -1, result: torch.dtype = FP32
) -> fx.GraphModule:
    """A norm as models write it, computed in fp32 and converted to `result` in the end."""
    graph = LoweredGraph()
    x = graph.tokens("x", (64,), dtype)
    weight = graph.weight("w", torch.ones(width))
    up = graph.function(aten._to_copy.default, x, dtype=FP32)
    mean = graph.function(aten.mean.dim, graph.function(aten.pow.Tensor_Scalar, up, 2), [axis], True)
    scale = graph.function(aten.rsqrt.default, graph.function(aten.add.Tensor, mean, 1e-6))
    y = graph.function(aten.mul.Tensor, up, scale)
    y = graph.function(aten.mul.Tensor, weight, y)
    return graph.finish(y if result is FP32 else graph.function(aten._to_copy.default, y, dtype=result))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama", "sdpa"])
def test_fires_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_rms_norm", name, dtype)
    assert report.matched == count(graph_module, rms_norm) == 2 * LAYERS + 1
    assert count(graph_module, aten.rsqrt.default) == 0
    assert_same_numbers(graph_module, name, dtype)


def test_keeps_eps_and_where_it_comes_from() -> None:
    graph_module, report = after("fuse_rms_norm")
    assert [node.args[2] for node in calls(graph_module, rms_norm)] == [1e-6] * (2 * LAYERS + 1)
    assert "layers.0.input_layernorm, modeling_llama.py:" in report.sites[-1].where


def test_takes_the_narrow_value_if_the_result_is_narrow() -> None:
    graph_module = norm_of(BF16, result=BF16)
    assert run_pass(fuse_rms_norm, graph_module).matched == 1
    assert calls(graph_module, rms_norm)[0].meta["val"].dtype is BF16


def test_takes_the_wide_value_if_the_result_is_wide() -> None:
    graph_module = norm_of(BF16)
    assert run_pass(fuse_rms_norm, graph_module).matched == 1
    assert calls(graph_module, rms_norm)[0].meta["val"].dtype is FP32


def test_refuses_to_round_and_leaves_the_conversion() -> None:
    graph_module = norm_of(FP32, result=BF16)
    report = run_pass(fuse_rms_norm, graph_module)
    assert [r.reason for r in report.rejected] == ["the input is torch.float32 and the result torch.bfloat16"]
    assert (report.matched, count(graph_module, aten._to_copy.default)) == (1, 1)


def test_refuses_a_weight_that_is_not_one_row() -> None:
    graph_module = norm_of(width=1)
    report = run_pass(fuse_rms_norm, graph_module)
    assert {r.reason for r in report.rejected} == {"the weight has shape (1,), expected (64,)"}
    assert report.matched == 1  # the norm below it, which needs no weight
    (node,) = calls(graph_module, rms_norm)
    assert node.all_input_nodes[1].target == "folded.ones_float32_64"


def test_reports_a_mean_over_another_axis_as_a_near_miss() -> None:
    report = run_pass(fuse_rms_norm, norm_of(axis=1))
    assert (report.matched, report.rejected) == (0, [])
    assert "fuse_rms_norm: expected -1, got 1" in {miss.reason for miss in report.near_misses}


def test_idempotent() -> None:
    assert_idempotent("fuse_rms_norm")


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("spelling", ["rsqrt", "power"])
def test_a_norm_without_a_weight_gets_ones(spelling: str, dtype: torch.dtype) -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (32,), dtype)
    wide = graph.function(aten._to_copy.default, x, dtype=FP32) if dtype is not FP32 else x
    mean = graph.function(aten.mean.dim, graph.function(aten.pow.Tensor_Scalar, wide, 2), [-1], True)
    moved = graph.function(aten.add.Tensor, mean, 1e-6)
    rsqrt = spelling == "rsqrt"
    inverse = graph.function(
        *((aten.rsqrt.default, moved) if rsqrt else (aten.pow.Tensor_Scalar, moved, -0.5))
    )
    y = graph.function(aten.mul.Tensor, wide, inverse)
    y = graph.function(aten._to_copy.default, y, dtype=dtype) if dtype is not FP32 else y
    graph_module = graph.finish(y)
    report = run_pass(fuse_rms_norm, graph_module)
    prove_report(report, {})
    (norm,) = calls(graph_module, rms_norm)
    assert report.matched == 1 and norm.args[2] == 1e-6
    assert str(norm.args[1].target) == f"folded.ones_{str(dtype).removeprefix('torch.')}_32"  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_sum_of_squares_is_the_width_times_their_mean(dtype: torch.dtype) -> None:
    graph = LoweredGraph()
    x = graph.tokens("x", (48,), dtype)
    up = x if dtype is FP32 else graph.function(aten._to_copy.default, x, dtype=FP32)
    total = graph.function(aten.sum.dim_IntList, graph.function(aten.pow.Tensor_Scalar, up, 2), [-1], True)
    inverse = graph.function(aten.rsqrt.default, graph.function(aten.add.Tensor, total, 4.8e-5))
    y = graph.function(aten.mul.Tensor, up, inverse)
    graph_module = graph.finish(y if dtype is FP32 else graph.function(aten._to_copy.default, y, dtype=dtype))
    report = run_pass(fuse_rms_norm, graph_module)
    prove_report(report, {})
    (node,) = calls(graph_module, rms_norm)
    assert node.args[2] == pytest.approx(1e-6)
