"""An activation whose rows are read as codes alone makes those codes itself, to the bit; any other stays."""

import operator

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from quantized_graphs import FORMS, quantized, until
from stages import BF16, FP32, count, logits, tokens

from octavo.compiler.precision import Format
from octavo.compiler.verify import prove_report
from octavo.passes.fuse_act_quantize import fuse_act_quantize
from octavo.passes.rule import run_pass

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("format", "scale"), FORMS)
def test_fires_and_keeps_every_bit(format: Format, scale: float | None, dtype: torch.dtype) -> None:
    plain, _ = quantized(format, scale, dtype, until("fuse_act_quantize"))
    fused, reports = quantized(format, scale, dtype)
    assert reports["fuse_act_quantize"].matched == count(fused, octavo.act_mul_quantize.default) == LAYERS
    assert count(fused, octavo.act_mul.default) == 0
    assert torch.equal(logits(fused, tokens(7)), logits(plain, tokens(7)))


def test_weights_alone_leave_it() -> None:
    graph_module, reports = quantized("nvfp4_weight_only", None)
    assert reports["fuse_act_quantize"].matched == reports["fuse_norm_quantize"].matched == 0
    assert count(graph_module, octavo.act_mul.default) == LAYERS


@pytest.mark.parametrize("is_read", [False, True])
def test_rows_that_are_read_as_they_are_stay(is_read: bool) -> None:
    graph = LoweredGraph()
    value = graph.call("act_mul", graph.tokens("gate_up", (64,), FP32), "gelu_tanh")
    parts = graph.call("quantize", value, None, "fp8")
    results = [graph.function(operator.getitem, parts, index) for index in range(2)]
    graph_module = graph.finish(*results, *([graph.call("add", value, value)] if is_read else []))
    report = run_pass(fuse_act_quantize, graph_module)
    prove_report(report, {})
    reasons = [rejected.reason for rejected in report.rejected]
    expected = ["add_default reads it too, which is not quantised"] if is_read else []
    assert (report.matched, reasons) == (int(not is_read), expected)
