"""Parts written into fresh memory become a cat of the parts; what leaves a gap or keeps old values does not."""

from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import FP32, after, assert_idempotent, before, count, logits, tokens
from torch import fx

from octavo.passes.join_scatters import join_scatters
from octavo.passes.pattern import arguments, aten
from octavo.passes.rule import PassReport, run_pass

scatter = aten.slice_scatter.default


@pytest.mark.parametrize(("name", "joins"), [("deepseek_v3_dense", 1), ("latent", 2)])  # k alone; q and k
def test_fires_and_keeps_every_bit(name: str, joins: int) -> None:
    graph_module, report = after("join_scatters", name)
    assert (report.matched, report.rejected) == (joins * LAYERS, [])
    assert count(graph_module, scatter, aten.copy.default, aten.new_empty.default) == 0
    for length in (7, 12):
        expected = logits(before("join_scatters", name), tokens(length))
        assert torch.equal(logits(graph_module, tokens(length)), expected)


def scattered(
    spans: tuple[tuple[int, int], ...] = ((0, 6), (6, 8)), fresh: bool = True, step: int = 1, axis: int = 3,
    broadcast: bool = False, narrow: bool = False,
) -> tuple[fx.GraphModule, PassReport]:  # fmt: skip
    """Values (1, T, 4, width) written to spans of the last axis of (1, T, 4, 8)."""
    graph = LoweredGraph()
    whole = graph.tokens("whole", (4, 8), FP32)
    memory = graph.function(aten.empty_like.default, whole) if fresh else whole
    for i, (start, end) in enumerate(spans):
        place = graph.function(aten.slice.Tensor, memory, axis, start, end, step)
        width = len(range(start, end, step))
        dtype = torch.bfloat16 if narrow else FP32
        value = graph.tokens(f"v{i}", (1 if broadcast and i else 4, width), dtype)
        copied = graph.function(aten.copy.default, place, value)
        memory = graph.function(scatter, memory, copied, axis, start, end, step)
    graph_module = graph.finish(memory)
    return graph_module, run_pass(join_scatters, graph_module)


def test_parts_are_joined_in_the_order_of_the_axis() -> None:
    graph_module, report = scattered(((6, 8), (0, 6)))
    assert report.matched == 1
    joined = next(n for n in graph_module.graph.nodes if n.target is aten.cat.default)
    assert ([n.name for n in arguments(joined)[0]], joined.args[1]) == (["v1", "v0"], 3)


def test_a_part_that_is_broadcast_is_expanded() -> None:
    graph_module, report = scattered(broadcast=True)
    assert report.matched == 1
    joined = next(n for n in graph_module.graph.nodes if n.target is aten.cat.default)
    assert [tuple(n.meta["val"].shape[2:]) for n in arguments(joined)[0]] == [(4, 6), (4, 2)]
    one, other = torch.randn(1, 5, 4, 6), torch.randn(1, 5, 1, 2)
    (result,) = graph_module(torch.zeros(1, 5, 4, 8), one, other)
    assert torch.equal(result, torch.cat((one, other.expand(1, 5, 4, 2)), 3))


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ({"spans": ((0, 5), (6, 8))}, "the parts 0:5, 6:8 do not cover the 8 of axis 3 once each"),
        ({"spans": ((0, 6), (5, 8))}, "the parts 0:6, 5:8 do not cover the 8 of axis 3 once each"),
        ({"spans": ((0, 6),)}, "the parts 0:6 do not cover the 8 of axis 3 once each"),
        ({"fresh": False}, "the parts are written into whole, which is no fresh memory"),
        ({"spans": ((0, 8), (1, 8)), "step": 2}, "slice_scatter_default_1 writes every 2th of 8 elements"),
    ],
    ids=["gap", "overlap", "half", "old", "step"],
)
def test_refuses(condition: dict[str, Any], reason: str) -> None:
    _, report = scattered(**condition)
    assert report.matched == 0
    assert [r.reason for r in report.rejected] == [reason]


def test_a_part_of_another_dtype_stays_converted() -> None:
    graph_module, report = scattered(narrow=True)
    joined = next(n for n in graph_module.graph.nodes if n.target is aten.cat.default)
    assert report.matched == 1
    assert joined.meta["val"].dtype is FP32
    assert {n.target for n in arguments(joined)[0]} == {aten.copy.default}


def test_idempotent() -> None:
    assert_idempotent("join_scatters", "latent")
