"""A residual sum and the norm that reads it become one op with two results."""

import operator

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, calls, count

from octavo.compiler.verify import prove_report
from octavo.passes.fuse_add_norm import fuse_add_norm
from octavo.passes.pattern import aten
from octavo.passes.rule import run_pass

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fires_with_the_same_numbers(dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_add_norm", "llama", dtype)
    assert report.matched == count(graph_module, octavo.add_rms_norm.default) == 2 * LAYERS
    assert count(graph_module, aten.add.Tensor) == 0
    assert count(graph_module, octavo.rms_norm.default) == 1  # the first has no sum before it
    assert_same_numbers(graph_module, "llama", dtype)


def test_the_sum_goes_on_as_the_next_residual() -> None:
    graph_module, _ = after("fuse_add_norm")
    first, second, *_ = calls(graph_module, octavo.add_rms_norm.default)
    (total,) = (user for user in first.users if user.args[1] == 1)
    assert total.target is operator.getitem
    assert total in second.args[:2]


def norm_of_sum(x: tuple[int, ...], y: tuple[int, ...] | None) -> list[str]:
    """Reasons to refuse rms_norm(x + y); no y stands for a number."""
    graph = LoweredGraph()
    left = graph.tokens("x", x, FP32)
    right = 1.0 if y is None else graph.weight("y", torch.ones(y))
    total = graph.function(aten.add.Tensor, left, right)
    graph_module = graph.finish(graph.call("rms_norm", total, graph.weight("w", torch.ones(x[-1])), 1e-5))
    report = run_pass(fuse_add_norm, graph_module)
    assert report.matched == 0
    return [r.reason for r in report.rejected]


def test_refuses_other_shapes_and_numbers() -> None:
    expected = ["the terms of the sum have different shapes"]
    assert norm_of_sum((64,), (64,)) == expected
    assert norm_of_sum((64,), None) == expected


def test_a_value_may_be_added_to_itself() -> None:
    graph = LoweredGraph()
    x, weight = graph.tokens("x", (64,), FP32), graph.weight("w", torch.ones(64))
    graph_module = graph.finish(graph.call("rms_norm", graph.function(aten.add.Tensor, x, x), weight, 1e-5))
    report = run_pass(fuse_add_norm, graph_module)
    prove_report(report, {})
    assert report.matched == count(graph_module, octavo.add_rms_norm.default) == 1


def test_idempotent() -> None:
    assert_idempotent("fuse_add_norm")
