"""Routers and mixtures of experts as nodes of lowered graphs, with weights that are guarded."""

from dataclasses import dataclass
from functools import cache

import torch
from cpp_kernels import cpp_spec, guarded
from lowered import LoweredGraph
from torch import Tensor

from octavo.codegen.kernel import KernelSpec


@dataclass(frozen=True)
class Routing:
    """Attributes of a router; has_bias stands for the argument."""

    experts: int
    top_k: int
    scoring: str
    renormalize: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"
    scaling: float = 1.0
    has_bias: bool = False

    @property
    def attributes(self) -> tuple[int | str | bool | float, ...]:
        return (self.top_k, self.scoring, self.renormalize, self.num_groups, self.top_groups, self.group_score,
                self.scaling)  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """Sizes and attributes of a mixture of experts."""

    experts: int
    top_k: int
    hidden: int
    intermediate: int
    activation: str = "silu"
    limit: float = 0.0
    alpha: float = 0.0
    has_bias: bool = False


NAMES = ("gate_up", "gate_up_bias", "down", "down_bias")


@cache
def router_spec(routing: Routing, dtype: torch.dtype) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    logits = graph.tokens("logits", (routing.experts,), dtype)
    bias = graph.weight("bias", torch.zeros(routing.experts)) if routing.has_bias else None
    return cpp_spec(graph.call("router", logits, bias, *routing.attributes))


@cache
def moe_spec(layer: Layer, dtype: torch.dtype) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (layer.hidden,), dtype)
    experts = graph.tokens("experts", (layer.top_k,), torch.int64)
    weights = graph.tokens("weights", (layer.top_k,), torch.float32)
    given = {name: graph.weight(name, value) for name, value in parameters(layer, dtype).items()}
    values = [given.get(name) for name in NAMES]
    return cpp_spec(
        graph.call("moe", x, experts, weights, *values, layer.activation, layer.limit, layer.alpha)
    )


@cache
def map_spec(experts: int, top_k: int) -> KernelSpec:
    graph = LoweredGraph()
    graph.input("input_ids")
    chosen = graph.tokens("experts", (top_k,), torch.int64)
    table = graph.weight("table", torch.zeros(experts, dtype=torch.int64))
    return cpp_spec(graph.call("map_experts", chosen, table))


@cache
def parameters(layer: Layer, dtype: torch.dtype) -> dict[str, Tensor]:
    torch.manual_seed(layer.hidden)
    rows = 2 * layer.intermediate
    values = {
        "gate_up": torch.randn(layer.experts, rows, layer.hidden) / layer.hidden**0.5,
        "gate_up_bias": torch.randn(layer.experts, rows),
        "down": torch.randn(layer.experts, layer.hidden, layer.intermediate) / layer.intermediate**0.5,
        "down_bias": torch.randn(layer.experts, layer.hidden),
    }
    kept = {name: value for name, value in values.items() if layer.has_bias or "bias" not in name}
    return {name: guarded(value.to(dtype)) for name, value in kept.items()}


# Of experts 0..3 by other numbers: chosen, table, and what it makes of them.
RENUMBERED = (
    [[0, 3], [-1, 2], [1, 1], [-1, -1]],
    [7, -1, 0, 2**40],
    [[7, 2**40], [-1, 0], [-1, -1], [-1, -1]],
)


def with_holes(experts: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """(T, K) with slots that have no expert and a weight of nan: every third, all of the second row and of the last."""
    experts, weights = experts.clone(), weights.clone()
    experts.flatten()[::3] = -1
    experts[1::97], experts[-1] = -1, -1
    weights[experts < 0] = float("nan")
    return experts, guarded(weights)
