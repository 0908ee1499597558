"""x * cos + rotate(x) * sin becomes octavo.rope in both layouts, and tables that do not fit are refused."""

import re

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, calls, count
from torch import fx

from octavo.compiler.verify import prove_report
from octavo.passes.fuse_rope import fuse_rope
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass

rope = torch.ops.octavo.rope.default
END = 9223372036854775807


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama", "einsum"])  # heads before tokens, and tokens before heads
def test_fires_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_rope", name, dtype)
    assert report.matched == count(graph_module, rope) == 2 * LAYERS
    assert count(graph_module, aten.neg.default) == 0
    assert_same_numbers(graph_module, name, dtype)


def rotation(width: int, split: int, tables: tuple[int, ...] = (1,)) -> PassReport:
    """Of x (1, T, 4, width); cos and sin are (1, T, *tables, width)."""
    graph = LoweredGraph()
    x = graph.tokens("x", (4, width), FP32)
    cos, sin = (graph.tokens(name, (*tables, width), FP32) for name in ("cos", "sin"))
    second = graph.function(aten.slice.Tensor, x, 3, split, END)
    halves: list[fx.Node] = [
        graph.function(aten.neg.default, second),
        graph.function(aten.slice.Tensor, x, 3, 0, split),
    ]
    turned = graph.function(aten.cat.default, halves, -1)
    terms = graph.function(aten.mul.Tensor, x, cos), graph.function(aten.mul.Tensor, turned, sin)
    graph_module = graph.finish(graph.function(aten.add.Tensor, *terms))
    return run_pass(fuse_rope, graph_module)


def test_hand_made_rotation_fires() -> None:
    assert rotation(16, 8).matched == 1


