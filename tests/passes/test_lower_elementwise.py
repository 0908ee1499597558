"""Plain sums that no fusion took become octavo.add; sums that broadcast or change dtype do not."""

import pytest
import torch
from lowered import LoweredGraph
from stages import BF16, FP32, SETTINGS, assert_same_numbers, before, count, step_of

from octavo.compiler.pipeline import apply_step
from octavo.passes.lower_elementwise import lower_elementwise
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass

add = torch.ops.octavo.add.default


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fires_with_the_same_numbers(dtype: torch.dtype) -> None:
    # Before fuse_add_norm, which leaves it nothing in this model.
    graph_module = before("fuse_add_norm", "llama", dtype)
    report = apply_step(step_of("lower_elementwise"), graph_module, SETTINGS)[0]
    assert report.matched == count(graph_module, add) == 4
    assert count(graph_module, aten.add.Tensor) == 0
    assert_same_numbers(graph_module, "llama", dtype)
    assert run_pass(lower_elementwise, graph_module).changed is False


def lowered(addend: torch.Tensor | float) -> PassReport:
    graph = LoweredGraph()
    x = graph.tokens("x", (8,), FP32)
    y = graph.weight("y", addend) if isinstance(addend, torch.Tensor) else addend
    return run_pass(lower_elementwise, graph.finish(graph.function(aten.add.Tensor, x, y)))


@pytest.mark.parametrize(
    ("addend", "reason"),
    [
        (2.5, "the addend is 2.5, not a tensor"),
        (torch.ones(8), "] and torch.float32 (8,)"),
        (torch.ones(1, 11, 8, dtype=BF16), "and torch.bfloat16 (1, 11, 8)"),
    ],
)
def test_refuses_in_both_orders(addend: torch.Tensor | float, reason: str) -> None:
    report = lowered(addend)
    assert report.matched == 0
    assert reason.removeprefix("] ") in report.rejected[0].reason
