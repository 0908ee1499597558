"""The two projections of a gated block become one matrix product, gate first."""

import pytest
import torch
from models import HIDDEN, INTERMEDIATE, LAYERS, tiny
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, before, calls, count

from octavo.passes.pattern import aten

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fires_with_the_same_numbers(dtype: torch.dtype) -> None:
    graph_module, report = after("merge_gate_up", "llama", dtype)
    assert report.matched == count(graph_module, octavo.act_mul.default) == LAYERS
    assert count(graph_module, octavo.gated_mlp.default) == 0
    assert [n.args[1] for n in calls(graph_module, octavo.act_mul.default)] == ["silu"] * LAYERS
    assert_same_numbers(graph_module, "llama", dtype)


def test_folds_to_one_weight_of_both_with_gate_first() -> None:
    graph_module, mlp = before(""), tiny("llama").get_submodule("model.layers.0.mlp")
    (merged,) = (b for name, b in graph_module.named_buffers() if name.startswith("model.layers.0.mlp.gate"))
    assert merged.shape == (2 * INTERMEDIATE, HIDDEN)
    assert torch.equal(
        merged, torch.cat([mlp.get_parameter(f"{name}_proj.weight") for name in ("gate", "up")])
    )
    assert count(graph_module, aten.cat.default) == 0


def test_idempotent() -> None:
    assert_idempotent("merge_gate_up")
