"""Attention is recognised in every spelling, masks are classified by what they allow, others are refused."""

from collections.abc import Callable

import pytest
import torch
from lowered import LoweredGraph
from models import HEAD_DIM, LAYERS, SCALE, WINDOW
from stages import BF16, FP32, SETTINGS, after, assert_idempotent, assert_same_numbers, before, calls, count
from torch import fx

from octavo.compiler.pipeline import Settings
from octavo.compiler.verify import prove_report
from octavo.passes.fuse_attention import fuse_attention
from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import held
from octavo.passes.rule import PassReport

attention = torch.ops.octavo.attention.default
LENGTH = 16


@pytest.mark.parametrize(
    ("name", "dtype", "window"),
    [
        ("sdpa", FP32, 0),
        ("softmax", FP32, 0),
        ("softmax", BF16, 0),
        ("fused", FP32, 0),
        ("einsum", FP32, 0),
        ("window", FP32, WINDOW),
    ],
)
def test_fires_with_the_same_numbers(name: str, dtype: torch.dtype, window: int) -> None:
    graph_module, report = after("fuse_attention", name, dtype)
    assert report.matched == count(graph_module, attention) == LAYERS
    assert count(graph_module, aten.matmul.default, aten.repeat_interleave.self_int) == 0
    for node in calls(graph_module, attention):
        assert list(node.args[3:]) == [None, pytest.approx(SCALE), True, window, 0.0]
    assert_same_numbers(graph_module, name, dtype)


def test_unrepeats_the_heads_of_grouped_queries() -> None:
    for name in ("sdpa", "softmax"):
        graph_module, _ = after("fuse_attention", name)
        shapes = [[n.meta["val"].shape[2] for n in arguments(a)[:3]] for a in calls(graph_module, attention)]
        assert shapes == [[4, 2, 2]] * LAYERS


def test_bidirectional_attention_is_fused_as_such() -> None:
    graph_module, _ = after("fuse_attention", "bidirectional")
    assert [node.args[5] for node in calls(graph_module, attention)] == [False] * LAYERS


def test_refuses_a_prefix_mask_with_its_length() -> None:
    report = fuse_attention(before("fuse_attention", "prefix"), SETTINGS.max_model_len)
    expected = (
        "is prefix-LM: query i sees key j > i for j < 3, which a causal page cache cannot serve, as a step may "
        "hold a part of the prefix"
    )
    assert report.matched == 0
    assert [r.reason.removeprefix("the mask masked_fill ") for r in report.rejected] == [expected] * LAYERS
    assert "layers.0.attention, models.py:" in report.rejected[0].where


def test_idempotent() -> None:
    assert_idempotent("fuse_attention", "softmax")


Scores = Callable[[LoweredGraph, fx.Node], fx.Node]


def refused(change: Scores, heads: int = 2, axis: int = -1, twice: bool = False) -> str:
    """Why attention over the changed scores is left alone."""
    return reason_of(fuse_attention(with_scores(change, heads, axis, twice), LENGTH))


def with_scores(change: Scores, heads: int = 2, axis: int = -1, twice: bool = False) -> fx.GraphModule:
    graph = LoweredGraph()
    ids = graph.placeholder("input_ids", torch.zeros(1, 11, dtype=torch.int64), [1])
    q, k, v = (graph.tokens(name, (heads, HEAD_DIM), FP32) for name in "qkv")
    q, v = (graph.function(aten.permute.default, node, [0, 2, 1, 3]) for node in (q, v))
    k = graph.function(aten.permute.default, k, [0, 2, 3, 1])
    graph.ids = ids  # type: ignore[attr-defined]
    scores = change(graph, graph.function(aten.matmul.default, q, k))
    weights = graph.function(aten.softmax.int, scores, axis)
    out = graph.function(aten.matmul.default, weights, v)
    return graph.finish(out, weights) if twice else graph.finish(out)


def reason_of(report: PassReport) -> str:
    assert report.matched == 0
    (rejection,) = report.rejected
    return rejection.reason


def plus(mask: torch.Tensor) -> Scores:
    """Adds a constant mask, cut to the length of the sequence."""

    def change(graph: LoweredGraph, scores: fx.Node) -> fx.Node:
        length = graph.function(aten.sym_size.int, graph.ids, 1)  # type: ignore[attr-defined]
        cut = graph.weight("mask", mask)
        for axis in (mask.dim() - 2, mask.dim() - 1):
            cut = graph.function(aten.slice.Tensor, cut, axis, 0, length)
        return graph.function(aten.add.Tensor, scores, cut)

    return change


CAUSAL = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)


def test_refuses_a_bias_that_is_no_multiple_of_the_distance() -> None:
    biases = torch.tensor([1.0, 0.5])[:, None, None] * torch.arange(LENGTH) ** 2
    assert refused(plus((CAUSAL + biases)[None])).startswith(
        "slice_tensor_1 adds a bias of up to 225 to allowed scores other than a multiple of the distance"
    )


def test_refuses_a_mask_that_forbids_by_little() -> None:
    def change(graph: LoweredGraph, scores: fx.Node) -> fx.Node:
        later = graph.weight("later", CAUSAL.bool()[:1, :1])
        return graph.function(aten.masked_fill.Scalar, scores, later, -5.0)

    assert refused(change) == "masked scores become -5.0, which does not forbid a key"


def test_refuses_a_mask_that_depends_on_tokens() -> None:
    def change(graph: LoweredGraph, scores: fx.Node) -> fx.Node:
        padding = graph.function(aten.eq.Scalar, graph.ids, 90)  # type: ignore[attr-defined]
        wide = graph.function(aten.reshape.default, padding, [1, 1, 1, -1])
        return graph.function(aten.masked_fill.Scalar, scores, wide, float("-inf"))

    assert refused(change) == "the mask reshape_default depends on tokens, not on positions alone"


