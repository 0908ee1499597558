"""Tiny graphs whose products, experts or pages are quantised and proven, with a fault if one is wanted."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from stages import FP32, SETTINGS, before, calls, captured, copied
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler import nvfp4, nvfp4_weights
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import Step, lower
from octavo.compiler.precision import (
    Format,
    PagePrecision,
    PrecisionPlan,
    ProductPrecision,
    QuantizedWeight,
    WeightRule,
)
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.passes.quantize_kv import quantize_kv
from octavo.passes.quantize_linear import quantize_linear
from octavo.passes.quantize_moe import quantize_moe
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
WEIGHTS = ("plan", "quantizer", "layout", "progress", "prove")
LINEAR, MOE = (Step(run, "quantized", WEIGHTS) for run in (quantize_linear, quantize_moe))
PAGES = Step(quantize_kv, "quantized", ("plan",))
Change = Callable[[QuantizedWeight], QuantizedWeight]


def quantized(
    name: str, weight: Tensor, format: Format, rule: WeightRule = "search", change: Change | None = None
) -> QuantizedWeight:
    """By the rule; of experts (E, N, K) one after the other. change: a fault."""
    if weight.dim() == 3:
        return stacked([quantized(name, one, format, rule, change) for one in weight])
    made = _quantized(name, weight.float(), format, rule)
    return made if change is None else change(made)


def _quantized(name: str, weight: Tensor, format: Format, rule: WeightRule) -> QuantizedWeight:
    if format == "fp8":
        outer = weight.abs().amax(-1) / 448
        return QuantizedWeight((weight / outer[:, None]).to(torch.float8_e4m3fn), None, outer, rule="nearest")
    if rule == "nearest":
        outer = nvfp4.outer_scale(weight.abs().amax())
        return QuantizedWeight(*nvfp4.quantize(weight, outer), outer, e4m3_max=448.0, rule=rule)
    generator = torch.Generator().manual_seed(weight.shape[1])
    outer, seen = (
        nvfp4_weights.weight_outer_scale(name, weight),
        torch.rand(weight.shape[1], generator=generator),
    )
    if rule == "search":
        return QuantizedWeight(*nvfp4_weights.quantize_weight(weight, outer, seen), outer, seen=seen)
    x = torch.randn(200, weight.shape[1], generator=generator) * seen
    moments = x.T @ x / len(x)
    made = nvfp4_weights.quantize_weight_with_feedback(weight, outer, moments)
    return QuantizedWeight(*made, outer, rule=rule, seen=moments)


def stacked(parts: list[QuantizedWeight]) -> QuantizedWeight:
    def stack(tensors: list[Any]) -> Tensor:
        raw = [t.view(torch.uint8) if t.dtype is torch.float8_e4m3fn else t for t in tensors]
        return torch.stack(raw).view(tensors[0].dtype)

    scales = None if parts[0].scales is None else stack([p.scales for p in parts])
    return replace(
        parts[0], codes=stack([p.codes for p in parts]), scales=scales, outer=stack([p.outer for p in parts])
    )


@functools.cache
def lowered_experts() -> GraphModule:
    return lower(captured("gpt_oss"), CompileOptions(verify="off"), SETTINGS).graph_module


def graph_of(model: str, dtype: torch.dtype = FP32) -> GraphModule:
    """Of "llama", or of experts, which has biases."""
    return copied(lowered_experts()) if model == "experts" else before("", model, dtype)


def plan_of(graph_module: GraphModule, format: Format, scale: float | None, count: int = 1) -> PrecisionPlan:
    """The first products, and all experts."""
    linears, experts = (calls(graph_module, op) for op in (octavo.linear.default, octavo.moe.default))
    names = [str(n.args[1].target) for n in linears[:count] if isinstance(n.args[1], Node)]
    names += [str(n.args[3].target) for n in experts if isinstance(n.args[3], Node)]
    return PrecisionPlan({name: ProductPrecision(format, scale, scale) for name in names})


def prove(
    step: Step, format: Format, scale: float | None = None, rule: WeightRule = "search", layout: str = "linear",
    dtype: torch.dtype = FP32, change: Change | None = None, count: int = 1, model: str = "",
) -> PassReport:  # fmt: skip
    graph_module = graph_of(model or ("experts" if step is MOE else "llama"), dtype)
    if step is PAGES:
        page: Any = "nvfp4" if format == "nvfp4" else "fp8"
        plan = PrecisionPlan(pages={i: PagePrecision(page, 0.01, 0.02) for i in range(2)})
    else:
        plan = plan_of(graph_module, format, scale, count)
    settings = QuantSettings(plan, functools.partial(quantized, rule=rule, change=change), layout)
    return quantize(graph_module, settings, [step])[0]
