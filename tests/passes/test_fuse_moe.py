"""Mixtures over stacked experts in every spelling become octavo.moe and octavo.router, each one proven."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from fused import fused
from mixtures import EXPORTABLE, TOP, Gathered, OneHotEinsum, ScatteredWeights, Stacked
from stages import BF16, FP32, calls, count
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.passes.pattern import aten

octavo = torch.ops.octavo
NO_GROUPS = (1, 1, "top2_sum", 1.0)
EINSUMS = (aten.einsum.default, aten.bmm.default, aten.matmul.default, aten._grouped_mm.default)


# name -> (activation, limit, alpha) of the mixture, (scoring, renormalize) of its router
FOUND: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "one-hot einsum": (("silu", 0.0, 1.0), ("softmax", True)),
    "scattered weights": (("gelu_tanh", 0.0, 1.0), ("softmax", True)),
    "repeated tokens": (("silu", 0.0, 1.0), ("softmax", True)),
    "gathered": (("swiglu_oai", 7.0, 1.702), ("softmax_selected", False)),
    "grouped products": (("silu", 0.0, 1.0), ("softmax", True)),
    "shared expert": (("silu", 0.0, 1.0), ("softmax", True)),
}


IN_BF16 = ("grouped products", "gathered")  # torch exports grouped products in no other dtype


SELDOM = ("one-hot einsum", "shared expert")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SELDOM else n for n in FOUND]
)
def test_knows_the_spellings(name: str) -> None:
    dtype = BF16 if name in IN_BF16 else FP32
    graph_module, mixtures, routers = fused(EXPORTABLE[name], dtype)
    assert (mixtures.matched, mixtures.rejected, routers.matched, routers.rejected) == (1, [], 1, [])
    assert 0 < mixtures.proof.worst <= mixtures.proof.bound
    (moe,), (router,) = (calls(graph_module, op) for op in (octavo.moe.default, octavo.router.default))
    gating, routing = FOUND[name]
    assert moe.args[7:] == gating
    assert router.args[2:] == (TOP, *routing, *NO_GROUPS)
    assert [moe.args[i].args[0] for i in (1, 2)] == [router, router]  # type: ignore[union-attr]
    assert count(graph_module, *EINSUMS, aten.topk.default) == 0


class UpFirst(ScatteredWeights):
    """gelu of the second stack, which is the gate then; ups as (inputs, outputs) with a bias each."""

    def __init__(self) -> None:
        super().__init__()
        self.b1, self.b3 = (nn.Parameter(torch.empty(self.experts, 1, 40)) for _ in range(2))

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        shares = (F.one_hot(chosen, self.experts).to(x.dtype) * weights[..., None]).sum(1)
        first, second = (x @ w + b for w, b in ((self.w1, self.b1), (self.w3, self.b3)))
        return torch.einsum(
            "te,eth->th", shares, torch.einsum("eti,eih->eth", F.gelu(second) * first, self.w2)
        )


class HalvesTurned(OneHotEinsum):
    def gate(self, both: Tensor) -> Tensor:
        up, gate = both.chunk(2, dim=-1)
        return up * gate.relu()


class InTurnUpFirst(Gathered):
    def gate(self, both: Tensor) -> Tensor:
        up, gate = both.unflatten(-1, (-1, 2)).unbind(-1)
        hidden: Tensor = F.silu(gate) * up
        return hidden


@pytest.mark.parametrize("make", [UpFirst, HalvesTurned, InTurnUpFirst])
def test_reads_gates_and_ups_in_any_order(make: Callable[[], nn.Module]) -> None:
    graph_module, mixtures, _ = fused(make)
    assert (mixtures.matched, mixtures.rejected) == (1, [])
    (moe,) = calls(graph_module, octavo.moe.default)
    assert moe.args[7] == {UpFirst: "gelu", HalvesTurned: "relu", InTurnUpFirst: "silu"}[make]  # type: ignore[index]
    assert (moe.args[4] is None) == (make is HalvesTurned)


class WeightedInputs(Gathered):
    """As Llama 4 does."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        rows = x[:, None] * weights[..., None]
        both = torch.einsum("beck,bek->bec", self.gate_up[chosen], rows)
        hidden = F.silu(both[..., :40]) * both[..., 40:]
        return torch.einsum("beck,bek->bc", self.down[chosen], hidden)


class TanhGate(OneHotEinsum):
    def gate(self, both: Tensor) -> Tensor:
        gate, up = both.chunk(2, dim=-1)
        return gate.tanh() * up


class NoGate(Stacked):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(6, 40, 64))

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        hidden = F.silu(torch.einsum("td,tkfd->tkf", x, self.gate_up[chosen]))
        return torch.einsum("tkf,tkdf,tk->td", hidden, self.down[chosen], weights)


class HalfTheSum(OneHotEinsum):
    """The experts that were not selected get a share too."""

    def mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        shares = scores * 0.5 + torch.zeros_like(scores).scatter(1, chosen, weights)
        hidden = self.gate(torch.einsum("td,efd->tef", x, self.gate_up))
        return torch.einsum("tef,edf,te->td", hidden, self.down, shares)


REFUSED: dict[Callable[[], nn.Module], str] = {
    WeightedInputs: "its weights multiply what goes into the experts, expected what comes out of them",
    TanhGate: "with a gate of silu, gelu, gelu_tanh, relu, swiglu_oai, clamped or not",
    NoGate: "with 0 biases are no gate, up and down of 64 inputs and 64 outputs",
    HalfTheSum: "are not those that topk selected and zero elsewhere",
}


@pytest.mark.parametrize("make", REFUSED)
def test_refuses_near_misses_with_the_reason(make: Callable[[], nn.Module]) -> None:
    _, mixtures, routers = fused(make)
    assert (mixtures.matched, routers.matched) == (0, 0)
    (refused,) = mixtures.rejected
    assert refused.reason.startswith("its experts mixture.") and REFUSED[make] in refused.reason
    assert "mixture" in refused.where


def test_stacks_without_a_selection_are_none_of_its_business() -> None:
    class PerHead(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.Parameter(torch.empty(4, 16, 16))

        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("bthd,hde->bthe", x.unflatten(-1, (4, 16)), self.heads).flatten(2)

    _, mixtures, _ = fused(PerHead)
    assert (mixtures.matched, mixtures.rejected) == (0, [])
