"""down(activation(gate(x)) * up(x)) becomes octavo.gated_mlp with its activation."""

from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, before, calls, count

from octavo.passes.fuse_gated_mlp import fuse_gated_mlp
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fires_with_the_same_numbers(dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_gated_mlp", "llama", dtype)
    assert report.matched == count(graph_module, octavo.gated_mlp.default) == LAYERS
    assert count(graph_module, aten.silu.default) == 0
    assert_same_numbers(graph_module, "llama", dtype)


def mlp(
    activation: Any, swapped: bool = False, both: bool = False, **options: Any
) -> tuple[list[Any], PassReport]:
    """Activations found in a hand-made block; swapped puts the activated factor second."""
    graph = LoweredGraph()
    x = graph.tokens("x", (16,), FP32)
    gate, up = (graph.call("linear", x, graph.weight(name, torch.zeros(24, 16))) for name in ("gate", "up"))
    factors = [graph.function(activation, gate, **options), graph.function(activation, up) if both else up]
    product = graph.function(aten.mul.Tensor, *(factors[::-1] if swapped else factors))
    graph_module = graph.finish(graph.call("linear", product, graph.weight("down", torch.zeros(16, 24))))
    report = run_pass(fuse_gated_mlp, graph_module)
    return [[str(n.args[1]), n.args[4]] for n in calls(graph_module, octavo.gated_mlp.default)], report


@pytest.mark.parametrize(
    ("activation", "options", "name"),
    [
        (aten.silu.default, {}, "silu"),
        (aten.relu.default, {}, "relu"),
        (aten.gelu.default, {}, "gelu"),
        (aten.gelu.default, {"approximate": "tanh"}, "gelu_tanh"),
    ],
)
def test_knows_the_activation_in_either_order(activation: Any, options: dict[str, str], name: str) -> None:
    for swapped in (False, True):
        assert mlp(activation, swapped, False, **options)[0] == [["gate", name]]


def test_leaves_two_activated_factors_with_a_near_miss() -> None:
    found, report = mlp(aten.silu.default, both=True)
    assert found == []
    assert report.near_misses[0].reason.startswith("fuse_gated_mlp: expected octavo.linear, got silu_default")


def test_refuses_biases_by_name() -> None:
    report = fuse_gated_mlp(before("fuse_gated_mlp", "biased"))
    assert report.matched == 0
    assert len(report.rejected) == LAYERS
    assert all(r.reason.startswith("linear_") and r.reason.endswith(" has a bias") for r in report.rejected)
    assert "layers.1.mlp.down, models.py:" in report.rejected[0].where


def test_idempotent() -> None:
    assert_idempotent("fuse_gated_mlp")
