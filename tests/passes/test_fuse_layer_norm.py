"""aten.layer_norm, and (x - mean) * rsqrt(var + eps) * weight spelled out, become octavo.layer_norm."""

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, calls, count
from torch import fx

from octavo.passes.fuse_layer_norm import fuse_layer_norm
from octavo.passes.pattern import arguments, aten
from octavo.passes.rule import run_pass

layer_norm = torch.ops.octavo.layer_norm.default


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    ("name", "norms"), [("gpt2", 2 * LAYERS + 1), ("cohere2", LAYERS + 1)]
)  # the op, and spelled out
def test_fires_with_the_same_numbers(name: str, norms: int, dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_layer_norm", name, dtype)
    assert report.matched == count(graph_module, layer_norm) == norms
    assert count(graph_module, aten.layer_norm.default, aten.rsqrt.default) == 0
    assert_same_numbers(graph_module, name, dtype)


def whole(weighted: bool, biased: bool, eps: float | None) -> fx.GraphModule:
    graph = LoweredGraph()
    weight = graph.weight("w", torch.ones(8)) if weighted else None
    bias = graph.weight("b", torch.ones(8)) if biased else None
    last = [] if eps is None else [eps, False]
    x = graph.tokens("x", (8,), FP32)
    return graph.finish(graph.function(aten.layer_norm.default, x, [8], weight, bias, *last))


@pytest.mark.parametrize("eps", [1e-3, None])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_keeps_weight_bias_and_eps(weighted: bool, biased: bool, eps: float | None) -> None:
    graph_module = whole(weighted, biased, eps)
    assert run_pass(fuse_layer_norm, graph_module).matched == 1
    (node,) = calls(graph_module, layer_norm)
    given = ["w" if weighted else "None", "b" if biased else "None"]
    assert [str(value) for value in node.args[1:]] == [*given, str(eps or 1e-5)]


def test_no_weight_at_all() -> None:
    graph = LoweredGraph()
    graph_module = graph.finish(graph.function(aten.layer_norm.default, graph.tokens("x", (8,), FP32), [8]))
    assert run_pass(fuse_layer_norm, graph_module).matched == 1
    assert list(calls(graph_module, layer_norm)[0].args[1:]) == [None, None, 1e-5]


def test_refuses_a_norm_over_two_axes() -> None:
    graph = LoweredGraph()
    x = graph.tokens("x", (4, 8), FP32)
    report = run_pass(fuse_layer_norm, graph.finish(graph.function(aten.layer_norm.default, x, [4, 8])))
    assert report.matched == 0
    assert [r.reason for r in report.rejected] == ["it normalises over [4, 8], expected the last axis [8]"]


def spelled(
    dtype: torch.dtype = FP32, result: torch.dtype = FP32, axis: int = -1, width: int = 8, other: bool = False
) -> fx.GraphModule:
    """As models write it, computed in fp32; other: what is subtracted is the mean of another tensor."""
    graph = LoweredGraph()
    x, weight = graph.tokens("x", (8,), dtype), graph.weight("w", torch.ones(width))
    up = graph.function(aten._to_copy.default, x, dtype=FP32)
    source = graph.tokens("y", (8,), FP32) if other else up
    centred = graph.function(aten.sub.Tensor, up, graph.function(aten.mean.dim, source, [axis], True))
    square = graph.function(aten.pow.Tensor_Scalar, centred, 2)
    variance = graph.function(aten.mean.dim, square, [axis], True)
    scale = graph.function(aten.rsqrt.default, graph.function(aten.add.Tensor, variance, 1e-6))
    y = graph.function(aten.mul.Tensor, weight, graph.function(aten.mul.Tensor, centred, scale))
    return graph.finish(y if result is FP32 else graph.function(aten._to_copy.default, y, dtype=result))


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_spelled_form_takes_the_narrow_value(dtype: torch.dtype) -> None:
    graph_module = spelled(dtype, dtype)
    assert run_pass(fuse_layer_norm, graph_module).matched == 1
    (node,) = calls(graph_module, layer_norm)
    assert [str(value) for value in arguments(node)[1:]] == ["w", "None", "1e-06"]
    assert node.meta["val"].dtype == arguments(node)[0].meta["val"].dtype == dtype


@pytest.mark.parametrize(
    ("graph_module", "reason"),
    [
        (spelled(width=1), "the weight has shape (1,)"),
        (spelled(axis=1), "fuse_spelled_layer_norm: expected -1, got 1"),
    ],
    ids=["width", "axis"],
)
def test_refuses_what_is_no_layer_norm(graph_module: fx.GraphModule, reason: str) -> None:
    report = run_pass(fuse_layer_norm, graph_module)
    assert report.matched == 0
    assert any(r.reason.startswith(reason) for r in (*report.rejected, *report.near_misses))


def test_leaves_a_tensor_less_the_mean_of_another() -> None:
    assert run_pass(fuse_layer_norm, spelled(other=True)).matched == 0


def test_refuses_to_round() -> None:
    report = run_pass(fuse_layer_norm, spelled(FP32, BF16))
    assert [r.reason for r in report.rejected] == ["the input is torch.float32 and the result torch.bfloat16"]


@pytest.mark.parametrize("name", ["gpt2", "cohere2"])
def test_idempotent(name: str) -> None:
    assert_idempotent("fuse_layer_norm", name)
