"""Products with NVFP4 weights against exact ones of the dequantised values: each form of each kernel.

Codes and scales are drawn from all that is finite, scales from 2^-9 to 448 and zero; what pads them is nan.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import nvfp4
import pytest
import torch
from torch import Tensor
from triton_interpreter import poisoned

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.nvfp4_triton import (
    Nvfp4Product,
    block_scaled_few,
    nvfp4_linear_spec,
    sum_parts_spec,
    weight_only_tile,
)
from octavo.compiler.expression import holds
from octavo.compiler.target import Target, load_target

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# two programs instead of one per multiprocessor, so that each walks over several tiles and K is not split
B200 = replace(load_target("b200"), sm_count=2)
CONSUMER = replace(load_target("rtx_pro_6000"), sm_count=2)
HOPPER = replace(load_target("h100"), sm_count=2)
# so many that K is split wherever it may be
IDLE = replace(B200, sm_count=64)
PLAIN = Nvfp4Product("T", 136, 320, "nvfp4", "bf16")
FULL = replace(PLAIN, out_dtype="fp32", alpha="column", row_scale=True, bias="bf16", residual=True)


def operands(product: Nvfp4Product, rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors by argument name, and the result in fp64."""
    g = torch.Generator().manual_seed(rows)
    w, w_scale = nvfp4.any_codes(product.n, product.k, g)
    alpha = 2.0**-12 * (0.5 + torch.rand(product.n if product.alpha == "column" else 1, generator=g))
    if product.is_quantized:
        x, x_scale = nvfp4.any_codes(rows, product.k, g)
        tensors = {"x": x, "x_scale": nvfp4.swizzle(x_scale)}
        wide = nvfp4.dequantize(x, x_scale, 1.0)
    else:
        x = torch.randn(rows, product.k, generator=g).to(DTYPES[product.x_dtype])
        tensors, wide = {"x": x}, x.to(torch.float16).double()
    expected = wide @ nvfp4.dequantize(w, w_scale, 1.0).T * alpha.double()
    tensors |= {"weight": w, "weight_scale": nvfp4.swizzle(w_scale), "alpha": alpha}
    if product.row_scale:
        tensors["row_scale"] = 0.5 + torch.rand(rows, generator=g)
        expected *= tensors["row_scale"].double()[:, None]
    size = float(expected.abs().max())
    if product.bias:
        tensors["bias"] = (size * torch.randn(product.n, generator=g)).to(DTYPES[product.bias])
        expected += tensors["bias"].double()
    if product.residual:
        residual = size * torch.randn(rows, product.n, generator=g)
        tensors["residual"] = residual.to(DTYPES[product.out_dtype])
        expected += tensors["residual"].double()
    return tensors, expected


def forms(spec: KernelSpec, rows: int) -> Iterator[KernelSpec]:
    """The launches for so many rows, once for each form of the last of them."""
    held = [kernel for kernel in spec.launches if holds(kernel.when, {"T": rows})]
    for form in held[-1].forms:
        first, *others = (*held[:-1], replace(form, also=()))
        yield replace(first, also=tuple(others), scratch=spec.scratch)


def check(
    launch: Launch, assert_rounds_to: Check, product: Nvfp4Product, spec: KernelSpec, rows: int
) -> list[str]:
    """Runs every form; returns the templates of the last."""
    ran: list[str] = []
    for form in forms(spec, rows):
        tensors, expected = operands(product, rows)
        tensors["out"] = poisoned([rows, product.n], product.out_dtype)
        ran = [name.split("/")[1].split(".")[0] for name in launch(form, tensors, {"T": rows})]
        assert_rounds_to(tensors["out"], expected, sums=0.5)
    return ran


@pytest.mark.parametrize("product", [PLAIN, FULL], ids=["plain", "full"])
@pytest.mark.parametrize("rows", [1, 16, 61, 129])
def test_block_scaled_product_of_any_number_of_rows(
    launch: Launch, assert_rounds_to: Check, product: Nvfp4Product, rows: int
) -> None:
    ran = check(launch, assert_rounds_to, product, nvfp4_linear_spec(product, B200), rows)
    assert ran == ["nvfp4_linear" if rows > 64 else "nvfp4_linear_few_rows"]


@pytest.mark.parametrize("rows", [33, 64])
def test_block_scaled_tiles_of_32_rows(launch: Launch, assert_rounds_to: Check, rows: int) -> None:
    spec = replace(block_scaled_few(FULL, 32, B200), when="T <= 64")
    check(launch, assert_rounds_to, FULL, spec, rows - 32)


@pytest.mark.parametrize("product", [PLAIN, FULL], ids=["plain", "full"])
def test_block_scaled_product_without_tensor_memory(
    launch: Launch, assert_rounds_to: Check, product: Nvfp4Product
) -> None:
    check(launch, assert_rounds_to, product, nvfp4_linear_spec(product, CONSUMER), 70)


