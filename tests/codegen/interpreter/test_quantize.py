"""Quantisation kernels against NVFP4 by the book, byte for byte, with and without the arch's conversions."""

from collections.abc import Callable
from dataclasses import replace

import nvfp4
import pytest
import torch
from triton_interpreter import poisoned

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.quantize_triton import quantize_nvfp4_spec
from octavo.compiler.target import load_target

Launch = Callable[[KernelSpec, dict[str, torch.Tensor], dict[str, int]], list[str]]
B200 = load_target("b200")
TARGETS = {"hardware": B200, "portable": replace(B200, arch=90)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rows", "k", "dtype"), [(3, 144, torch.float32), (130, 64, torch.bfloat16)])
def test_codes_and_scales_are_those_of_the_recipe(
    launch: Launch, target: str, rows: int, k: int, dtype: torch.dtype
) -> None:
    x = torch.randn(rows, k, dtype=dtype) * torch.logspace(-6, 2, rows).to(dtype)[:, None]
    x[1, 16:32] = 0.0
    x[2, :16] = torch.tensor([0.0, -0.0, *[0.25 * i for i in range(14)]])
    outer = float(x.abs().max()) / 2688
    spec = quantize_nvfp4_spec(
        "T", k, {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype], TARGETS[target]
    )
    codes, scales = poisoned([rows, k // 2], "u8"), poisoned([-(-rows // 128) * 128 * -(-k // 64) * 4], "fp8")
    tensors = {"x": x, "outer": torch.tensor([outer]), "out_0": codes, "out_1": scales}
    launch(spec, tensors, {"T": rows})
    wanted_codes, wanted_scales = nvfp4.quantize(x, outer)
    assert torch.equal(
        nvfp4.unswizzle(scales, rows, k // 16).view(torch.uint8), wanted_scales.view(torch.uint8)
    )
    assert torch.equal(codes, wanted_codes)
