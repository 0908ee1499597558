"""Parts of a product become products with parts of the weight."""

import pytest
import torch
from lowered import LoweredGraph
from models import HIDDEN, LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, before, calls, count
from torch import fx

from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass
from octavo.passes.split_linear import split_linear

linear = torch.ops.octavo.linear.default


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fires_with_the_same_numbers(dtype: torch.dtype) -> None:
    graph_module, report = after("split_linear", "fused", dtype)
    assert report.matched == 3 * LAYERS
    assert count(graph_module, linear) == LAYERS * (3 + 1 + 3) + 1
    assert 3 * HIDDEN not in [n.meta["val"].shape[-1] for n in calls(graph_module, linear)]
    assert_same_numbers(graph_module, "fused", dtype)


def test_parts_become_weights_of_their_own() -> None:
    graph_module = before("eliminate_dead_code", "fused")
    names = [str(n.args[1].target) for n in calls(graph_module, linear)]  # type: ignore[union-attr]
    parts = [name for name in names if name.startswith("layers.0.attention.qkv_slice")]
    assert len(set(parts)) == 3
    assert {len(n.meta["val"].shape) for n in calls(graph_module, aten.slice.Tensor)} == {2}  # the masks'


def split(
    axis: int = 2,
    start: int = 0,
    step: int | None = None,
    whole: bool = False,
    made: bool = False,
    bias: bool = False,
) -> tuple[fx.GraphModule, PassReport]:
    """One part of a product of width 24, under a condition."""
    graph = LoweredGraph()
    x, weight = graph.tokens("x", (16,), FP32), graph.weight("w", torch.ones(24, 16))
    weight = graph.function(aten.neg.default, weight) if made else weight
    product = graph.call("linear", x, weight, *([graph.weight("b", torch.ones(24))] if bias else []))
    part = graph.function(aten.slice.Tensor, product, axis, start, 8, *([] if step is None else [step]))
    graph_module = graph.finish(part, product) if whole else graph.finish(part)
    return graph_module, run_pass(split_linear, graph_module)


def test_splits_biases_too() -> None:
    graph_module, report = split(bias=True)
    assert report.matched == 1
    assert [n.args[1:] for n in calls(graph_module, aten.slice.Tensor)] == [(0, 0, 8), (0, 0, 8)]


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ({"whole": True}, "linear_default is also used by output, which is no part of its last axis"),
        ({"axis": 1}, "linear_default is also used by slice_tensor, which is no part of its last axis"),
        ({"made": True}, "the weight is neg_default, which is computed"),
        ({"step": 2}, "the part takes every 2th element"),
    ],
)
def test_refuses(condition: dict[str, int], reason: str) -> None:
    _, report = split(**condition)  # type: ignore[arg-type]
    assert report.matched == 0
    assert [r.reason for r in report.rejected] == [reason]


def test_idempotent() -> None:
    assert_idempotent("split_linear", "fused")
