"""Hugging Face's experts arrive as one op; how they are gated is probed, and what is no such op is refused."""

from typing import Any

import pytest
import torch
from stages import assert_same_numbers, calls, captured, count
from torch import Tensor, nn
from transformers.integrations.moe import use_experts_implementation
from zoo import build

from octavo.compiler.errors import CaptureError
from octavo.compiler.huggingface_experts import experts_as_op, uses_interface

moe = torch.ops.octavo.moe.default


@pytest.mark.parametrize(("name", "layers"), [("mixtral", 2), ("gpt_oss", 2), ("glm4_moe", 1)])
def test_every_layer_of_experts_is_one_op_with_the_same_numbers(name: str, layers: int) -> None:
    graph_module = captured(name).graph_module
    assert count(graph_module, moe) == layers
    assert_same_numbers(graph_module, name)


def test_attributes_are_read_from_the_module() -> None:
    assert [n.args[7:] for n in calls(captured("mixtral").graph_module, moe)] == [("silu", 0.0, 1.0)] * 2
    (first, _) = calls(captured("gpt_oss").graph_module, moe)
    assert first.args[7:] == ("swiglu_oai", 1.0, 1.702)
    shapes = [tuple(first.args[i].meta["val"].shape) for i in (3, 4, 5, 6)]  # type: ignore[union-attr]
    assert shapes == [(4, 192, 64), (4, 192), (4, 64, 96), (4, 64)]


def test_the_model_gets_its_implementation_back() -> None:
    model: Any = build("mixtral")
    before = model.config._experts_implementation
    with experts_as_op(model):
        assert model.config._experts_implementation == "octavo"
    assert model.config._experts_implementation == before
    experts = model.model.layers[0].mlp.experts
    assert (len(experts._forward_hooks), len(experts._forward_pre_hooks)) == (0, 0)


class Config:
    _experts_implementation = "eager"


class Experts(nn.Module):
    """Stacked experts of three tokens' width, as the interface wants them."""

    has_bias, transposed = False, False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(2, 8, 6))
        self.down_proj = nn.Parameter(torch.randn(2, 6, 4))
        self.limit, self.alpha, self.num_experts = 0.75, 1.25, 2

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        raise AssertionError("the interface takes its place")


def experts(apply_gate: Any = None, parameters: dict[str, Tensor] | None = None, **marks: bool) -> Any:
    kind = type("Made", (Experts,), {} if apply_gate is None else {"_apply_gate": apply_gate})
    decorate: Any = use_experts_implementation
    module = decorate(kind, **marks)(Config())
    for name, value in (parameters or {}).items():
        setattr(module, name, nn.Parameter(value))
    return module


def run(module: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(5, 6, generator=generator), torch.rand(5, 1, generator=generator)
    with torch.no_grad(), experts_as_op(nn.ModuleDict({"experts": module})):
        result: Tensor = module(x, torch.tensor([[0], [1], [1], [0], [1]]), weights)
    return result


def silu_clamped(self: Any, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return nn.functional.silu(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


def interleaved(self: Any, both: Tensor) -> Tensor:
    return nn.functional.gelu(both[..., ::2], approximate="tanh") * both[..., 1::2]


def with_alpha(self: Any, both: Tensor) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return gate * torch.sigmoid(self.alpha * gate) * (1 + up)


@pytest.mark.parametrize("apply_gate", [silu_clamped, interleaved, with_alpha])
def test_a_gate_of_ones_own_is_probed(apply_gate: Any) -> None:
    module = experts(apply_gate)
    result = run(module)
    gate_up, down = module.gate_up_proj, module.down_proj
    chosen = [0, 1, 1, 0, 1]
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(5, 6, generator=generator), torch.rand(5, 1, generator=generator)
    expected = [apply_gate(module, gate_up[e] @ x[t]) @ down[e].T * weights[t] for t, e in enumerate(chosen)]
    assert torch.allclose(result, torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (lambda: experts(has_gate=False), "its experts have no gate"),
        (lambda: experts(has_post_expert_norm=True), "it normalises what each expert gives"),
        (
            lambda: experts(lambda self, both: both.chunk(2, -1)[0].sin() * both.chunk(2, -1)[1]),
            "is none of silu",
        ),
        (
            lambda: experts(lambda self, both: both @ self.mixer),
            "its gate does not run on its own (AttributeError",
        ),
        (
            lambda: experts(silu_clamped, {"scale": torch.ones(2)}),
            "it has ['down_proj', 'gate_up_proj', 'scale']",
        ),
        (lambda: experts(silu_clamped, is_transposed=True), "its weights are (2, 6, 8) and (2, 4, 6)"),
        (lambda: experts(silu_clamped, {"down_proj": torch.ones(4, 6)}), "its weights are"),
    ],
)
def test_refuses_what_is_no_such_op(module: Any, reason: str) -> None:
    with pytest.raises(CaptureError) as refused:
        run(module())
    assert "capture: experts (Made, " in str(refused.value)
    assert "test_huggingface_experts.py" in str(refused.value)
    assert reason in str(refused.value)


def test_refuses_experts_that_go_past_the_interface() -> None:
    module = experts(silu_clamped)
    type(module).forward = lambda self, x, index, weights: x
    with pytest.raises(CaptureError, match="its forward does not call the experts interface"):
        run(module)


def test_experts_that_are_not_called_are_nobodys_business() -> None:
    model = nn.ModuleDict({"used": experts(silu_clamped), "not": experts(has_gate=False)})
    assert all(uses_interface(model[name]) for name in ("used", "not"))
    with torch.no_grad(), experts_as_op(model):
        model["used"](torch.randn(1, 6), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
