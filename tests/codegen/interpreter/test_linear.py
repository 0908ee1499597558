"""The kernels of a matrix product, each over the numbers of rows that select it, and each form of a kernel."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from triton_interpreter import poisoned

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.linear_triton import Product, linear_pointer_spec, linear_tma_spec
from octavo.compiler.expression import holds
from octavo.compiler.target import load_target

Launch = Callable[[KernelSpec, dict[str, torch.Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FP8 = Product("T", 272, 400, "fp8", "bf16", bias=True, alpha="column", row_scale=True)
# two programs instead of one per multiprocessor, so that each walks over several tiles
SMALL = replace(load_target("b200"), sm_count=2)


def run(
    launch: Launch, spec: KernelSpec, product: Product, rows: int
) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """The templates that ran, the result and its fp64 reference."""
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (
        torch.randn(shape, generator=generator).to(DTYPES[product.dtype])
        for shape in ((rows, product.k), (product.n, product.k), (product.n,))
    )
    out = torch.full((rows, product.n), float("nan"), dtype=DTYPES[product.out_dtype])
    tensors = {"x": x, "weight": weight, "bias": bias, "out": out}
    ran = launch(spec, tensors, {"T": rows})
    expected = x.double() @ weight.double().T + (bias.double() if product.bias else 0.0)
    return ran, out, expected


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "template"),
    [(1, "few_rows"), (3, "few_rows"), (17, "few_rows"), (64, "few_rows"), (65, "linear"), (300, "linear")],
)
def test_linear_of_any_number_of_rows(
    launch: Launch, assert_rounds_to: Check, out_dtype: str, rows: int, template: str
) -> None:
    product = Product("T", 296, 576, "bf16", out_dtype, bias=rows % 2 == 1)
    ran, out, expected = run(launch, linear_tma_spec(product, SMALL), product, rows)
    assert ran == ["triton/linear.py.jinja" if template == "linear" else "triton/linear_few_rows.py.jinja"]
    assert_rounds_to(out, expected, sums=0.5)


def test_few_rows_with_tall_tiles(launch: Launch, assert_rounds_to: Check) -> None:
    product = Product("T", 1000, 200, "bf16", "bf16", bias=True)
    spec = linear_tma_spec(product, SMALL)
    assert dict(spec.params)["BLOCK_N"] == 128
    _, out, expected = run(launch, spec, product, 5)
    assert_rounds_to(out, expected, sums=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "n", "k", "bias"), [(1, 257, 100, True), (3, 64, 576, False), (70, 33, 77, True)]
)
def test_linear_of_odd_shapes(
    launch: Launch, assert_rounds_to: Check, dtype: str, rows: int, n: int, k: int, bias: bool
) -> None:
    product = Product("T", n, k, dtype, dtype, bias)
    ran, out, expected = run(launch, linear_pointer_spec(product), product, rows)
    assert len(ran) == 1
    assert_rounds_to(out, expected, sums=0.5)


def scaled(product: Product, rows: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """FP8 tensors by argument name, of values from all over the range, and the result in fp64."""
    g = torch.Generator().manual_seed(rows)
    x, weight = (
        torch.randint(0, 256, (size, product.k), generator=g, dtype=torch.uint8) for size in (rows, product.n)
    )
    # 0x7F and 0xFF are nan
    x, weight = (torch.where((t & 0x7F) == 0x7F, t - 1, t).view(torch.float8_e4m3fn) for t in (x, weight))
    alpha = 2.0**-14 * (0.5 + torch.rand(product.n if product.alpha == "column" else 1, generator=g))
    row_scale = 0.5 + torch.rand(rows, generator=g)
    bias = torch.randn(product.n, generator=g).to(torch.bfloat16)
    expected = x.double() @ weight.double().T
    if product.alpha:
        expected *= alpha.double()
    if product.row_scale:
        expected *= row_scale.double()[:, None]
    if product.bias:
        expected += bias.double()
    return {"x": x, "weight": weight, "alpha": alpha, "row_scale": row_scale, "bias": bias}, expected


def check_scaled(launch: Launch, check: Check, spec: KernelSpec, product: Product, rows: int) -> None:
    """Every form of the kernel that serves so many rows."""
    (kernel,) = (kernel for kernel in spec.launches if holds(kernel.when, {"T": rows}))
    for form in kernel.forms:
        tensors, expected = scaled(product, rows)
        tensors["out"] = poisoned([rows, product.n], product.out_dtype)
        launch(replace(form, also=(), candidates=()), tensors, {"T": rows})
        check(tensors["out"], expected, sums=0.5)


@pytest.mark.parametrize("rows", [1, 17, 65, 300])
def test_fp8_product_with_scales_of_columns_and_rows(
    launch: Launch, assert_rounds_to: Check, rows: int
) -> None:
    check_scaled(launch, assert_rounds_to, linear_tma_spec(FP8, SMALL), FP8, rows)


@pytest.mark.parametrize("rows", [5, 66])
def test_fp8_product_with_one_scale(launch: Launch, assert_rounds_to: Check, rows: int) -> None:
    for alpha in ("scalar", ""):
        product = replace(FP8, n=8, out_dtype="fp32", bias=False, alpha=alpha, row_scale=False)
        check_scaled(launch, assert_rounds_to, linear_tma_spec(product, SMALL), product, rows)


@pytest.mark.parametrize(("rows", "alpha"), [(1, "column"), (16, "scalar"), (67, "column")])
def test_fp8_product_of_odd_shapes(launch: Launch, assert_rounds_to: Check, rows: int, alpha: str) -> None:
    product = replace(FP8, n=77, k=101, alpha=alpha)
    check_scaled(launch, assert_rounds_to, linear_pointer_spec(product), product, rows)


def test_a_bf16_product_in_every_form(launch: Launch, assert_rounds_to: Check) -> None:
    product = Product("T", 296, 200, "bf16", "bf16", bias=True)
    for target in (SMALL, replace(load_target("h100"), sm_count=2)):
        for rows in (7, 40, 140):
            (kernel,) = (
                kernel
                for kernel in linear_tma_spec(product, target).launches
                if holds(kernel.when, {"T": rows})
            )
            for form in kernel.forms:
                spec = replace(form, also=(), candidates=())
                _, out, expected = run(launch, spec, product, rows)
                assert_rounds_to(out, expected, sums=0.5)