def test_refuses_a_scale_that_is_computed() -> None:
    def change(graph: LoweredGraph, scores: fx.Node) -> fx.Node:
        return graph.function(aten.mul.Tensor, scores, graph.weight("temperature", torch.ones(1)))

    assert refused(change) == "the scores are multiplied by temperature, which is not a constant"


def test_refuses_an_op_between_scores_and_softmax() -> None:
    reason = refused(lambda graph, scores: graph.function(aten.relu.default, scores))
    assert reason == "relu_default (aten.relu) stands between the scores and the softmax"


def test_refuses_softmax_over_queries_and_weights_used_twice() -> None:
    assert refused(lambda _, scores: scores, axis=2) == "softmax over axis 2, not over the keys"
    assert "not into one product with v" in refused(lambda _, scores: scores, twice=True)


def test_a_window_as_long_as_the_model_is_none() -> None:
    graph_module = before("fuse_attention", "window")
    fuse_attention(graph_module, Settings(4, WINDOW).max_model_len)
    assert [node.args[6] for node in calls(graph_module, attention)] == [0] * LAYERS


def test_products_of_heads_without_a_batch_axis_and_a_scaled_bias() -> None:
    """Bloom's spelling: products over (heads, T, D), a view for the mask, and one for the product with v."""
    graph = LoweredGraph()
    ids = graph.input("input_ids")
    q, k, v = (
        graph.function(
            aten.reshape.default, graph.function(aten.permute.default, graph.tokens(n, (2, 8), FP32), [0, 2, 1, 3]),
            [2, -1, 8],
        )
        for n in "qkv"
    )  # fmt: skip
    length = graph.function(aten.sym_size.int, ids, 1)
    keys = graph.function(aten.reshape.default, graph.function(aten.arange.default, length), [1, 1, -1])
    bias = graph.function(
        aten.mul.Tensor, graph.weight("slopes", torch.tensor([0.5, 0.25])[:, None, None]), keys
    )
    product = graph.function(aten.bmm.default, q, graph.function(aten.permute.default, k, [0, 2, 1]))
    scores = graph.function(aten.add.Tensor, bias, graph.function(aten.mul.Tensor, product, 0.25))
    wide = graph.function(aten.mul.Tensor, graph.function(aten.unsqueeze.default, scores, 0), 0.5)
    later = graph.weight("later", torch.full((LENGTH, LENGTH), float("-inf")).triu(1))
    for axis in (0, 1):
        later = graph.function(aten.slice.Tensor, later, axis, 0, length)
    weights = graph.function(aten.softmax.int, graph.function(aten.add.Tensor, wide, later), -1)
    out = graph.function(aten.bmm.default, graph.function(aten.squeeze.dim, weights, 0), v)
    graph_module = graph.finish(out)
    report = fuse_attention(graph_module, LENGTH)
    assert [r.reason for r in report.rejected] == []
    prove_report(report, {})
    (node,) = calls(graph_module, attention)
    assert list(node.args[3:8]) == [None, 0.125, True, 0, 0.0]
    slopes = held(graph_module, str(node.args[8].target))  # type: ignore[union-attr]
    assert slopes.tolist() == [0.25, 0.125]  # the scale after the sum goes for the bias too


def fired(change: Scores) -> bool:
    """Whether attention over the changed scores is found; causal, if so."""
    graph_module = with_scores(change)
    report = fuse_attention(graph_module, LENGTH)
    return [n.args[5] for n in calls(graph_module, attention)] == [True] * report.matched != []


@pytest.mark.parametrize(("floor", "fires"), [(torch.finfo(FP32).min, True), (-5.0, False)])
def test_a_floor_under_masked_scores_counts_where_it_forbids(floor: float, fires: bool) -> None:
    def change(graph: LoweredGraph, scores: fx.Node) -> fx.Node:
        masked = plus(CAUSAL)(graph, scores)
        return graph.function(aten.max.other, masked, graph.weight("floor", torch.tensor(floor)))

    assert fired(change) is fires


@pytest.mark.parametrize(("factor", "fires"), [(1.0, True), (0.5, False)])
def test_a_factor_that_clears_masked_scores_is_none_for_the_others(factor: float, fires: bool) -> None:
    def change(graph: LoweredGraph, scores: fx.Node) -> fx.Node:
        length = graph.function(aten.sym_size.int, graph.ids, 1)  # type: ignore[attr-defined]
        mask = graph.weight("triangle", factor * torch.ones(LENGTH, LENGTH).tril())
        for axis in (0, 1):
            mask = graph.function(aten.slice.Tensor, mask, axis, 0, length)
        return plus(CAUSAL)(graph, graph.function(aten.mul.Tensor, scores, mask))

    assert fired(change) is fires


def test_what_masked_scores_become_may_be_held_by_the_module() -> None:
    def change(graph: LoweredGraph, scores: fx.Node) -> fx.Node:
        masked = plus(CAUSAL)(graph, scores)
        length = graph.function(aten.sym_size.int, graph.ids, 1)  # type: ignore[attr-defined]
        earlier = graph.weight("earlier", torch.ones(LENGTH, LENGTH).tril().bool())
        for axis in (0, 1):
            earlier = graph.function(aten.slice.Tensor, earlier, axis, 0, length)
        return graph.function(aten.where.self, earlier, masked, graph.weight("never", torch.tensor(-1e30)))

    assert fired(change)
