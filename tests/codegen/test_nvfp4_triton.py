"""The launches of products with NVFP4 weights and of FP8 ones: which, when, with what numbers; that they build."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.linear_corners import CORNERS
from octavo.codegen.linear_triton import Product, linear_tma_spec, tma_refusal
from octavo.codegen.nvfp4_triton import Nvfp4Product, block_scaled_many, nvfp4_linear_spec, nvfp4_refusal
from octavo.compiler.expression import evaluate, holds
from octavo.compiler.target import Target, load_target

B200, H100, CONSUMER = (load_target(name) for name in ("b200", "h100", "rtx_pro_6000"))
W4A4 = Nvfp4Product("T", 4096, 4096, "nvfp4", "bf16")
W4A16 = replace(W4A4, x_dtype="bf16")


def launched(spec: KernelSpec, rows: int) -> list[KernelSpec]:
    return [kernel for kernel in spec.launches if holds(kernel.when, {"T": rows})]


def stems(spec: KernelSpec, rows: int) -> list[str]:
    return [kernel.template.split("/")[1].split(".")[0] for kernel in launched(spec, rows)]


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 64, 65, 5000])
def test_a_kernel_for_every_number_of_rows(rows: int) -> None:
    few = stems(nvfp4_linear_spec(W4A4, B200), rows)
    assert few[0] == ("nvfp4_linear_few_rows" if rows <= 64 else "nvfp4_linear")
    assert few[1:] == ["sum_parts"] * (rows <= 16)
    for target in (B200, H100, CONSUMER):
        kernels = launched(nvfp4_linear_spec(W4A16, target), rows)
        (product,) = (kernel for kernel in kernels if "weight_only" in kernel.template)
        tile = dict(product.params)["BLOCK_M"]
        assert tile == (128 if rows > 64 else next(limit for limit in (8, 16, 64) if rows <= limit))
        assert dict(product.params)["HW"] is (target is not H100)
    assert stems(nvfp4_linear_spec(W4A16, B200), 65) == ["saturate_fp16", "nvfp4_weight_only"]
    assert stems(nvfp4_linear_spec(replace(W4A16, x_dtype="fp16"), B200), 65) == ["nvfp4_weight_only"]


def test_k_is_split_where_tiles_leave_multiprocessors_idle() -> None:
    """32 tiles of 128 rows on 148 multiprocessors: 4 parts. 224 tiles are enough."""
    spec = nvfp4_linear_spec(W4A4, B200)
    stream, total = launched(spec, 5)
    assert (stream.grid, stream.iterations) == (("32", "1", "4"), str(32 * 16))
    assert dict(stream.params)["PART"] == 4 and dict(total.params)["SPLITS"] == 4
    assert ("parts", "fp32", (4 * 16, 4096)) in spec.scratch
    # four times the sums instead of the result
    assert evaluate(stream.bytes, {"T": 5}) == 5 * (2304 + 4 * 4 * 4096) + 4096 * 2304
    assert evaluate(total.bytes, {"T": 5}) == 5 * 4096 * (4 * 4 + 2)
    assert len(launched(nvfp4_linear_spec(replace(W4A4, n=28672), B200), 5)) == 1
    # sums of 64 rows would move as much as the weights
    assert len(launched(spec, 64)) == 1


def test_split_products_leave_what_follows_to_the_sum() -> None:
    product = replace(W4A4, alpha="column", row_scale=True, bias="bf16", residual=True)
    stream, total = launched(nvfp4_linear_spec(product, B200), 1)
    follows = ["alpha", "row_scale", "bias", "residual"]
    assert [arg.name for arg in stream.args] == [
        "x", "x_scale", "weight", "weight_scale", "parts", "num_rows",
    ]  # fmt: skip
    assert [arg.name for arg in total.args] == ["parts", *follows, "out", "num_rows"]
    (tiled,) = launched(nvfp4_linear_spec(product, B200), 100)
    assert [arg.name for arg in tiled.args][4:] == [*follows, "out", "num_rows"]


def test_scales_of_weights_have_one_layout() -> None:
    """128 x 4 tiles of 512 bytes, whatever x is and however many rows there are."""
    shapes = set()
    for product in (W4A4, W4A16):
        product = replace(product, n=2112, k=576)
        for kernel in nvfp4_linear_spec(product, B200).launches:
            shapes |= {arg.shape for arg in kernel.args if arg.name == "weight_scale"}
    assert shapes == {(1, 17, 9, 2, 256)}


def test_wide_tiles_have_one_accumulator_and_are_a_candidate() -> None:
    narrow, wide = block_scaled_many(W4A4, B200).forms
    numbers = [dict(form.params) for form in (narrow, wide)]
    assert [n["BLOCK_N"] for n in numbers] == [128, 256]
    assert [n["single_accumulator"] for n in numbers] == [False, True]
    assert evaluate(wide.tiles, {"T": 129}) == 2 * 16
    assert evaluate(wide.iterations, {"T": 129}) == 2 * 16 * 16
    (plain,) = block_scaled_many(W4A4, CONSUMER).forms
    assert dict(plain.params)["warp_specialize"] is False and plain.num_warps == 8


@pytest.mark.parametrize(
    ("product", "target", "reason"),
    [
        (W4A4, H100, "sm_90 has no FP4 tensor core; weight-only products serve: keep x in bf16"),
        (
            replace(W4A4, k=144),
            B200,
            "K must be a multiple of 64, .* got 144; dequantise the weights to bf16",
        ),
        (replace(W4A16, k=96), H100, "K must be a multiple of 64, .* got 96"),
        (replace(W4A4, n=257), B200, r"rows of y of a multiple of 16 bytes, got n 257 \(514 bytes\)"),
        (W4A16, replace(B200, arch=80), "TMA needs sm_90 or newer, b200 is sm_80"),
        (replace(W4A16, row_scale=True), B200, "only rows of quantised x have outer scales"),
    ],
)
def test_refusals_say_what_serves(product: Nvfp4Product, target: Target, reason: str) -> None:
    assert re.search(reason, nvfp4_refusal(product, target) or "")


def test_what_is_not_refused() -> None:
    for target in (B200, CONSUMER):
        assert nvfp4_refusal(W4A4, target) is None
    assert nvfp4_refusal(replace(W4A16, n=257), H100) is None
    fp8 = Product("T", 264, 400, "fp8", "bf16", bias=False, alpha="scalar")
    assert tma_refusal(fp8, H100) is None
    assert "got k 104 (104 bytes)" in (tma_refusal(replace(fp8, k=104), H100) or "")


def test_fp8_tiles_are_twice_as_deep_as_bf16_ones() -> None:
    fp8 = Product("T", 4096, 4096, "fp8", "bf16", bias=True, alpha="column", row_scale=True)
    for rows in (1, 64, 65):
        (narrow,) = launched(linear_tma_spec(fp8, B200), rows)
        (wide,) = launched(linear_tma_spec(replace(fp8, dtype="bf16", alpha="", row_scale=False), B200), rows)
        assert int(dict(narrow.params)["BLOCK_K"]) == 2 * int(dict(wide.params)["BLOCK_K"])
        names = [(arg.name, arg.dtype) for arg in narrow.args if arg.kind == "pointer" and arg.name != "out"]
        assert names == [("alpha", "fp32"), ("row_scale", "fp32"), ("bias", "bf16")]


def test_every_corner_is_built_or_refused_on_every_target() -> None:
    assert len({corner.name for corner in CORNERS}) == len(CORNERS)
    for corner in CORNERS:
        for target in (B200, H100, CONSUMER):
            reason = corner.refuse(target)
            assert reason is None or "serve" in reason, f"{corner.name}: {reason}"
            assert reason is None or target is H100
            assert reason is not None or corner.make(target).launches


def test_products_show_their_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    few, _, _, many = nvfp4_linear_spec(replace(W4A4, alpha="column"), B200).launches
    fp8 = Product("T", 4096, 4096, "fp8", "bf16", bias=False, alpha="column", row_scale=True)
    (many_fp8,) = launched(linear_tma_spec(fp8, B200), 65)
    kernels = build_kernels([few, *(form.forms[1] for form in (many, many_fp8))], B200)
    assert all(kernel.metadata["choice"]["refused"] == [] for kernel in kernels)
    opcodes = [" ".join(kernel.metadata["evidence"]["census"]) for kernel in kernels]
    assert all("UTCOMMA.4X" in opcodes[i] and "UTCCP" in opcodes[i] for i in (0, 1))
    assert "UTCQMMA" in opcodes[2]
    # the scales of x arrive ahead of their use
    assert "LDGSTS" in opcodes[0]
