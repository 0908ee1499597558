"""A transpose of axes of size one is a view; others stay transposes."""

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import FP32, after, assert_idempotent, before, count, logits, tokens
from torch import fx

from octavo.passes.lower_transposes import lower_transposes
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass


def test_fires_and_keeps_every_bit() -> None:
    graph_module, report = after("lower_transposes", "deepseek_v3_dense")
    assert (report.exactness, report.matched) == ("bitwise", LAYERS)
    assert count(graph_module, aten.permute.default) < count(
        before("lower_transposes", "deepseek_v3_dense"), aten.permute.default
    )
    expected = logits(before("lower_transposes", "deepseek_v3_dense"), tokens(7))
    assert torch.equal(logits(graph_module, tokens(7)), expected)


def transposed(shape: tuple[int, ...], order: list[int]) -> tuple[fx.GraphModule, PassReport]:
    graph = LoweredGraph()
    x = graph.tokens("x", shape, FP32)
    graph_module = graph.finish(graph.function(aten.permute.default, x, order))
    return graph_module, run_pass(lower_transposes, graph_module)


@pytest.mark.parametrize(
    ("shape", "order"), [((1, 8), [0, 2, 1, 3]), ((4,), [1, 0, 2]), ((4, 1), [3, 0, 1, 2])]
)
def test_ones_are_moved_by_a_view(shape: tuple[int, ...], order: list[int]) -> None:
    graph_module, report = transposed(shape, order)
    assert (report.matched, count(graph_module, aten.permute.default)) == (1, 0)
    x = torch.randn(1, 5, *shape)
    (result,) = graph_module(x)
    assert torch.equal(result, x.permute(order))


@pytest.mark.parametrize(
    ("shape", "order"), [((2, 8), [0, 2, 1, 3]), ((1, 8), [0, 3, 2, 1]), ((8,), [0, 2, 1])]
)
def test_others_stay(shape: tuple[int, ...], order: list[int]) -> None:
    graph_module, report = transposed(shape, order)
    assert (report.matched, count(graph_module, aten.permute.default)) == (0, 1)


def test_idempotent() -> None:
    assert_idempotent("lower_transposes", "deepseek_v3_dense")
