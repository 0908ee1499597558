"""x * cos + rotate(x) * sin becomes octavo.rope in both layouts, and tables that do not fit are refused."""

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, count
from torch import fx

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


def test_idempotent() -> None:
    assert_idempotent("fuse_rope")
