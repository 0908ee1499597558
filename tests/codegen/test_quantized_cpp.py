"""The C++ kernels that quantise, to the byte of the references; and their products, in the order that they state."""

import ctypes
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary, cpp_spec, rounding
from lowered import LoweredGraph
from nvfp4 import any_codes
from quantized_cpp import (
    E4M3,
    LANES,
    Array,
    add_blocks,
    add_products,
    block_sums,
    e4m3,
    finish,
    producer,
    product,
    weights,
)
from torch import Tensor

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.render import render, render_template
from octavo.compiler.errors import CodegenError
from octavo.compiler.host import build_shared_library
from octavo.compiler.program import DIMS

FP32, BF16 = torch.float32, torch.bfloat16
OUTER = 0.013
ROWS = (*range(1, 10), 31, 32, 33, 127, 128, 129)
COLUMNS = 37
PRODUCERS = ("rms_norm_quantize", "add_rms_norm_quantize", "act_mul_quantize")
# K of NVFP4 products: blocks of one group and less, with and without a part of one, and a K in two parts.
LENGTHS = (16, 48, 64, 80, 576, 1648)
OTHERS = ("nvfp4_weight_linear", "fp8_linear")
FORMS = ((FP32, "nvfp4", True), (BF16, "nvfp4", False), (FP32, "fp8", False), (BF16, "fp8", True))


def is_full(length: int) -> bool:
    return length in (48, 576)


def dtype_of(length: int) -> torch.dtype:
    return BF16 if length in (48, 80) else FP32


@cache
def plain(op: str, width: int, dtype: torch.dtype) -> KernelSpec:
    """The kernel in front of a quantisation."""
    graph = LoweredGraph()
    graph.input("input_ids")
    names = ("x", "residual") if op.startswith("add") else ("x",)
    tokens = [graph.tokens(name, (2 * width if op == "act_mul" else width,), dtype) for name in names]
    others = ["silu"] if op == "act_mul" else [graph.weight("w", torch.zeros(width)), 1e-5, 1.0]
    return cpp_spec(graph.call(op, *tokens, *others))


@pytest.fixture(scope="module", params=RUNNABLE)
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def kernels(level: str) -> KernelLibrary:
    specs = [producer("quantize", w, *form) for w in (16, 80) for form in FORMS]
    specs += [producer(op, 80, *form) for op in PRODUCERS for form in FORMS]
    specs += [plain(op.removesuffix("_quantize"), 80, dtype) for op in PRODUCERS for dtype in (FP32, BF16)]
    specs += [product("nvfp4_linear", COLUMNS, k, dtype_of(k), is_full(k)) for k in LENGTHS]
    specs += [product(op, COLUMNS, k, BF16, is_full(k)) for op in OTHERS for k in (48, 576)]
    specs += [product("nvfp4_weight_linear", COLUMNS, 80, FP32, False)]
    return KernelLibrary(specs, level)


