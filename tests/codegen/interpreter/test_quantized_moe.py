"""A tiny mixture of quantised experts, served by the kernels of a B200: experts and logits as the graph has them."""

import functools
from pathlib import Path

import pytest
import torch
from quantized_model import MAX_LEN, PAGE_SIZE, VOCAB, Eager, Served, nearest, write_artifact
from stages import copied
from torch import Tensor
from torch.fx import GraphModule, Node
from transformers import GptOssConfig, GptOssForCausalLM

from octavo.compiler.capture import capture
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import lower, settings_of
from octavo.compiler.precision import Format, PrecisionPlan, ProductPrecision, QuantizedWeight
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

MOE = torch.ops.octavo.moe.default
NAMES = {"nvfp4": "nvfp4_moe", "nvfp4_weight_only": "nvfp4_weight_moe", "fp8": "fp8_moe"}
# Largest difference to the eager reference, relative to the norm: parts are rounded to bf16 before they are added up;
# the hidden state beside weights alone is fp16; codes may round the other way.
BOUNDS = {"nvfp4": 0.01, "nvfp4_weight_only": 0.005, "fp8": 0.01}


@functools.cache
def lowered() -> GraphModule:
    """One layer of four experts, two to a token, with biases and the activation of gpt-oss."""
    config = GptOssConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, max_position_embeddings=MAX_LEN, num_local_experts=4, num_experts_per_tok=2,
        sliding_window=MAX_LEN, layer_types=["full_attention"], bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GptOssForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[-1] ** 0.5)
    captured, options = capture(model.bfloat16().eval()), CompileOptions(target="b200", verify="off")
    return lower(captured, options, settings_of(captured, options, PAGE_SIZE)).graph_module


def of_experts(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
    parts = [nearest(name, one, format) for one in weight]
    scales = [one.scales for one in parts if one.scales is not None]
    codes, outer = (torch.stack(found) for found in zip(*((p.codes, p.outer) for p in parts), strict=True))
    return QuantizedWeight(codes, torch.stack(scales) if scales else None, outer)


def quantized(format: Format) -> GraphModule:
    graph_module = copied(lowered())
    scales = (0.0015, 0.0015) if format == "nvfp4" else (None, None)
    plan = PrecisionPlan()
    for node in graph_module.graph.find_nodes(op="call_function", target=MOE):
        weight = node.args[3]
        assert isinstance(weight, Node)
        plan.products[str(weight.target)] = ProductPrecision(format, *scales)
    assert len(plan.products) == 1
    quantize(graph_module, QuantSettings(plan, of_experts, "swizzled_128x4", prove=None))
    return graph_module


@pytest.mark.parametrize(
    "format",
    ["nvfp4", *(pytest.param(name, marks=pytest.mark.slow) for name in ("nvfp4_weight_only", "fp8"))],
)
def test_experts_and_logits_are_those_of_the_graph(tmp_path: Path, format: Format) -> None:
    """Few tokens have short tiles, 80 with two experts each tall ones."""
    graph_module = quantized(format)
    served = Served(write_artifact(tmp_path / "artifact", graph_module, "b200"), graph_module)
    engine = Engine(served, served.model, max_requests=4)
    for count in (5, 80):
        ids = torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(count)).tolist()
        engine.generate([ids], SamplingParams(max_tokens=1))
        seen: list[str] = []
        check = functools.partial(compare, seen, BOUNDS[format])
        eager = Eager(graph_module, served.steps[-1], check)
        with torch.no_grad():
            (logits,) = eager.run(*eager.inputs())
        found = torch.from_numpy(served.steps[-1].logits)
        assert (found - logits[0]).abs().max() <= 2.0**-7 * logits.abs().max()
        assert NAMES[format] in seen


def compare(seen: list[str], bound: float, node: Node, expected: list[Tensor], made: list[Tensor]) -> None:
    op = str(node.target).split(".")[1]
    seen.append(op)
    if op in NAMES.values():
        want, got = expected[0].double(), made[0].double()
        assert got.isfinite().all()
        assert float((got - want).norm() / want.norm()) <= bound, float((got - want).norm() / want.norm())
