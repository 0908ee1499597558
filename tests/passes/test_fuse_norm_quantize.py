"""A norm whose rows are read as codes alone makes those codes itself, to the bit; any other stays."""

import operator

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from quantized_graphs import FORMS, quantized, until
from stages import BF16, FP32, calls, count, logits, tokens
from torch.fx import GraphModule, Node

from octavo.compiler.precision import Format
from octavo.compiler.verify import prove_report
from octavo.passes.fuse_norm_quantize import fuse_norm_quantize
from octavo.passes.rule import PassReport, run_pass

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("format", "scale"), FORMS)
def test_fires_and_keeps_every_bit(format: Format, scale: float | None, dtype: torch.dtype) -> None:
    plain, _ = quantized(format, scale, dtype, until("fuse_norm_quantize"))
    fused, reports = quantized(format, scale, dtype)
    # The norm in front of the logits is read by what gathers rows.
    assert reports["fuse_norm_quantize"].matched == 2 * LAYERS
    assert count(fused, octavo.rms_norm_quantize.default) == 1
    assert count(fused, octavo.add_rms_norm_quantize.default) == 2 * LAYERS - 1
    assert reports["fuse_norm_quantize"].proof.sites >= 2
    for length in (7, 12):
        assert torch.equal(logits(fused, tokens(length)), logits(plain, tokens(length)))


def test_the_sum_goes_on_as_the_next_residual() -> None:
    fused, _ = quantized("nvfp4", None)
    first, second, *_ = calls(fused, octavo.add_rms_norm_quantize.default)
    last = len(first.meta["val"]) - 1
    (total,) = (user for user in first.users if user.args[1] == last)
    assert last == 3 and total in second.args[:2]
    assert total.meta["val"].dtype == FP32


def graph_of(op: str, *forms: tuple[float, str], other: bool = False) -> GraphModule:
    """A norm that is quantised as each of (outer scale, format) says, and perhaps added to itself too."""
    graph = LoweredGraph()
    xs = [graph.tokens(name, (32,), FP32) for name in ("x", "residual")[: 1 + (op == "add_rms_norm")]]
    outers = {
        scale: graph.weight(f"s{index}", torch.tensor([scale])) for index, (scale, _) in enumerate(forms)
    }
    made = graph.call(op, *xs, graph.weight("w", torch.rand(32) + 0.5), 1e-5)
    value = graph.function(operator.getitem, made, 0) if op == "add_rms_norm" else made
    results: list[Node] = []
    for scale, format in forms:
        parts = graph.call("quantize", value, outers[scale], format)
        results += [graph.function(operator.getitem, parts, index) for index in range(len(parts.meta["val"]))]
    if op == "add_rms_norm":
        results.append(graph.function(operator.getitem, made, 1))
    return graph.finish(*results, *([graph.call("add", value, value)] if other else []))


def fuse(graph_module: GraphModule) -> PassReport:
    report = run_pass(fuse_norm_quantize, graph_module)
    prove_report(report, {})
    return report


@pytest.mark.parametrize("op", ["rms_norm", "add_rms_norm"])
def test_rows_that_are_read_as_they_are_stay(op: str) -> None:
    report = fuse(graph_of(op, (0.5, "nvfp4"), other=True))
    assert report.matched == 0 and len(report.rejected) == 1
    assert report.rejected[0].reason == "add_default reads it too, which is not quantised"


def test_two_forms_stay() -> None:
    report = fuse(graph_of("rms_norm", (0.5, "nvfp4"), (0.25, "fp8")))
    assert report.matched == 0
    assert report.rejected[0].reason.startswith("it is quantised in 2 forms: ")


def test_twice_in_one_form_is_once() -> None:
    graph_module = graph_of("add_rms_norm", (0.5, "nvfp4"), (0.5, "nvfp4"))
    assert fuse(graph_module).matched == 1
    assert count(graph_module, octavo.add_rms_norm_quantize.default) == 1
    assert count(graph_module, octavo.quantize.default, octavo.add_rms_norm.default) == 0
    names = [node.name for node in graph_module.graph.output_node().all_input_nodes]
    assert len(set(names)) == 3  # codes, scales, the sum


def test_a_norm_that_nobody_quantises_is_no_site() -> None:
    report = fuse(graph_of("rms_norm", other=True))
    assert (report.matched, report.rejected) == (0, [])