def same_bytes(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(
        a.dtype == e.dtype and torch.equal(a.view(torch.uint8), e.reshape(a.shape).view(torch.uint8))
        for a, e in zip(actual, expected, strict=True)
    )


def edges(width: int) -> Tensor:
    """Rows with zeros of both signs, zero blocks, elements out of reach, tiny ones, nan and infinities."""
    generator = torch.Generator().manual_seed(width)
    x = torch.randn(33, width, generator=generator) * torch.exp(
        3 * torch.randn(33, width, generator=generator)
    )
    x[3], x[4, :16], x[5], x[6, 3:7] = 0.0, 0.0, -0.0, -0.0
    x[7], x[8] = 1e-30, x[8] * 1e-38
    x[9, 1], x[10, 2], x[11, 0], x[11, 4] = 1e30, float("inf"), -float("inf"), float("nan")
    x[12, ::3] = -1e-7
    # Multiples of half a step, where ties lie.
    x[13:20] = torch.randint(-26, 27, (7, width), generator=generator) * OUTER / 4
    x[20] = OUTER * 6 * 448 * 2
    return x


@pytest.mark.parametrize("width", [16, 80])
@pytest.mark.parametrize(("dtype", "format", "is_static"), FORMS)
def test_quantises_to_the_byte(
    kernels: KernelLibrary, width: int, dtype: torch.dtype, format: str, is_static: bool
) -> None:
    x = edges(width).to(dtype)
    outer = [torch.tensor([OUTER])] if is_static else []
    expected = torch.ops.octavo.quantize(x[None], outer[0] if outer else None, format)
    outputs = [torch.empty_like(part) for part in expected]
    assert kernels(producer("quantize", width, dtype, format, is_static), [x, *outer, *outputs], [33]) == 0
    assert same_bytes(outputs, expected)
    if not is_static:  # by the smallest fp32 numbers a quotient would overflow on the way
        assert outputs[-1].reshape(-1)[7:9].tolist() == [2.0**-80, 2.0**-80]


@pytest.mark.parametrize("op", PRODUCERS)
@pytest.mark.parametrize(("dtype", "format", "is_static"), FORMS)
def test_fused_producers_keep_every_bit(
    kernels: KernelLibrary, op: str, dtype: torch.dtype, format: str, is_static: bool
) -> None:
    torch.manual_seed(0)
    width, rows = 80, 129
    inputs = [torch.randn(rows, 2 * width if op == "act_mul_quantize" else width).to(dtype)]
    inputs += [torch.randn(rows, width).to(dtype)] if op.startswith("add") else []
    inputs += [] if op == "act_mul_quantize" else [torch.randn(width)]
    made = [torch.empty(rows, width, dtype=dtype) for _ in range(1 + op.startswith("add"))]
    assert kernels(plain(op.removesuffix("_quantize"), width, dtype), [*inputs, *made], [rows]) == 0
    outer = torch.tensor([OUTER]) if is_static else None
    expected = [*torch.ops.octavo.quantize(made[0][None], outer, format), *made[1:]]
    outputs = [torch.empty_like(part) for part in expected]
    given = [*inputs, *([outer] if outer is not None else [])]
    assert kernels(producer(op, width, dtype, format, is_static), [*given, *outputs], [rows]) == 0
    assert same_bytes(outputs, expected)


def test_the_sum_may_lie_where_the_residual_does(kernels: KernelLibrary) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 80), torch.randn(5, 80), torch.randn(80)
    parts = [torch.empty(5, 40, dtype=torch.uint8), torch.empty(5, 5).to(E4M3)]
    spec = producer("add_rms_norm_quantize", 80, FP32, "nvfp4", True)
    expected = x + residual
    assert kernels(spec, [x, residual, weight, torch.tensor([OUTER]), *parts, residual], [5]) == 0
    assert torch.equal(residual, expected)


