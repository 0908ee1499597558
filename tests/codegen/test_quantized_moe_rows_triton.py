"""What the Triton rows of quantised experts launch, that all arguments bind, and what they refuse."""

import operator
from dataclasses import replace
from typing import Any

import pytest
import torch
from experts import Layer
from lowered import LoweredGraph
from quantized_experts import OPS, SCHEMES, Stack, stack
from torch import fx

from octavo.codegen.emit import emit
from octavo.codegen.moe_quantized_triton import experts_spec
from octavo.codegen.quantized_moe_nodes import read_quantized_mixture
from octavo.codegen.quantized_moe_rows_triton import layer_of
from octavo.codegen.row import op_name
from octavo.codegen.select import select
from octavo.compiler.errors import CodegenError
from octavo.compiler.target import load_target
from octavo.passes.plan_memory import plan_memory

B200 = load_target("b200")
BF16 = torch.bfloat16
OAI = Layer(4, 2, 128, 64, "swiglu_oai", 7.0, 1.702, has_bias=True)


def made(scheme: str, layer: Layer = OAI, **changed: Any) -> Stack:
    alphas = (2 * layer.intermediate, layer.hidden) if scheme == "fp8" else (2, 1)
    options = {"layout": "swizzled_128x4", "interleaved": True, "alphas": alphas, **changed}
    return stack(layer, scheme, **{"static": scheme == "nvfp4", "dtype": BF16, **options})


def graph_of(given: Stack) -> tuple[fx.GraphModule, fx.Node]:
    graph, layer = LoweredGraph(), given.layer
    ids, rows = graph.input("input_ids"), graph.input("logit_rows")
    x = graph.call("embedding", ids, graph.weight("table", torch.zeros(3, layer.hidden, dtype=BF16)))
    logits = graph.call(
        "linear", x, graph.weight("gates", torch.zeros(layer.experts, layer.hidden, dtype=BF16))
    )
    routed = graph.call("router", logits, None, layer.top_k, "softmax", True, 1, 1, "max", 1.0)
    weights, experts = (graph.function(operator.getitem, routed, i) for i in range(2))
    values = [graph.weight(n, given.tensors[n]) if n in given.tensors else None for n in given.names]
    numbers = (layer.activation, layer.limit, layer.alpha)
    mixed = graph.call(OPS[given.scheme], x, experts, weights, *values, *numbers, **given.options)
    picked = graph.call("gather_logits", mixed, rows)
    return graph.finish(
        graph.call("linear", picked, graph.weight("head", torch.zeros(5, layer.hidden, dtype=BF16)))
    ), mixed


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_launch_finds_its_arguments(scheme: str) -> None:
    module, mixed = graph_of(made(scheme))
    specs = {node: select(node, B200).spec for node in module.graph.nodes if op_name(node)}
    mixture = read_quantized_mixture(mixed)
    assert specs[mixed] == experts_spec(layer_of(mixture), mixture.scheme, B200)
    layer = layer_of(mixture)
    assert (layer.unit.limit, layer.unit.alpha, layer.unit.offset) == (7.0, 1.702, 1.0)
    assert (layer.bias, layer.by_row, layer.intermediate) == ("bf16", scheme == "fp8", 64)
    program = emit(module, specs, plan_memory(module.graph), 16)
    names = [launch.name for launch in specs[mixed].launches]
    assert [step.kernel for step in program.steps if step.kernel in names] == names


def test_silu_has_no_alpha_and_no_offset() -> None:
    _, node = graph_of(made("nvfp4", Layer(4, 2, 128, 64)))
    unit = layer_of(read_quantized_mixture(node)).unit
    assert (unit.limit, unit.alpha, unit.offset) == (0.0, 1.0, 0.0)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("nvfp4", {"layout": "linear"}, "must lie in the layout swizzled_128x4, got 'linear'"),
    ("fp8", {"interleaved": False}, "rows of gates and ups must lie in turn"),
    ("nvfp4", {"static": False}, "outer scales of NVFP4 rows must be given"),
    ("fp8", {"static": True}, "FP8 rows have outer scales of their own"),
    ("nvfp4", {"alphas": (128, 128)}, r"alphas of an expert must be \(2, 1\), got \(128, 128\)"),
    ("fp8", {"alphas": (2, 128)}, r"alphas .* must be \(2, 1\) or \(128, 128\), got \(2, 128\)"),
    ("nvfp4", {"layer": replace(OAI, intermediate=48)}, "N must be a multiple of 128 for nvfp4, got 96"),
    ("nvfp4", {"layer": replace(OAI, activation="relu")}, "must be silu or swiglu_oai, got 'relu'"),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "changed", "said"), REFUSED)
def test_what_the_kernels_do_not_take_is_refused(scheme: str, changed: dict[str, Any], said: str) -> None:
    _, node = graph_of(made(scheme, **changed))
    with pytest.raises(CodegenError, match=f"no b200 kernel for {OPS[scheme]} .*{said}"):
        select(node, B200)


def test_hopper_serves_weights_alone_and_fp8() -> None:
    hopper = load_target("h100")
    for scheme in ("nvfp4_weight_only", "fp8"):
        assert select(graph_of(made(scheme))[1], hopper).row == OPS[scheme]
    with pytest.raises(CodegenError, match="sm_90 has no FP4 tensor core; the weight-only kernel serves"):
        select(graph_of(made("nvfp4"))[1], hopper)
