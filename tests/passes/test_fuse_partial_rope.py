"""The rotated part of a head joined with the rest becomes a rotation of the head with narrower tables."""

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, calls, count
from torch import fx

from octavo.passes.fuse_partial_rope import fuse_partial_rope
from octavo.passes.pattern import arguments, aten
from octavo.passes.rule import PassReport, run_pass

rope = torch.ops.octavo.rope.default


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fires_with_the_same_numbers(dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_partial_rope", "gpt_neox", dtype)
    assert report.matched == count(graph_module, rope) == 2 * LAYERS
    widths = [[t.meta["val"].shape[-1] for t in arguments(n)[:3]] for n in calls(graph_module, rope)]
    assert widths == [[16, 8, 8]] * 2 * LAYERS
    assert_same_numbers(graph_module, "gpt_neox", dtype)


def partial(
    axis: int = 3,
    width: int = 8,
    end: int = 16,
    step: int = 1,
    other: bool = False,
    interleaved: bool = False,
) -> tuple[fx.GraphModule, PassReport]:
    """Of x (1, T, 4, 16); other: the rest is another tensor's."""
    graph = LoweredGraph()
    x = graph.tokens("x", (4, 16), FP32)
    rest_of = graph.tokens("y", (4, 16), FP32) if other else x
    steps = [step] if step > 1 else []
    part = graph.function(aten.slice.Tensor, x, axis, 0, width, *steps)
    cos, sin = (graph.tokens(name, (min(8, 8 // step),), FP32) for name in ("cos", "sin"))
    rotated = graph.call("rope", part, cos, sin, *([True] if interleaved else []))
    rest = graph.function(aten.slice.Tensor, rest_of, axis, width, end)
    graph_module = graph.finish(graph.function(aten.cat.default, [rotated, rest], axis))
    return graph_module, run_pass(fuse_partial_rope, graph_module)


@pytest.mark.parametrize("interleaved", [False, True])
def test_keeps_how_elements_are_paired(interleaved: bool) -> None:
    graph_module, report = partial(interleaved=interleaved)
    assert report.matched == 1
    node = next(n for n in calls(graph_module, rope) if n.users)
    assert [str(value) for value in node.args] == ["x", "cos", "sin", *(["True"] if interleaved else [])]


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ({"axis": 2, "width": 2, "end": 4}, "the parts are along axes 2 and 2, expected 3"),
        ({"end": 12}, "the parts cover 12 of 16"),
        ({"step": 2}, "the parts cover 12 of 16"),
        ({"other": True}, "fuse_partial_rope: x is x and y"),
    ],
    ids=["axis", "end", "step", "other"],
)
def test_refuses(condition: dict[str, int], reason: str) -> None:
    _, report = partial(**condition)  # type: ignore[arg-type]
    assert report.matched == 0
    assert reason in [r.reason for r in (*report.rejected, *report.near_misses)]


def test_idempotent() -> None:
    assert_idempotent("fuse_partial_rope", "gpt_neox")
