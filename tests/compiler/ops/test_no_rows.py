"""Ops of tokens on no token, as a rank without requests runs them: results of the shapes that their fakes promise."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stages import BF16, before
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from octavo.compiler import ops  # noqa: F401  (registers the dialect)
from octavo.compiler.fresh_inputs import is_cache

octavo = torch.ops.octavo
FP8 = torch.float8_e4m3fn
K, N = 32, 48
X, RESIDUAL, NORM = (
    torch.empty(1, 0, K, dtype=BF16),
    torch.empty(1, 0, K, dtype=BF16),
    torch.ones(K, dtype=BF16),
)
ALPHA, OWN = torch.ones(1), torch.empty(1, 0, 1)
CODES, SCALES = torch.zeros(N, K // 2, dtype=torch.uint8), torch.ones(N, K // 16).to(FP8)
OF_CODES = {
    "nvfp4_linear": lambda: octavo.nvfp4_linear(
        torch.empty(1, 0, K // 2, dtype=torch.uint8), torch.empty(1, 0, K // 16).to(FP8), CODES, SCALES, ALPHA, OWN,
        None, "bf16",
    ),
    "nvfp4_weight_linear": lambda: octavo.nvfp4_weight_linear(X, CODES, SCALES, ALPHA, None),
    "fp8_linear": lambda: octavo.fp8_linear(X.to(FP8), torch.ones(N, K).to(FP8), ALPHA, OWN, None, "bf16"),
}  # fmt: skip


@pytest.mark.parametrize("outer", [None, ALPHA], ids=["by_token", "static"])
@pytest.mark.parametrize(
    ("format", "layout"), [("fp8", "linear"), ("nvfp4", "linear"), ("nvfp4", "swizzled_128x4")]
)
def test_rows_that_are_quantised(format: str, layout: str, outer: Tensor | None) -> None:
    for call in (
        lambda x, residual, norm, outer: octavo.quantize(x, outer, format, layout),
        lambda x, residual, norm, outer: octavo.rms_norm_quantize(x, norm, 1e-5, 0.0, outer, format, layout),
        lambda x, residual, norm, outer: octavo.add_rms_norm_quantize(
            x, residual, norm, 1e-5, 0.0, outer, format, layout
        ),
        lambda x, residual, norm, outer: octavo.act_mul_quantize(x, "silu", outer, format, layout),
    ):
        _has_the_shapes_of_its_fake(call, X, RESIDUAL, NORM, outer)


def _has_the_shapes_of_its_fake(call: Callable[..., list[Tensor]], *given: Tensor | None) -> None:
    with FakeTensorMode() as mode:
        fakes = call(*(None if value is None else mode.from_tensor(value) for value in given))
    made = call(*given)
    assert [(part.shape, part.dtype) for part in made] == [(part.shape, part.dtype) for part in fakes]


@pytest.mark.parametrize("op", OF_CODES)
def test_products_of_codes(op: str) -> None:
    result = OF_CODES[op]()
    assert (tuple(result.shape), result.dtype) == ((1, 0, N), BF16)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "deepseek_v2", "qwen3_moe"])
def test_whole_steps(model: str) -> None:
    graph_module = before("", model, BF16)
    given: list[Any] = []
    for node in graph_module.graph.find_nodes(op="placeholder"):
        value = node.meta["val"]
        shape = [size if isinstance(size, int) else 3 * is_cache(node.name) for size in value.shape]
        shape = [1] if node.name == "cu_seqlens_q" else shape
        given.append(torch.zeros(shape, dtype=value.dtype))
    (logits,) = graph_module(*given)
    assert logits.shape[:2] == (1, 0)
