"""What a mixture of experts costs, and which routers and mixtures no family serves."""

import pytest
import torch
from cpp_kernels import cpp_spec
from experts import Layer, Routing, moe_spec
from lowered import LoweredGraph

from octavo.compiler.errors import CodegenError
from octavo.compiler.expression import evaluate

FP32, BF16 = torch.float32, torch.bfloat16


def test_bytes_count_the_experts_that_can_be_reached() -> None:
    spec = moe_spec(Layer(4, 2, 64, 48), BF16)
    expert, token = 3 * 64 * 48 * 2, 2 * 64 * 2 + 2 * 12
    assert [evaluate(spec.bytes, {"T": t}) for t in (1, 2, 9)] == [
        token + 2 * expert, 2 * token + 4 * expert, 9 * token + 4 * expert,
    ]  # fmt: skip
    assert evaluate(spec.flops, {"T": 3}) == 3 * 2 * 2 * 3 * 64 * 48


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        (Routing(8, 9, "softmax"), "top_k must be 1 to 8, the number of experts, got 9"),
        (
            Routing(8, 2, "tanh"),
            "scoring must be one of softmax, sigmoid, softmax_selected, unit, got 'tanh'",
        ),
        (Routing(9, 2, "softmax", num_groups=2), "experts must be a multiple of groups, got 9 and 2"),
        (Routing(8, 2, "softmax", num_groups=2, top_groups=3), "top_groups must be 1 to 2, .* got 3"),
        (
            Routing(8, 2, "softmax", num_groups=2, group_score="min"),
            "group_score must be one of top2_sum, max",
        ),
        (Routing(8, 2, "softmax", num_groups=8, group_score="top2_sum"), "got 8 experts in 8 groups"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_router_refuses(routing: Routing, message: str) -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    node = graph.tokens("logits", (routing.experts,), FP32)
    call = graph.graph.call_function(torch.ops.octavo.router.default, (node, None, *routing.attributes))
    call.meta["val"] = (node.meta["val"][..., :2], node.meta["val"][..., :2])
    with pytest.raises(CodegenError, match=message):
        cpp_spec(call)


def test_moe_refuses() -> None:
    with pytest.raises(CodegenError, match=r"activation must be one of silu, .*, swiglu_oai, got 'swish'"):
        moe_spec(Layer(2, 1, 16, 16, "swish"), FP32)
    with pytest.raises(CodegenError, match="expected fp32 or bf16, one for all, got x float16"):
        moe_spec(Layer(2, 1, 16, 16), torch.float16)
    graph = LoweredGraph()
    graph.input("input_ids")
    x, slots = graph.tokens("x", (16,), FP32), graph.tokens("experts", (2,), torch.int64)
    weights = [
        graph.weight("g", torch.zeros(4, 30, 16)),
        None,
        graph.weight("d", torch.zeros(4, 16, 16)),
        None,
    ]
    node = graph.call("moe", x, slots, graph.tokens("weights", (2,), FP32), *weights, "silu", 0.0, 0.0)
    with pytest.raises(
        CodegenError, match=r"gate_up must be \(4, 32, 16\) as down and x say, got \(4, 30, 16\)"
    ):
        cpp_spec(node)