@pytest.mark.parametrize(
    ("width", "split", "tables", "reason"),
    [
        (15, 7, (1,), "head_dim must be even, got 15"),
        (16, 4, (1,), "the halves split at 4 of 16"),
        (16, 8, (4,), r"do not broadcast over the heads of \(1, s\w+, 4, 16\)"),
    ],
)
def test_refuses(width: int, split: int, tables: tuple[int, ...], reason: str) -> None:
    report = rotation(width, split, tables)
    assert report.matched == 0
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(report.rejected[0].reason)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_interleaved_rotations_fire_with_the_same_numbers(dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_rope", "cohere2", dtype)
    assert report.matched == count(graph_module, rope) == 2  # its other layer does not rotate
    assert [(n.args[3], n.meta["val"].dtype) for n in calls(graph_module, rope)] == [(True, dtype)] * 2
    assert count(graph_module, aten.stack.default) == 0
    assert_same_numbers(graph_module, "cohere2", dtype)


def interleaved(first: int = 1, result: torch.dtype = FP32) -> tuple[fx.GraphModule, PassReport]:
    """Of x (1, T, 4, 16) in fp32, rounded to `result` in the end."""
    graph = LoweredGraph()
    x = graph.tokens("x", (4, 16), FP32)
    cos, sin = (graph.tokens(name, (1, 16), FP32) for name in ("cos", "sin"))
    odd, even = (graph.function(aten.slice.Tensor, x, 3, start, END, 2) for start in (first, 1 - first))
    pairs = graph.function(aten.stack.default, [graph.function(aten.neg.default, odd), even], -1)
    turned = graph.function(aten.reshape.default, pairs, [1, -1, 4, 16])
    terms = graph.function(aten.mul.Tensor, x, cos), graph.function(aten.mul.Tensor, turned, sin)
    y = graph.function(aten.add.Tensor, *terms)
    y = y if result is FP32 else graph.function(aten._to_copy.default, y, dtype=result)
    graph_module = graph.finish(y)
    return graph_module, run_pass(fuse_rope, graph_module)


def test_hand_made_interleaved_rotation_fires() -> None:
    graph_module, report = interleaved()
    assert report.matched == 1
    assert [n.args[3] for n in calls(graph_module, rope)] == [True]


def test_leaves_pairs_turned_the_other_way() -> None:
    assert interleaved(first=0)[1].matched == 0


def test_refuses_to_round_and_leaves_the_conversion() -> None:
    graph_module, report = interleaved(result=BF16)
    assert [r.reason for r in report.rejected] == ["the input is torch.float32 and the result torch.bfloat16"]
    assert (report.matched, count(graph_module, aten._to_copy.default)) == (1, 1)


def written_out(split: int = 8, swapped: bool = False, axis: int = -1) -> tuple[fx.GraphModule, PassReport]:
    """Of x (1, T, 16, 16): the halves on their own, with tables (1, T, 1, 8)."""
    graph = LoweredGraph()
    x = graph.tokens("x", (16, 16), FP32)
    cos, sin = (graph.tokens(name, (1, 8), FP32) for name in ("cos", "sin"))
    first = graph.function(aten.slice.Tensor, x, 3, 0, split)
    second = graph.function(aten.slice.Tensor, x, 3, split, END)

    def product(half: fx.Node, table: fx.Node) -> fx.Node:
        return graph.function(aten.mul.Tensor, half, table)

    minus, plus = (aten.add.Tensor, aten.sub.Tensor) if swapped else (aten.sub.Tensor, aten.add.Tensor)
    left = graph.function(minus, product(first, cos), product(second, sin))
    right = graph.function(plus, product(second, cos), product(first, sin))
    graph_module = graph.finish(graph.function(aten.cat.default, [left, right], axis))
    return graph_module, run_pass(fuse_rope, graph_module)


def test_halves_that_are_written_out_fire_with_tables_twice_as_wide() -> None:
    graph_module, report = written_out()
    prove_report(report, {})
    (found,) = calls(graph_module, rope)
    assert found.args[1].meta["val"].shape[-1] == 16  # type: ignore[union-attr]
    graph_module, report = after("fuse_rope", "gpt_oss")
    assert report.matched == count(graph_module, rope) == 4
    assert_same_numbers(graph_module, "gpt_oss")


def test_leaves_halves_turned_the_other_way_or_joined_elsewhere() -> None:
    assert written_out(swapped=True)[1].matched == 0
    assert [r.reason for r in written_out(axis=2)[1].rejected] == ["it joins along axis 2, expected the last"]


@pytest.mark.parametrize("name", ["llama", "cohere2"])
def test_idempotent(name: str) -> None:
    assert_idempotent("fuse_rope", name)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rotations_the_other_way_round_negate_the_sines(dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_rope", "nanochat", dtype)
    assert report.matched == count(graph_module, rope) == 2 * LAYERS
    assert {n.args[2].args[0].target for n in calls(graph_module, rope)} == {aten.neg.default}  # type: ignore[union-attr]
    assert_same_numbers(graph_module, "nanochat", dtype)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_factor_for_each_token_goes_into_the_tables(dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_rope", "ministral3", dtype)
    assert report.matched == 3 * LAYERS
    tables = [[t.target is aten.mul.Tensor for t in n.args[1:3]] for n in calls(graph_module, rope)]  # type: ignore[union-attr]
    assert (
        tables == [[False, False], [True, True]] * LAYERS or tables == [[True, True], [False, False]] * LAYERS
    )
    assert_same_numbers(graph_module, "ministral3", dtype)


def scaled(shape: tuple[int, ...], width: int = 16) -> PassReport:
    """A rotation of x (1, T, 4, 16) with tables of `width`, times a scale (1, T, *shape)."""
    graph = LoweredGraph()
    x, scale = graph.tokens("x", (4, 16), FP32), graph.tokens("scale", shape, FP32)
    tables = [graph.tokens(name, (width,), FP32) for name in ("cos", "sin")]
    graph_module = graph.finish(graph.function(aten.mul.Tensor, graph.call("rope", x, *tables), scale))
    return run_pass(fuse_rope, graph_module)


def test_hand_made_scales() -> None:
    report = scaled((1, 1))
    prove_report(report, {})
    assert report.matched == 1
    (heads,), (partly,) = scaled((4, 1)).rejected, scaled((1, 1), width=8).rejected
    assert re.search(r"the scale \(1, s\w+, 4, 1\) is not one number for each token of \(1, s", heads.reason)
    assert partly.reason == "a part of each head is not rotated"
