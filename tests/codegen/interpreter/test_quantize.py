"""Kernels that quantise rows: by the book, byte for byte, and after another kernel as by themselves."""

from collections.abc import Callable
from dataclasses import replace

import nvfp4
import pytest
import torch
from torch import Tensor
from triton_interpreter import poisoned

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.norm_quantize_triton import act_mul_quantize_spec, rms_norm_quantize_spec
from octavo.codegen.quantize_triton import FORMATS, LIMITS, Quantization, dequantize_spec, quantize_spec
from octavo.codegen.specs_triton import act_mul_spec, rms_norm_spec
from octavo.compiler.pointwise import ACTIVATIONS
from octavo.compiler.target import load_target

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
B200 = load_target("b200")
TARGETS = {"hardware": B200, "portable": replace(B200, arch=90)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
NVFP4, NVFP4_TOKEN, FP8, FP8_TOKEN = FORMATS
every_format = pytest.mark.parametrize("quantization", FORMATS, ids=lambda form: form.label)


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def memory(quantization: Quantization, rows: int, k: int) -> list[Tensor]:
    """Poisoned results: codes, scales, outer scales."""
    codes = [rows, k // 2 if quantization.format == "nvfp4" else k]
    shapes = [codes, [-(-rows // 128) * 128 * -(-k // 64) * 4]] if quantization.format == "nvfp4" else [codes]
    shapes += [[rows]] * quantization.by_token
    return [poisoned(shape, dtype) for shape, dtype in zip(shapes, quantization.results, strict=True)]


def named(results: list[Tensor]) -> dict[str, Tensor]:
    return {"out": results[0]} if len(results) == 1 else {f"out_{i}": r for i, r in enumerate(results)}


def by_the_book(quantization: Quantization, x: Tensor, outer: Tensor) -> list[Tensor]:
    """Codes and linear scales of rows, outer (rows,); nan for what is not finite."""
    if quantization.format == "fp8":
        wanted = (x.float() / outer[:, None]).clamp(-448.0, 448.0).masked_fill(~x.isfinite(), float("nan"))
        return [wanted.to(torch.float8_e4m3fn)]
    parts = [nvfp4.quantize(row, float(scale)) for row, scale in zip(x.float().split(1), outer, strict=True)]
    return [torch.cat([part[i].view(torch.uint8) for part in parts]) for i in (0, 1)]


def outer_of(quantization: Quantization, x: Tensor) -> Tensor:
    """The outer scale of each row, fp32."""
    amax = x.float().abs().amax(-1)
    outer = (amax / LIMITS[quantization.format]).clamp(min=2.0**-80)
    return torch.where(amax == 0, torch.ones(()), outer)


def check(quantization: Quantization, results: list[Tensor], x: Tensor, outer: Tensor) -> None:
    """Every byte: those of the rows, the zeros that pad blocks, and rows past the last as they were."""
    rows, k = x.shape
    if quantization.by_token:
        assert torch.equal(results[-1], outer)
    wanted = by_the_book(quantization, x, outer)
    assert torch.equal(as_bytes(results[0]), as_bytes(wanted[0]))
    if quantization.format == "nvfp4":
        padded = nvfp4.unswizzle(results[1], -(-rows // 128) * 128, -(-k // 64) * 4).view(torch.uint8)
        assert torch.equal(padded[:rows, : k // 16], wanted[1])
        assert (padded[:rows, k // 16 :] == 0).all() and (padded[rows:] == 0xFF).all()


def run(
    launch: Launch, quantization: Quantization, target: str, x: Tensor, outer: Tensor | None = None
) -> list[Tensor]:
    rows, k = x.shape
    spec = quantize_spec(
        "T", k, "bf16" if x.dtype == torch.bfloat16 else "fp32", quantization, TARGETS[target]
    )
    results = memory(quantization, rows, k)
    tensors = {"x": x, **named(results)} | ({} if outer is None else {"outer": outer[:1].clone()})
    launch(spec, tensors, {"T": rows})
    return results


def awkward(rows: int, k: int, dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes, with zeros of both signs, a block of zeros, ties, and a row of zeros."""
    x = torch.randn(rows, k) * torch.logspace(-6, 2, rows)[:, None]
    x[0, 1], x[0, 3] = 0.0, -0.0
    x[rows // 2, : min(k, 32)] = torch.tensor([0.0, -0.0] * 8 + [0.25 * i for i in range(16)])[: min(k, 32)]
    x[rows - 1] = torch.tensor([0.0, -0.0]).repeat(k // 2) if rows > 1 else x[rows - 1]
    return x.to(dtype)


@every_format
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("rows", "k", "dtype"), [(3, 144, "fp32"), (1, 16, "bf16"), (17, 208, "bf16")])
def test_every_byte_is_that_of_the_recipe(
    launch: Launch, quantization: Quantization, target: str, rows: int, k: int, dtype: str
) -> None:
    x = awkward(rows, k, DTYPES[dtype])
    rows_own = outer_of(quantization, x)
    outer = rows_own if quantization.by_token else rows_own.max().expand(rows)
    results = run(launch, quantization, target, x, None if quantization.by_token else outer)
    check(quantization, results, x, outer)


@pytest.mark.parametrize("rows", [127, 128, 129])
def test_rows_beside_the_edge_of_a_tile_of_scales(launch: Launch, rows: int) -> None:
    x = awkward(rows, 80, torch.bfloat16)
    outer = outer_of(NVFP4, x).max().expand(rows)
    check(NVFP4, run(launch, NVFP4, "hardware", x, outer), x, outer)


@every_format
def test_no_row_writes_nothing(launch: Launch, quantization: Quantization) -> None:
    results = memory(quantization, 2, 64)
    before = [as_bytes(result).clone() for result in results]
    spec = quantize_spec("T", 64, "bf16", quantization, B200)
    launch(spec, {"x": torch.empty(0, 64), "outer": torch.ones(1), **named(results)}, {"T": 0})
    assert all(torch.equal(as_bytes(r), b) for r, b in zip(results, before, strict=True))


@pytest.mark.parametrize("quantization", [NVFP4, FP8], ids=lambda form: form.label)
@pytest.mark.parametrize("exponent", [-40, -3, 6, 70])
def test_outer_scales_that_do_not_fit(launch: Launch, quantization: Quantization, exponent: int) -> None:
    """Scales at 448 and codes at 6, subnormal scales, scales of 2^-9 with codes of 0."""
    x = awkward(5, 96, torch.float32)
    outer = outer_of(quantization, x).max().expand(5) * 1.1 * 2.0**exponent
    check(quantization, run(launch, quantization, "hardware", x, outer), x, outer)


@pytest.mark.parametrize("target", TARGETS)
def test_quotients_beside_every_tie(launch: Launch, target: str) -> None:
    """The nearest fp32 numbers to what lies half way between two codes, for steps that are no power of two."""
    outer = torch.tensor([1.0 / 3.0])
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()[::2][:48]
    step = scales * outer
    ties = step[:, None] * torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    x = torch.zeros(48, 16)
    x[:, 0] = 6.0 * step
    x[:, 1:8], x[:, 8:15] = (
        torch.nextafter(ties, torch.zeros(())),
        -torch.nextafter(ties, torch.full((), 9e9)),
    )
    outer = outer.expand(48)
    check(NVFP4, run(launch, NVFP4, target, x, outer), x, outer)


@every_format
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(
    launch: Launch, quantization: Quantization, value: float
) -> None:
    x = awkward(4, 64, torch.bfloat16)
    outer = outer_of(quantization, x) if quantization.by_token else outer_of(quantization, x).max().expand(4)
    x[1, 20] = value
    results = run(launch, quantization, "hardware", x, None if quantization.by_token else outer)
    others = torch.tensor([0, 2, 3])
    wanted = by_the_book(quantization, x[others], outer[others])
    assert torch.equal(as_bytes(results[0])[others], as_bytes(wanted[0]))
    if quantization.by_token:
        assert torch.equal(results[-1][others], outer[others])
        assert not results[-1][1].isfinite()
    elif quantization.format == "fp8":
        row, wanted_row = results[0][1].float(), by_the_book(quantization, x, outer)[0][1].float()
        torch.testing.assert_close(row, wanted_row, rtol=0, atol=0, equal_nan=True)
    else:
        row = nvfp4.unswizzle(results[1], 4, 4)[1].float()
        assert row[1].isnan() and row[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("quantization", [NVFP4_TOKEN, FP8_TOKEN], ids=lambda form: form.label)
def test_a_row_that_is_read_in_pieces(launch: Launch, quantization: Quantization) -> None:
    x = awkward(2, 208, torch.bfloat16)
    whole = quantize_spec("T", 208, "bf16", quantization, B200)
    pieces = replace(whole, params=tuple((n, 64 if n == "COLS" else v) for n, v in whole.params))
    results = memory(quantization, 2, 208)
    launch(pieces, {"x": x, **named(results)}, {"T": 2})
    check(quantization, results, x, outer_of(quantization, x))


@every_format
@pytest.mark.parametrize(("residual", "keep", "dtype"), [(False, False, "fp32"), (True, True, "bf16")])
def test_a_norm_that_quantises_is_the_norm_and_then_quantisation(
    launch: Launch, quantization: Quantization, residual: bool, keep: bool, dtype: str
) -> None:
    rows, hidden = 3, 208
    x = torch.randn(rows, hidden).to(DTYPES[dtype])
    inputs = {"x": x, "weight": torch.randn(hidden).to(x.dtype)} | (
        {"residual": x.flip(0)} if residual else {}
    )
    plain = rms_norm_spec("T", hidden, dtype, 1e-5, 1.0, residual)
    y, total = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    launch(plain, {**inputs, **named([y, total] if residual else [y])}, {"T": rows})

    outer = outer_of(quantization, y) if quantization.by_token else torch.tensor([0.01]).expand(rows)
    fused = rms_norm_quantize_spec("T", hidden, dtype, 1e-5, 1.0, residual, quantization, B200, keep)
    kept = [torch.full_like(x, float("nan")) for _ in range(keep + residual)]
    results = memory(quantization, rows, hidden)
    tensors = {**inputs, **named(results + kept)} | (
        {} if quantization.by_token else {"outer": outer[:1].clone()}
    )
    launch(fused, tensors, {"T": rows})
    check(quantization, results, y, outer)
    assert all(torch.equal(got, wanted) for got, wanted in zip(kept, [y] * keep + [total], strict=False))


@every_format
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_that_quantises_is_the_activation_and_then_quantisation(
    launch: Launch, quantization: Quantization, activation: str
) -> None:
    rows, k = 3, 144
    gate_up = (torch.randn(rows, 2 * k) * 3).bfloat16()
    y = torch.full((rows, k), float("nan"), dtype=torch.bfloat16)
    launch(act_mul_spec("T", k, "bf16", activation), {"gate_up": gate_up, "out": y}, {"T": rows})
    outer = outer_of(quantization, y) if quantization.by_token else torch.tensor([0.003]).expand(rows)
    results = memory(quantization, rows, k)
    fused = act_mul_quantize_spec("T", k, "bf16", activation, quantization, B200)
    tensors = {"gate_up": gate_up, **named(results)}
    launch(fused, tensors | ({} if quantization.by_token else {"outer": outer[:1].clone()}), {"T": rows})
    check(quantization, results, y, outer)


@every_format
@pytest.mark.parametrize(("target", "dtype"), [("hardware", "bf16"), ("portable", "fp32")])
def test_dequantised_codes(launch: Launch, quantization: Quantization, target: str, dtype: str) -> None:
    rows, k = 19, 144
    generator = torch.Generator().manual_seed(0)
    codes, scales = nvfp4.any_codes(rows, k, generator)
    outer = (torch.rand(rows) if quantization.by_token else torch.rand(1).expand(rows)).clone()
    if quantization.format == "nvfp4":
        given = {"code": codes, "scale": nvfp4.swizzle(scales)}
        # a scale times the outer one is rounded to fp32, its product with a code then again
        unit = torch.from_numpy(
            nvfp4.dequantize(codes, torch.ones_like(scales.float()).to(scales.dtype), 1.0).numpy()
        )
        expected = unit.float() * (scales.float() * outer[:, None]).repeat_interleave(16, 1)
    else:
        given = {
            "code": torch.arange(rows * k)
            .remainder(0x7F)
            .to(torch.uint8)
            .view(rows, k)
            .view(torch.float8_e4m3fn)
        }
        expected = given["code"].float() * outer[:, None]
    out = torch.full((rows, k), float("nan"), dtype=DTYPES[dtype])
    spec = dequantize_spec("T", k, dtype, quantization, TARGETS[target])
    launch(
        spec,
        {**given, "outer": outer if quantization.by_token else outer[:1].clone(), "out": out},
        {"T": rows},
    )
    assert torch.equal(out, expected.to(out.dtype))


@pytest.mark.slow
@every_format
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("k", [16, 48, 112, 1040])
@pytest.mark.parametrize("rows", [1, 31, 97])
def test_sweep_of_sizes(launch: Launch, quantization: Quantization, target: str, rows: int, k: int) -> None:
    x = awkward(rows, k, torch.bfloat16)
    rows_own = outer_of(quantization, x)
    outer = rows_own if quantization.by_token else rows_own.max().expand(rows)
    check(
        quantization, run(launch, quantization, target, x, None if quantization.by_token else outer), x, outer
    )
