"""Tiny models quantised as a whole: every product of one format, every step of the line or some."""

from functools import cache

import torch
from stages import FP32, before, calls
from torch.fx import GraphModule

from octavo.compiler.pipeline import Step
from octavo.compiler.precision import Format, PrecisionPlan, ProductPrecision
from octavo.compiler.quantizing import QUANTIZE, QuantSettings, quantize
from octavo.compiler.weight_quantizer import MethodQuantizer
from octavo.passes.rule import PassReport

# Format and calibrated outer scale of inputs; None: rows have their own.
FORMS: tuple[tuple[Format, float | None], ...] = (
    ("nvfp4", None),
    ("nvfp4", 0.01),
    ("fp8", None),
    ("fp8", 0.05),
)


@cache
def quantized(
    format: Format,
    scale: float | None,
    dtype: torch.dtype = FP32,
    steps: tuple[Step, ...] = QUANTIZE,
    name: str = "llama",
) -> tuple[GraphModule, dict[str, PassReport]]:
    """The lowered model with all its products quantised, and what each step reported. To be read only."""
    graph_module = before("", name, dtype)
    linears = calls(graph_module, torch.ops.octavo.linear.default)
    plan = PrecisionPlan({str(n.all_input_nodes[1].target): ProductPrecision(format, scale) for n in linears})
    settings = QuantSettings(plan, MethodQuantizer("nearest"), "linear")
    return graph_module, {report.name: report for report in quantize(graph_module, settings, steps)}


def until(name: str) -> tuple[Step, ...]:
    """The steps before the one of that name."""
    return QUANTIZE[: [step.name for step in QUANTIZE].index(name)]