def drawn(rows: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
    """Codes, and scales that are surrounded by nan, so that a read outside shows."""
    codes, scales = any_codes(rows, length, torch.Generator().manual_seed(seed))
    memory = torch.full((scales.numel() + 128,), 0x7F, dtype=torch.uint8).view(E4M3)
    memory[64:-64] = scales.flatten()
    return codes, memory[64:-64].view(scales.shape)


def options(spec: KernelSpec, rows: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """alpha, row scales, bias."""
    torch.manual_seed(rows)
    params = dict(spec.params)
    dtype = FP32 if params["out_dtype"] == "fp32" else BF16
    row_scale = torch.rand(rows) if params["row_scale"] else None
    return (
        torch.rand(int(params["ALPHAS"])),
        row_scale,
        torch.randn(COLUMNS).to(dtype) if params["bias"] else None,
    )


def run(
    kernels: KernelLibrary,
    spec: KernelSpec,
    given: Sequence[Tensor],
    more: Sequence[Tensor | None],
    threads: int = 2,
) -> Tensor:
    dtype = FP32 if dict(spec.params)["out_dtype"] == "fp32" else BF16
    out = torch.empty(given[0].shape[0], COLUMNS, dtype=dtype)
    tensors = [*given, *(tensor for tensor in more if tensor is not None), out]
    assert kernels(spec, tensors, [given[0].shape[0]], threads) == 0
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_nvfp4_products_add_in_the_stated_order(kernels: KernelLibrary, length: int) -> None:
    dtype = dtype_of(length)
    spec = product("nvfp4_linear", COLUMNS, length, dtype, is_full(length))
    x, w = drawn(max(ROWS), length, 1), drawn(COLUMNS, length, 2)
    alpha, row_scale, bias = options(spec, max(ROWS))
    exact = block_sums(x, w)
    expected = finish(add_blocks(exact), alpha, row_scale, bias, dtype)
    for rows in ROWS:
        cut = [part[:rows].clone() for part in x]
        more = (alpha, None if row_scale is None else row_scale[:rows].clone(), bias)
        assert torch.equal(run(kernels, spec, [*cut, *w], more, 1 + rows % 2), expected[:rows])
    # Of every product the eight lanes, the parts and what follows round: in fp64 nothing does.
    reference = torch.from_numpy(exact.sum(-1)) * alpha.double()
    room = torch.from_numpy(np.abs(exact).sum(-1)) * alpha.double()
    if row_scale is not None and bias is not None:
        reference, room = reference * row_scale[:, None] + bias, room * row_scale[:, None] + bias.abs()
    bound = room * (length / 128 + 24) * rounding(FP32) + reference.abs() * rounding(dtype)
    assert bool(((expected.double() - reference).abs() <= bound).all())


def test_every_code_with_every_scale(kernels: KernelLibrary) -> None:
    """One row for each of 16 codes and 127 scales; the first 16 columns hold a code each, the others any."""
    code, scale = (
        part.flatten() for part in torch.meshgrid(torch.arange(16), torch.arange(127), indexing="ij")
    )
    codes = (code | code << 4).to(torch.uint8)[:, None].expand(-1, 8).contiguous()
    x = codes, scale.to(torch.uint8)[:, None].contiguous().view(E4M3)
    w = drawn(COLUMNS, 16, 3)
    w[0][:16] = (torch.arange(16) * 17).to(torch.uint8)[:, None]
    alpha = torch.ones(1)
    out = run(kernels, product("nvfp4_linear", COLUMNS, 16, FP32, False), [*x, *w], [alpha])
    assert torch.equal(out.double(), torch.from_numpy(weights(*x) @ weights(*w).T))


def test_a_block_without_a_value_makes_its_row_nan(kernels: KernelLibrary) -> None:
    x, w = drawn(9, 80, 4), drawn(COLUMNS, 80, 5)
    x[1].view(torch.uint8)[2, 3] = 0x7F
    x[1].view(torch.uint8)[4, 0] = 0xFF
    w[1].view(torch.uint8)[6, 4] = 0x7F
    for rows in (5, 9):
        out = run(
            kernels,
            product("nvfp4_linear", COLUMNS, 80, BF16, False),
            [*(p[:rows].clone() for p in x), *w],
            [torch.ones(1)],
        )
        expected = torch.zeros(rows, COLUMNS, dtype=torch.bool)
        expected[2], expected[4], expected[:, 6] = True, True, True
        assert torch.equal(out.isnan(), expected)


def other_operands(
    op: str, length: int, dtype: torch.dtype
) -> tuple[list[Tensor], list[Tensor], Array, Array]:
    """The left and right side as kernels take them, and as values."""
    torch.manual_seed(length)
    if op == "fp8_linear":
        left, right = ((torch.randn(n, length) * 50).to(E4M3) for n in (max(ROWS), COLUMNS))
        return [left], [right], e4m3(left), e4m3(right)
    x, w = torch.randn(max(ROWS), length).to(dtype), drawn(COLUMNS, length, 6)
    return [x], [*w], x.double().numpy(), weights(*w)


@pytest.mark.parametrize("length", [48, 576])
@pytest.mark.parametrize("op", OTHERS)
def test_other_products_add_in_the_stated_order(
    kernels: KernelLibrary, level: str, op: str, length: int
) -> None:
    spec = product(op, COLUMNS, length, BF16, is_full(length))
    x, w, left, right = other_operands(op, length, BF16)
    alpha, row_scale, bias = options(spec, max(ROWS))
    order = (0, 1, 2, 3, 4, 5, 6, 7) if op == "fp8_linear" else (0, 2, 4, 6, 1, 3, 5, 7)
    expected = finish(add_products(left, right, LANES[level], order), alpha, row_scale, bias, BF16)
    for rows in ROWS:
        more = (alpha, None if row_scale is None else row_scale[:rows].clone(), bias)
        assert torch.equal(run(kernels, spec, [x[0][:rows].clone(), *w], more, 1 + rows % 2), expected[:rows])


def test_fp32_rows_times_weights(kernels: KernelLibrary) -> None:
    x, w, left, right = other_operands("nvfp4_weight_linear", 80, FP32)
    spec = product("nvfp4_weight_linear", COLUMNS, 80, FP32, False)
    out = run(kernels, spec, [*x, *w], [torch.ones(1)])
    alone = torch.cat([run(kernels, spec, [row[None], *w], [torch.ones(1)]) for row in x[0]])
    bound = (np.abs(left) @ np.abs(right).T) * 40 * rounding(FP32)
    assert torch.equal(out, alone)
    assert bool((np.abs(out.double().numpy() - left @ right.T) <= bound).all())


SHIM = """
#include <immintrin.h>
static inline __m256i four_products(__m256i sums, __m256i a, __m256i b) {
    int s[8]; unsigned char u[32]; signed char i[32];
    _mm256_storeu_si256((__m256i*)s, sums);
    _mm256_storeu_si256((__m256i*)u, a);
    _mm256_storeu_si256((__m256i*)i, b);
    for (int k = 0; k < 32; ++k) s[k / 4] += int(u[k]) * int(i[k]);
    return _mm256_loadu_si256((__m256i*)s);
}
#define _mm256_dpbusd_epi32 four_products
#define __AVX512VNNI__ 1
#define __AVX512VL__ 1
"""


def text_of(*specs: KernelSpec) -> str:
    entries = [
        f'extern "C" int run_{i}(void** p, int64_t n) {{ return {s.name}('
        + ", ".join(f"({a.dtype}*)p[{j}]" for j, a in enumerate(s.args[:-1]))
        + ", n, 1); }\n"
        for i, s in enumerate(specs)
    ]
    return render_template(
        "cpp/program.cpp.jinja", version="test", dims=DIMS, kernels=[*map(render, specs), *entries], buffers=(),
        segments=((),), workspace="0",
    )  # fmt: skip


@pytest.mark.skipif("avx2" not in RUNNABLE, reason="the shim is made of AVX2")
def test_four_products_at_once_give_the_same_sums() -> None:
    """The text for AVX-512 VNNI, with its one instruction spelled out."""
    spec = product("nvfp4_linear", COLUMNS, 80, BF16, False)
    library = ctypes.CDLL(str(build_shared_library(SHIM + text_of(spec), "avx2")))
    for rows in (5, 33):
        x, w, out = drawn(rows, 80, 7), drawn(COLUMNS, 80, 8), torch.empty(rows, COLUMNS, dtype=BF16)
        tensors = [*x, *w, torch.ones(1), out]
        pointers = (ctypes.c_void_p * len(tensors))(*(t.data_ptr() for t in tensors))
        assert library.run_0(pointers, ctypes.c_int64(rows)) == 0
        assert torch.equal(out, finish(add_blocks(block_sums(x, w)), torch.ones(1), None, None, BF16))


@pytest.mark.slow
@pytest.mark.parametrize("features", ["avx512", "avx512_bf16"])
def test_compiles_where_it_cannot_run(features: str) -> None:
    specs = [product(op, COLUMNS, 80, BF16, True) for op in ("nvfp4_linear", *OTHERS)]
    specs += [producer("quantize", 80, *form) for form in FORMS]
    assert build_shared_library(text_of(*specs), features).is_file()


def test_says_what_it_refuses() -> None:
    said = "block scales must lie in the layout linear, got 'swizzled_128x4'"
    with pytest.raises(CodegenError, match=f"no cpu kernel for nvfp4_linear .*{said}"):
        product("nvfp4_linear", COLUMNS, 80, BF16, False, "swizzled_128x4")
    with pytest.raises(CodegenError, match=f"no cpu kernel for quantize .*{said}"):
        producer("quantize", 80, BF16, "nvfp4", True, "swizzled_128x4")
    with pytest.raises(CodegenError, match=r"quantize.*expected fp32 or bf16, one for all, got x float16"):
        producer("quantize", 80, torch.float16, "nvfp4", True)


def test_a_step_without_tokens_is_no_work(kernels: KernelLibrary) -> None:
    kernels.assert_idle_without_tokens()
