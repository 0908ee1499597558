"""Rotations of adjacent pairs in three other spellings become octavo.rope."""

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, calls, count
from torch import Tensor, fx

from octavo.passes.fuse_pair_rope import fuse_pair_rope
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass

rope = torch.ops.octavo.rope.default
END = (1 << 63) - 1


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["deepseek_v3_dense", "latent", "latent_complex"])
def test_fires_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_pair_rope", name, dtype)
    assert report.matched == count(graph_module, rope) == 2 * LAYERS
    assert {n.args[3:] for n in calls(graph_module, rope)} == {(True,)}
    assert_same_numbers(graph_module, name, dtype)


def complex_spelling(
    heads_first: bool = True, dtype: torch.dtype = torch.complex64, axes: int = 4
) -> tuple[fx.GraphModule, PassReport]:
    """Of x (1, 4, T, 6) or (1, T, 4, 6)."""
    graph = LoweredGraph()
    x = graph.tokens("x", (4, 6), FP32)
    table = graph.tokens("table", (3,), dtype)
    if heads_first:
        x = graph.function(aten.permute.default, x, [0, 2, 1, 3])
        lead, wide = [1, 4, -1], [1, 1, -1, 3]
    else:
        lead, wide = [1, -1, 4], [1, -1, 1, 3]
    numbers = graph.function(
        aten.view_as_complex.default, graph.function(aten.reshape.default, x, [*lead, 3, 2])
    )
    turned = graph.function(aten.mul.Tensor, numbers, graph.function(aten.reshape.default, table, wide))
    real = graph.function(aten.view_as_real.default, turned)
    sizes = [*lead, 6] if axes == 4 else [-1, 3, 2]
    graph_module = graph.finish(graph.function(aten.reshape.default, real, sizes))
    return graph_module, run_pass(fuse_pair_rope, graph_module)


@pytest.mark.parametrize("heads_first", [True, False])
def test_complex_numbers(heads_first: bool) -> None:
    graph_module, report = complex_spelling(heads_first)
    assert (report.matched, count(graph_module, aten.view_as_complex.default)) == (1, 0)
    x, angle = torch.randn(1, 5, 4, 6), torch.randn(1, 5, 3)
    (result,) = graph_module(x, torch.polar(torch.ones_like(angle), angle))
    tokens_first = result.transpose(1, 2) if heads_first else result
    torch.testing.assert_close(tokens_first, turned(x, angle), rtol=1e-5, atol=1e-6)


def turned(x: Tensor, angle: Tensor) -> Tensor:
    """x (1, T, heads, 2 n), elements 2 i and 2 i + 1 turned by angle (1, T, n)[i], pair by pair."""
    out = torch.empty_like(x)
    for i in range(angle.shape[-1]):
        cos, sin = angle[:, :, None, i].cos(), angle[:, :, None, i].sin()
        out[..., 2 * i] = x[..., 2 * i] * cos - x[..., 2 * i + 1] * sin
        out[..., 2 * i + 1] = x[..., 2 * i + 1] * cos + x[..., 2 * i] * sin
    return out


def even_odd(swapped: bool = False, other: bool = False) -> tuple[fx.GraphModule, PassReport]:
    """Of x (1, T, 4, 6). swapped: the second part subtracts what the first should."""
    graph = LoweredGraph()
    x, y = graph.tokens("x", (4, 6), FP32), graph.tokens("y", (4, 6), FP32)
    cos, sin = (graph.tokens(n, (1, 3), FP32) for n in ("cos", "sin"))
    even = graph.function(aten.slice.Tensor, x, 3, 0, END, 2)
    odd = graph.function(aten.slice.Tensor, y if other else x, 3, 1, END, 2)
    a, b, c, d = (
        graph.function(aten.mul.Tensor, t, table)
        for t, table in ((even, cos), (odd, sin), (odd, cos), (even, sin))
    )
    first, second = (b, a) if swapped else (a, b)
    parts = [graph.function(aten.sub.Tensor, first, second), graph.function(aten.add.Tensor, c, d)]
    graph_module = graph.finish(graph.function(aten.cat.default, parts, 3))
    return graph_module, run_pass(fuse_pair_rope, graph_module)


def test_even_elements_in_front_of_odd_ones() -> None:
    graph_module, report = even_odd()
    assert (report.matched, count(graph_module, rope)) == (1, 1)
    x, angle = torch.randn(1, 5, 4, 6), torch.randn(1, 5, 3)
    (result,) = graph_module(x, x, angle.cos()[:, :, None], angle.sin()[:, :, None])
    expected = turned(x, angle)
    torch.testing.assert_close(result, torch.cat((expected[..., 0::2], expected[..., 1::2]), -1))


def sorted_halves(interleaved: bool = False) -> tuple[fx.GraphModule, PassReport]:
    """octavo.rope of x (1, T, 4, 6) with its even elements moved in front of its odd ones."""
    graph = LoweredGraph()
    x = graph.tokens("x", (4, 6), FP32)
    cos, sin = (graph.tokens(n, (6,), FP32) for n in ("cos", "sin"))
    pairs = graph.function(
        aten.permute.default, graph.function(aten.reshape.default, x, [1, -1, 4, 3, 2]), [0, 1, 2, 4, 3]
    )
    moved = graph.function(aten.reshape.default, pairs, [1, -1, 4, 6])
    graph_module = graph.finish(graph.call("rope", moved, cos, sin, *([True] if interleaved else [])))
    return graph_module, run_pass(fuse_pair_rope, graph_module)


def test_sorted_elements_rotated_by_halves() -> None:
    """The tables of both halves need not be equal."""
    graph_module, report = sorted_halves()
    assert report.matched == 1
    x, cos, sin = torch.randn(1, 5, 4, 6), torch.randn(1, 5, 6), torch.randn(1, 5, 6)
    (result,) = graph_module(x, cos, sin)
    even, odd = x[..., 0::2], x[..., 1::2]
    c, s = cos[:, :, None], sin[:, :, None]
    expected = torch.cat((even * c[..., :3] - odd * s[..., :3], odd * c[..., 3:] + even * s[..., 3:]), -1)
    torch.testing.assert_close(result, expected)


def refused(made: tuple[fx.GraphModule, PassReport]) -> list[str]:
    _, report = made
    assert report.matched == 0
    return [r.reason for r in (*report.rejected, *report.near_misses)]


def test_refuses() -> None:
    assert "the table is torch.float32, not complex" in refused(complex_spelling(dtype=FP32))
    assert "pairs of 6 elements become rows of 2" in refused(complex_spelling(axes=3))
    assert refused(even_odd(swapped=True)) == []
    assert all("fuse_even_odd_rope: x is " in reason for reason in refused(even_odd(other=True)))
    assert refused(sorted_halves(interleaved=True)) == ["it is interleaved already"]


def test_idempotent() -> None:
    assert_idempotent("fuse_pair_rope", "deepseek_v3_dense")
    assert_idempotent("fuse_pair_rope", "latent_complex")
