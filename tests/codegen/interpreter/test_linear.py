"""The kernels of a matrix product, each over the numbers of rows that select it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.linear_triton import Product, linear_pointer_spec, linear_tma_spec
from octavo.compiler.target import load_target

Launch = Callable[[KernelSpec, dict[str, torch.Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
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
