"""Numbers of the kernels that quantise, what they refuse, and what their machine code shows."""

from pathlib import Path

import pytest

from octavo.codegen import kv_quantize_triton, norm_quantize_triton, quantize_triton, row_corners
from octavo.codegen.build_triton import build_kernels
from octavo.codegen.catalogue import CORNERS
from octavo.codegen.evidence import evidence_row
from octavo.codegen.gates import base_opcodes
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.kv_quantize_triton import kv_write_quantize_spec
from octavo.codegen.norm_quantize_triton import act_mul_quantize_spec, rms_norm_quantize_spec
from octavo.codegen.quantize_triton import (
    FORMATS,
    Quantization,
    dequantize_spec,
    quantize_nvfp4_spec,
    scale_bytes,
)
from octavo.codegen.specs_triton import Heads
from octavo.compiler.expression import evaluate
from octavo.compiler.target import load_target

B200, H100 = load_target("b200"), load_target("h100")
NVFP4, NVFP4_TOKEN, FP8, FP8_TOKEN = FORMATS
LLAMA = Heads(32, 8, 128, 128, 64)


def names(spec: KernelSpec) -> list[str]:
    return [arg.name for arg in spec.args]


def dtypes(spec: KernelSpec) -> dict[str, str]:
    return {arg.name: arg.dtype for arg in spec.args}


def test_results_come_in_one_order() -> None:
    spec = rms_norm_quantize_spec("T", 4096, "bf16", 1e-5, 0.0, True, NVFP4_TOKEN, B200, keep=True)
    assert names(spec) == ["x", "residual", "weight", "out_2", "out_0", "out_1", "out_3", "out_4"]
    kinds = dtypes(spec)
    assert [kinds[f"out_{i}"] for i in range(5)] == ["u8", "fp8", "fp32", "bf16", "bf16"]
    given = rms_norm_quantize_spec("T", 4096, "bf16", 1e-5, 0.0, False, FP8, B200)
    assert names(given) == ["x", "weight", "outer", "out"]


@pytest.mark.parametrize(
    ("spec", "row_bytes"),
    [
        (quantize_nvfp4_spec("T", 4096, "bf16", B200), 2 * 4096 + 2048 + 256),
        (act_mul_quantize_spec("T", 4096, "bf16", "silu", FP8_TOKEN, B200), 4 * 4096 + 4096 + 4),
        (dequantize_spec("T", 4096, "bf16", NVFP4_TOKEN, B200), 2 * 4096 + 2048 + 256 + 4),
        (kv_write_quantize_spec("T", LLAMA, "bf16", "nvfp4", B200), 2048 * 2 + 1024 + 128 + 8),
        (kv_write_quantize_spec("T", LLAMA, "bf16", "fp8", B200), 2048 * 3 + 8),
    ],
    ids=lambda value: value.label if isinstance(value, KernelSpec) else None,
)
def test_bytes_are_those_that_the_equation_moves(spec: KernelSpec, row_bytes: int) -> None:
    assert evaluate(spec.bytes, {"T": 10}) == 10 * row_bytes


def test_a_norm_saves_the_bytes_of_a_row_that_is_not_kept() -> None:
    kept, not_kept = (
        rms_norm_quantize_spec("T", 4096, "bf16", 1e-5, 0.0, True, NVFP4, B200, keep)
        for keep in (True, False)
    )
    assert evaluate(kept.bytes, {"T": 3}) - evaluate(not_kept.bytes, {"T": 3}) == 3 * 8192
    assert evaluate(not_kept.bytes, {"T": 3}) == 3 * (3 * 8192 + 2048 + 256) + 8192


def test_grids_cover_the_last_row_and_column() -> None:
    spec = quantize_nvfp4_spec("T", 144, "bf16", B200)
    assert [evaluate(size, {"T": 33}) for size in spec.grid] == [3, 2, 1]
    assert evaluate(scale_bytes("T", 144), {"T": 129}) == 2 * 3 * 512
    wide = act_mul_quantize_spec("T", 18432, "bf16", "silu", NVFP4_TOKEN, B200)
    assert evaluate(wide.iterations, {"T": 5}) == 5 * 2 * 3
    assert act_mul_quantize_spec("T", 8192, "bf16", "silu", NVFP4_TOKEN, B200).iterations == ""


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 16 elements, got 100"):
        rms_norm_quantize_spec("T", 100, "bf16", 1e-5, 0.0, False, NVFP4, B200)
    with pytest.raises(ValueError, match=r"a multiple of 16 elements, got \[72\]"):
        kv_write_quantize_spec("T", Heads(8, 8, 72, 128, 64), "bf16", "nvfp4", B200)


def test_only_codes_of_nvfp4_depend_on_the_arch() -> None:
    assert [form.hardware(B200) for form in FORMATS] == [True, True, False, False]
    assert not any(form.hardware(H100) for form in FORMATS)


def test_corners_have_names_of_their_own() -> None:
    modules = (quantize_triton, norm_quantize_triton, kv_quantize_triton, row_corners)
    assert all(corner in CORNERS for module in modules for corner in module.CORNERS)
    every = [corner.name for corner in CORNERS]
    assert len(set(every)) == len(every)


def test_machine_code_converts_in_pairs_and_reads_16_bytes_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    specs = [
        rms_norm_quantize_spec("T", 4096, "bf16", 1e-5, 0.0, True, Quantization("nvfp4"), B200),
        act_mul_quantize_spec("T", 14336, "bf16", "silu", NVFP4, B200),
    ]
    for kernel in build_kernels(specs, B200):
        assert kernel.metadata["launch"]["launch_pdl"]
        census, row = kernel.metadata["evidence"]["census"], evidence_row(kernel)
        opcodes = base_opcodes(census)
        assert row["spill_bytes"] == 0
        # beside the outer scale
        assert opcodes["LDG"] == census["LDG.E.128"] + 1
        # two for codes of four, 16 elements a thread; and no conversion of one value
        assert sum(n for name, n in census.items() if "E2M1" in name) == 8
        assert "F2F" not in opcodes
        assert opcodes["SHFL"] <= 10
    portable = build_kernels([quantize_nvfp4_spec("T", 4096, "bf16", H100)], H100)[0]
    assert not any("E2M1" in name for name in portable.metadata["evidence"]["census"])