@pytest.mark.parametrize("k", [64, 576])
def test_block_scaled_product_of_one_turn_and_of_a_part_of_one(
    launch: Launch, assert_rounds_to: Check, k: int
) -> None:
    for rows in (3, 65):
        product = replace(PLAIN, n=8, k=k, alpha="column")
        check(launch, assert_rounds_to, product, nvfp4_linear_spec(product, B200), rows)


@pytest.mark.parametrize("x_dtype", ["nvfp4", "bf16"])
def test_parts_of_k_are_added_in_order(launch: Launch, assert_rounds_to: Check, x_dtype: str) -> None:
    product = replace(FULL, k=2624, x_dtype=x_dtype, row_scale=x_dtype == "nvfp4")
    spec = nvfp4_linear_spec(product, IDLE)
    stem = "nvfp4_linear_few_rows" if x_dtype == "nvfp4" else "nvfp4_weight_only"
    # of 11 turns, so that the last part is shorter than the others
    assert dict(spec.params)["PART"] == (6 if x_dtype == "nvfp4" else 3)
    for rows in (1, 7):
        assert check(launch, assert_rounds_to, product, spec, rows) == [stem, "sum_parts"]


def test_sum_of_parts_over_several_programs(launch: Launch, assert_rounds_to: Check) -> None:
    product = replace(FULL, n=1025)
    tensors, _ = operands(product, 3)
    parts = torch.randn(5, 3, 1025)
    expected = parts.double().sum(0) * tensors["alpha"].double() * tensors["row_scale"].double()[:, None]
    expected += tensors["bias"].double() + tensors["residual"].double()
    tensors |= {"parts": parts, "out": poisoned([3, 1025], "fp32")}
    launch(sum_parts_spec(product, 5), tensors, {"T": 3})
    assert_rounds_to(tensors["out"], expected, sums=0.5)


@pytest.mark.parametrize("target", [B200, HOPPER], ids=["hardware", "portable"])
@pytest.mark.parametrize("rows", [1, 9, 61, 65])
def test_weight_only_product_of_any_number_of_rows(
    launch: Launch, assert_rounds_to: Check, target: Target, rows: int
) -> None:
    product = replace(PLAIN, n=133, x_dtype="bf16", out_dtype="fp32" if rows == 9 else "bf16")
    ran = check(launch, assert_rounds_to, product, nvfp4_linear_spec(product, target), rows)
    assert ran == ["saturate_fp16"] * (rows > 64) + ["nvfp4_weight_only"]


@pytest.mark.parametrize("target", [B200, HOPPER], ids=["hardware", "portable"])
def test_weight_only_product_with_all_that_follows_it(
    launch: Launch, assert_rounds_to: Check, target: Target
) -> None:
    product = replace(FULL, x_dtype="fp16", row_scale=False, k=64)
    for rows in (5, 150):
        spec = nvfp4_linear_spec(product, target)
        assert check(launch, assert_rounds_to, product, spec, rows) == ["nvfp4_weight_only"]


def test_a_wide_tile_of_rows_ends_where_they_do(launch: Launch, assert_rounds_to: Check) -> None:
    product = replace(PLAIN, x_dtype="fp16", n=8)
    check(launch, assert_rounds_to, product, weight_only_tile(product, 256, B200), 257)


@pytest.mark.parametrize("rows", [4, 66])
def test_what_is_beyond_fp16_saturates_and_nan_stays_in_its_row(launch: Launch, rows: int) -> None:
    product = replace(PLAIN, n=8, k=64, x_dtype="bf16", out_dtype="fp32")
    tensors, _ = operands(product, rows)
    x = torch.zeros(rows, 64, dtype=torch.bfloat16)
    x[0, 3], x[1, 5], x[2, 7] = 1e6, float("-inf"), float("nan")
    tensors |= {"x": x, "out": poisoned([rows, 8], "fp32")}
    scale = nvfp4.unswizzle(tensors["weight_scale"], 8, 4)
    w = nvfp4.dequantize(tensors["weight"], scale, float(tensors["alpha"]))
    launch(nvfp4_linear_spec(product, B200), tensors, {"T": rows})
    torch.testing.assert_close(tensors["out"][0].double(), 65504 * w[:, 3])
    torch.testing.assert_close(tensors["out"][1].double(), -65504 * w[:, 5])
    assert tensors["out"][2].isnan().all() and (tensors["out"][3] == 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("x_dtype", ["nvfp4", "bf16", "fp16"])
@pytest.mark.parametrize("rows", [1, 7, 31, 65, 131, 257])
@pytest.mark.parametrize(("n", "k"), [(8, 64), (264, 192), (248, 832), (1032, 1024)])
def test_sweep(launch: Launch, assert_rounds_to: Check, x_dtype: str, rows: int, n: int, k: int) -> None:
    for product in (PLAIN, FULL):
        product = replace(product, n=n, k=k, x_dtype=x_dtype)
        product = replace(product, row_scale=product.row_scale and x_dtype == "nvfp4")
        for target in (B200, IDLE, CONSUMER if x_dtype == "nvfp4" else HOPPER):
            check(launch, assert_rounds_to, product, nvfp4_linear_spec(product, target), rows)
