"""Which products are quantised, how often their inputs are, and that the arithmetic is that of the format."""

import pytest
import torch
from stages import before, calls, logits, tokens
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler import nvfp4
from octavo.compiler.precision import Format, PrecisionPlan, ProductPrecision, QuantizedWeight
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.passes.rewrite import held, hold

octavo = torch.ops.octavo


def lowered() -> GraphModule:
    return before("")


def quantizer(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
    """Scales that carry the largest element, one outer scale."""
    if format == "fp8":
        outer = weight.abs().amax(-1) / 448
        return QuantizedWeight((weight / outer[:, None]).to(torch.float8_e4m3fn), None, outer)
    outer = nvfp4.outer_scale(weight.abs().amax())
    return QuantizedWeight(*nvfp4.quantize(weight, outer), outer)


def plan_of(graph_module: GraphModule, format: Format, scale: float | None = None) -> PrecisionPlan:
    linears = calls(graph_module, octavo.linear.default)
    return PrecisionPlan({str(n.all_input_nodes[1].target): ProductPrecision(format, scale) for n in linears})


def run(graph_module: GraphModule, plan: PrecisionPlan, layout: str = "linear") -> int:
    reports = quantize(graph_module, QuantSettings(plan, quantizer, layout))
    return next(report.matched for report in reports if report.name == "quantize_linear")


def dequantized(graph_module: GraphModule, plan: PrecisionPlan) -> GraphModule:
    """The graph as it was, with the values that its quantised weights stand for."""
    for name, precision in plan.products.items():
        parts = quantizer(name, held(graph_module, name), precision.format)
        if parts.scales is None:
            value = parts.codes.float() * parts.outer[:, None]
        else:
            value = nvfp4.dequantize(parts.codes, parts.scales, parts.outer)
        hold(graph_module, f"decoded.{name}", value)
        for node in graph_module.graph.find_nodes(op="get_attr"):
            if node.target == name:
                node.target = f"decoded.{name}"
    graph_module.recompile()
    return graph_module


def test_weights_alone_are_what_their_codes_stand_for() -> None:
    plan = plan_of(lowered(), "nvfp4_weight_only")
    quantized = lowered()
    assert run(quantized, plan) == len(calls(lowered(), octavo.linear.default)) > 4
    expected = logits(dequantized(lowered(), plan), tokens(7))
    torch.testing.assert_close(logits(quantized, tokens(7)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("format", "scale", "worst"),
    [("nvfp4", None, 0.7), ("nvfp4", 0.01, 0.7), ("fp8", None, 0.25), ("fp8", 0.05, 0.25)],
)
def test_quantised_logits_stay_near(format: Format, scale: float | None, worst: float) -> None:
    quantized = lowered()
    run(quantized, plan_of(quantized, format, scale))
    expected = logits(lowered(), tokens(12))
    error = (logits(quantized, tokens(12)) - expected).norm() / expected.norm()
    assert 1e-4 < error < worst


def test_layouts_hold_the_same_scales() -> None:
    results = []
    for layout in nvfp4_layouts():
        quantized = lowered()
        run(quantized, plan_of(quantized, "nvfp4"), layout)
        results.append(logits(quantized, tokens(7)))
    assert torch.equal(*results)


def nvfp4_layouts() -> tuple[str, str]:
    return "linear", "swizzled_128x4"


def test_an_input_is_quantised_once_for_all_who_read_it() -> None:
    graph_module = lowered()
    first, *_, other = calls(graph_module, octavo.linear.default)[:5]
    with graph_module.graph.inserting_after(first):
        twin = graph_module.graph.call_function(octavo.linear.default, (first.args[0], other.args[1]))
    with graph_module.graph.inserting_after(twin):
        total = graph_module.graph.call_function(octavo.add.default, (first, twin))
    twin.meta, total.meta = dict(first.meta), dict(first.meta)
    first.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)
    run(graph_module, plan_of(graph_module, "nvfp4", 0.01))
    products = calls(graph_module, octavo.nvfp4_linear.default)
    assert products[0].args[:2] == products[1].args[:2]
    assert products[0].args[:2] != products[2].args[:2]


def test_the_plan_decides() -> None:
    graph_module = lowered()
    plan = plan_of(graph_module, "fp8")
    kept, missing, *_ = plan.products
    plan.products[kept] = ProductPrecision("bf16", reason="outliers")
    del plan.products[missing]
    reports = quantize(graph_module, QuantSettings(plan, quantizer, "linear"))
    (report,) = (report for report in reports if report.name == "quantize_linear")
    assert [r.reason for r in report.rejected] == ["outliers", "stays as it is"]
    assert len(calls(graph_module, octavo.linear.default)) == 2
