"""Which experts are quantised and how, what their weights become, and that the graph computes with these values."""

from functools import cache
from typing import Any

import pytest
import torch
from stages import SETTINGS, calls, captured, copied, logits, tokens
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler import nvfp4
from octavo.compiler.errors import OptionError
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import Step, apply_step, lower
from octavo.compiler.precision import Format, PrecisionPlan, ProductPrecision, QuantizedWeight
from octavo.compiler.quantizing import QuantSettings
from octavo.passes.quantize_moe import OPS, quantize_moe
from octavo.passes.rewrite import held, hold
from octavo.passes.rule import PassReport

MOE = torch.ops.octavo.moe.default


@cache
def lowered_once() -> GraphModule:
    return lower(captured("gpt_oss"), CompileOptions(verify="off"), SETTINGS).graph_module


def lowered() -> GraphModule:
    """Two layers of experts with biases, a limit and SwiGLU of its own kind."""
    return copied(lowered_once())


def by_expert(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
    """Scales that carry the largest element; one outer scale an expert, of FP8 one a row."""
    if format == "fp8":
        outer = weight.abs().amax(-1) / 448
        return QuantizedWeight((weight / outer[..., None]).to(torch.float8_e4m3fn), None, outer)
    outer = nvfp4.outer_scale(weight.abs().amax((1, 2)))
    return QuantizedWeight(*nvfp4.quantize(weight, outer[:, None, None]), outer)


def plan_of(
    graph_module: GraphModule, format: Format, x: float | None = None, hidden: float | None = None
) -> PrecisionPlan:
    stacks = [weights_of(node)[0] for node in calls(graph_module, MOE)]
    return PrecisionPlan({str(stack.target): ProductPrecision(format, x, hidden) for stack in stacks})


def weights_of(node: Node) -> tuple[Node, Node]:
    """Of gate and up, and of down."""
    gate_up, down = node.args[3], node.args[5]
    assert isinstance(gate_up, Node) and isinstance(down, Node)
    return gate_up, down


def run(
    graph_module: GraphModule, plan: PrecisionPlan, layout: str = "linear", quantizer: Any = by_expert
) -> PassReport:
    step = Step(quantize_moe, "quantized", ("plan", "quantizer", "layout", "progress"))
    return apply_step(step, graph_module, QuantSettings(plan, quantizer, layout))[0]


def decoded(graph_module: GraphModule, format: Format) -> GraphModule:
    """The graph as it was, with the values that quantised experts stand for."""
    for node in calls(graph_module, MOE):
        for weight in weights_of(node):
            parts = by_expert("", held(graph_module, str(weight.target)), format)
            if parts.scales is None:
                value = parts.codes.float() * parts.outer[..., None]
            else:
                value = nvfp4.dequantize(parts.codes, parts.scales, parts.outer[:, None, None])
            hold(graph_module, f"decoded.{weight.target}", value)
            weight.target = f"decoded.{weight.target}"
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_weights_alone_are_what_their_codes_stand_for(layout: str) -> None:
    graph_module = lowered()
    report = run(graph_module, plan_of(graph_module, "nvfp4_weight_only"), layout)
    assert (report.matched, report.exactness) == (2, "quantizes")
    assert len(calls(graph_module, OPS["nvfp4_weight_only"])) == 2 and not calls(graph_module, MOE)
    expected = logits(decoded(lowered(), "nvfp4_weight_only"), tokens(7))
    torch.testing.assert_close(logits(graph_module, tokens(7)), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("format", "scales", "worst"),
    [("nvfp4", (), 0.15), ("nvfp4", (0.002, 0.003), 0.15), ("fp8", (), 0.04), ("fp8", (0.01, 0.02), 0.04)],
)
def test_rows_add_the_error_of_their_format(format: Format, scales: tuple[float, ...], worst: float) -> None:
    """Beside that of the weights; and the layout changes nothing."""
    results = []
    for layout in ("linear", "swizzled_128x4"):
        graph_module = lowered()
        run(graph_module, plan_of(graph_module, format, *scales), layout)
        results.append(logits(graph_module, tokens(12)))
    assert torch.equal(*results)
    expected = logits(decoded(lowered(), format), tokens(12))
    assert 1e-4 < (results[0] - expected).norm() / expected.norm() < worst


def arguments_of(node: Node) -> dict[str, Any]:
    schema = node.target._schema  # type: ignore[union-attr]
    return dict(zip([argument.name for argument in schema.arguments], node.args, strict=False))


def test_outer_scales_of_both_inputs_are_weights_and_in_the_alphas() -> None:
    graph_module = lowered()
    stacked = [held(graph_module, str(one.target)) for one in weights_of(calls(graph_module, MOE)[0])]
    run(graph_module, plan_of(graph_module, "nvfp4", 0.25, 0.5))
    given = {
        name: held(graph_module, str(value.target))
        for name, value in arguments_of(calls(graph_module, OPS["nvfp4"])[0]).items()
        if isinstance(value, Node) and value.op == "get_attr"
    }
    assert given["x_outer"].tolist() == [0.25] and given["hidden_outer"].tolist() == [0.5] * 4
    outer = [one.abs().amax((1, 2))[:, None] / 2688 for one in stacked]
    torch.testing.assert_close(given["gate_up_alpha"], (outer[0] * 0.25).repeat(1, 2))
    torch.testing.assert_close(given["down_alpha"], outer[1] * 0.5)


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
def test_rows_of_gates_and_ups_lie_in_turn_where_scales_are_swizzled(layout: str) -> None:
    graph_module = lowered()
    weight = held(graph_module, str(weights_of(calls(graph_module, MOE)[0])[0].target))
    run(graph_module, plan_of(graph_module, "fp8"), layout)
    given = arguments_of(calls(graph_module, OPS["fp8"])[0])
    codes = held(graph_module, str(given["gate_up"].target)).float()
    alpha = held(graph_module, str(given["gate_up_alpha"].target))
    if layout != "linear":
        codes = torch.cat((codes[:, 0::2], codes[:, 1::2]), 1)
    assert given["interleaved"] == (layout != "linear")
    torch.testing.assert_close(codes * alpha[..., None], weight, rtol=0.07, atol=1e-5)


def test_one_outer_scale_for_all_experts_is_that_of_each() -> None:
    def shared(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        outer = nvfp4.outer_scale(weight.abs().amax())
        return QuantizedWeight(*nvfp4.quantize(weight, outer), outer)

    graph_module = lowered()
    run(graph_module, plan_of(graph_module, "nvfp4"), quantizer=shared)
    given = arguments_of(calls(graph_module, OPS["nvfp4"])[0])
    assert held(graph_module, str(given["gate_up_alpha"].target)).shape == (4, 2)
    assert held(graph_module, str(given["down_alpha"].target)).shape == (4, 1)


def test_mixtures_of_one_stack_of_experts_share_its_parts() -> None:
    graph_module, asked = lowered(), []
    first, second = calls(graph_module, MOE)
    second.args = (*second.args[:3], *first.args[3:])

    def counting(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        asked.append(name)
        return by_expert(name, weight, format)

    run(graph_module, plan_of(graph_module, "nvfp4", 0.1, 0.1), quantizer=counting)
    one, other = calls(graph_module, OPS["nvfp4"])
    assert one.args[3:] == other.args[3:] and len(asked) == 2


def test_the_plan_decides() -> None:
    graph_module = lowered()
    plan = plan_of(graph_module, "fp8")
    kept, missing = plan.products
    plan.products[kept] = ProductPrecision("bf16", reason="outliers")
    del plan.products[missing]
    report = run(graph_module, plan)
    assert [r.reason for r in report.rejected] == ["outliers", "stays as it is"]
    assert len(calls(graph_module, MOE)) == 2 and not report.sites


def test_rows_that_are_not_whole_blocks_are_refused_with_the_weight() -> None:
    graph_module = lowered()
    for node in calls(graph_module, MOE):
        hold(graph_module, f"odd.{node.name}", torch.zeros(4, 64, 232))
        weights_of(node)[1].target = f"odd.{node.name}"
    with pytest.raises(OptionError, match=r"whole blocks of 16 elements, got 232 in odd.moe \(.*choose fp8"):
        run(graph_module, plan_of(graph_module, "nvfp4"))
