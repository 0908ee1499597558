"""Parts of a product become products with parts of the weight."""

from collections.abc import Sequence
from typing import Any

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
END = 9223372036854775807


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


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "name", ["gpt2", "gpt_neox"]
)  # parts with biases; parts of each head of a transposed view
def test_splits_what_architectures_merged(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("split_linear", name, dtype)
    assert report.matched == 3 * LAYERS
    widths = [n.meta["val"].shape[-1] for n in calls(graph_module, linear)]
    assert 3 * HIDDEN not in widths and widths.count(HIDDEN) >= 4 * LAYERS
    assert_same_numbers(graph_module, name, dtype)


def viewed(
    axis: int, start: int | None, end: int | None, turned: bool = False, view: Sequence[int] = (1, -1, 4, 6),
    joined: bool = False, whole: bool = False,
) -> tuple[fx.GraphModule, fx.GraphModule, PassReport]:  # fmt: skip
    """The graph, the graph split, and the report: one part of a view of a product of width 24 with a bias."""
    graphs = []
    for _ in range(2):
        graph = LoweredGraph()
        x, weight = (
            graph.tokens("x", (16,), FP32),
            graph.weight("w", torch.arange(24.0 * 16).view(24, 16) % 7),
        )
        product = graph.call("linear", x, weight, graph.weight("b", torch.arange(24.0)))
        value = graph.function(aten.reshape.default, product, list(view))
        value = graph.function(aten.permute.default, value, [0, 2, 1, 3]) if turned else value
        part = graph.function(aten.slice.Tensor, value, axis, start, end)
        rest = graph.function(aten.slice.Tensor, value, axis, 4, 6) if joined else None
        results = [part if rest is None else graph.function(aten.cat.default, [part, rest], axis)]
        graphs.append(graph.finish(*results, *([value] if whole else [])))
    return graphs[0], graphs[1], run_pass(split_linear, graphs[1])


@pytest.mark.parametrize(
    ("axis", "start", "end", "turned"),
    [
        (3, 2, 5, False),
        (3, 2, 5, True),
        (-1, -4, END, True),
        (-1, 0, -2, False),
        (-1, 3, END, True),
        (2, 1, 3, False),
        (1, 1, 3, True),  # heads, of the transposed view
    ],
)
def test_parts_of_a_view_take_rows_seen_through_it(axis: int, start: int, end: int, turned: bool) -> None:
    unsplit, graph_module, report = viewed(axis, start, end, turned)
    assert report.matched == 1
    assert 24 not in [n.meta["val"].shape[-1] for n in calls(graph_module, linear) if n.users]
    graph_module.recompile()
    x = torch.randn(1, 3, 16)
    torch.testing.assert_close(graph_module(x)[0], unsplit(x)[0])


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (
            {"axis": 2, "turned": True},
            "linear_default is also used by slice_tensor, which is no part of its last axis",
        ),
        ({"axis": 3, "start": None}, "the part goes from None to 4, which are not numbers"),
        ({"axis": 2, "view": (-1, 4, 6)}, "does not keep the token axes of (1, "),
        (
            {"axis": 3, "joined": True},
            "cat_default joins the parts again: they are one value, rotated in part, say",
        ),
    ],
    ids=["tokens", "start", "view", "joined"],
)
def test_refuses_parts_of_a_view(given: dict[str, Any], reason: str) -> None:
    _, _, report = viewed(**{"start": 0, "end": 4, **given})
    assert report.matched == 0
    assert reason in report.rejected[0].reason


def test_leaves_halves_that_are_rotated_apart_and_joined_again() -> None:
    _, report = after("split_linear", "gpt_oss")
    assert report.matched == 0
    assert len(report.rejected) == 8  # two halves of q and k, in two layers
    assert all("joins the parts again" in r.reason for r in report.rejected)


@pytest.mark.parametrize("lead", [(1, -1), (1, 1, -1)], ids=str)
def test_splits_a_part_that_is_joined_with_another_value(lead: tuple[int, ...]) -> None:
    """Also where the rows lie under an axis more than their view has."""
    graph = LoweredGraph()
    x, other = graph.tokens("x", (16,), FP32), graph.tokens("other", (4, 2), FP32)
    rows = graph.function(aten.reshape.default, x, [*lead, 16])
    product = graph.call("linear", rows, graph.weight("w", torch.randn(24, 16)))
    value = graph.function(aten.reshape.default, product, [1, -1, 4, 6])
    part, rest = (graph.function(aten.slice.Tensor, value, 3, *ends) for ends in ((0, 4), (4, 6)))
    joined = graph.function(aten.cat.default, [part, graph.function(aten.neg.default, other)], 3)
    graph_module = graph.finish(joined, rest)
    x_value, other_value = torch.randn(1, 5, 16), torch.randn(1, 5, 4, 2)
    expected = graph_module(x_value, other_value)
    report = run_pass(split_linear, graph_module)
    assert (report.matched, report.rejected) == (2, [])
    for got, wanted in zip(graph_module(x_value, other_value), expected, strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("turned", [False, True])
def test_a_view_that_is_also_read_whole_is_left(turned: bool) -> None:
    _, _, report = viewed(3, 0, 4, turned, whole=True)
    assert report.matched == 0


@pytest.mark.parametrize("name", ["fused", "gpt_neox"])
def test_idempotent(name: str) -> None:
    assert_idempotent("split_linear", name)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["gpt_bigcode", "falcon_grouped"])  # its weights are transposed by `.T`
def test_splits_products_below_an_axis_of_size_one_and_by_group(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("split_linear", name, dtype)
    assert report.matched == 3 * LAYERS
    assert_same_numbers(graph_module, name, dtype)


def test_refuses_another_axis_of_a_view_that_adds_axes() -> None:
    whole, parts, report = viewed(3, 0, 4, view=(1, 1, -1, 24))
    assert report.matched == 1
    x = torch.randn(1, 5, 16)
    assert torch.allclose(whole(x)[0], parts(x)[0], atol=1e-4)
    _, _, report = viewed(2, 0, 4, view=(1, 1, -1, 24))
    assert (report.matched, len(report.rejected)) == (0, 1)
