"""Numbers of the paged attention kernels of the Triton family: tiles, arguments, sizes of the work, refusals."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from octavo.codegen.attention_corners import CORNERS
from octavo.codegen.attention_triton import Attention, attention_spec, max_splits
from octavo.codegen.build_triton import build_kernels
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.specs_triton import Heads
from octavo.compiler.expression import evaluate, holds
from octavo.compiler.target import load_target

B200, H100, RTX = (load_target(name) for name in ("b200", "h100", "rtx_pro_6000"))
LLAMA = Attention(Heads(32, 8, 128, 128, 64), "bf16", 128**-0.5)
DECODE, FEW, COMBINE, PREFILL = "decode", "few", "combine", "prefill"


def params(spec: KernelSpec) -> dict[str, Any]:
    return dict(spec.params)


def prefill(attention: Attention, **target: Any) -> KernelSpec:
    return attention_spec(attention, replace(B200, **target) if target else B200).launches[-1]


def launched(spec: KernelSpec, **dims: int) -> list[str]:
    def kind(kernel: KernelSpec) -> str:
        stem = kernel.template.split("_")[-1].split(".")[0]
        return FEW if stem == DECODE and params(kernel)["ragged"] else stem

    return [kind(kernel) for kernel in spec.launches if holds(kernel.when, dims)]


def test_every_step_has_its_kernels() -> None:
    one, several = (attention_spec(replace(LLAMA, query_length=n), B200) for n in (1, 4))
    assert launched(one, T=3, R=3) == launched(several, T=3, R=3) == [DECODE, COMBINE]
    assert launched(one, T=4, R=3) == [PREFILL]
    assert launched(several, T=4, R=3) == launched(several, T=12, R=3) == [FEW, COMBINE]
    assert launched(several, T=13, R=3) == [PREFILL]


@pytest.mark.parametrize(
    ("attention", "block_n"),
    [
        (LLAMA, 64),
        (replace(LLAMA, pages="fp8"), 64),
        (replace(LLAMA, pages="nvfp4"), 64),
        (replace(LLAMA, heads=Heads(32, 8, 128, 128, 128)), 128),
        (replace(LLAMA, heads=Heads(8, 4, 256, 256, 32)), 32),
    ],
)
def test_pages_of_whole_tiles_come_by_tensor_maps(attention: Attention, block_n: int) -> None:
    """Of pages, rows and columns, so that rows before a page's first are zeros."""
    heads, decode = attention.heads, attention_spec(attention, B200)
    maps = [arg for arg in decode.args if arg.kind == "descriptor"]
    width = heads.head_dim // (2 if attention.pages == "nvfp4" else 1)
    assert [arg.name for arg in maps] == ["k_cache", "v_cache"]
    assert all(arg.shape == (f"num_pages * {heads.num_kv_heads}", heads.page_size, width) for arg in maps)
    assert all(arg.block == (1, block_n, width) for arg in maps)
    assert "tma_load" in decode.features


@pytest.mark.parametrize(
    "attention",
    [
        replace(LLAMA, heads=Heads(32, 8, 128, 128, 16)),  # a tile is several pages
        replace(LLAMA, heads=Heads(32, 8, 72, 72, 64), pages="fp8"),  # rows of 72 bytes
        replace(LLAMA, heads=Heads(32, 8, 80, 80, 64), pages="nvfp4"),  # rows of 40 bytes
    ],
)
def test_other_pages_come_by_pointers(attention: Attention) -> None:
    decode = attention_spec(attention, B200)
    assert all(arg.kind != "descriptor" for spec in decode.launches for arg in spec.args)
    assert "tma_load" not in decode.features


def test_prefill_is_specialised_where_it_keeps_its_registers() -> None:
    assert (
        params(prefill(LLAMA))["warp_specialize"]
        and params(prefill(replace(LLAMA, sinks=True)))["warp_specialize"]
    )
    others = (
        replace(LLAMA, window=128), replace(LLAMA, softcap=50.0), replace(LLAMA, slopes=True),
        replace(LLAMA, tree=True), replace(LLAMA, pages="fp8"), replace(LLAMA, dtype="fp32"),
        replace(LLAMA, heads=Heads(8, 4, 256, 256, 64)), replace(LLAMA, heads=Heads(32, 8, 128, 128, 16)),
    )  # fmt: skip
    assert not any(params(prefill(other))["warp_specialize"] for other in others)
    assert not any(params(attention_spec(LLAMA, t).launches[-1])["warp_specialize"] for t in (H100, RTX))
    assert "mma_16bit" in prefill(LLAMA).features


def test_rows_of_few_tokens_are_those_of_the_request() -> None:
    """Until a tile is full; a group of heads is never cut."""
    rows = {
        (query_length, heads): params(
            attention_spec(
                replace(LLAMA, heads=Heads(heads, 1, 64, 64, 64), query_length=query_length), B200
            ).also[0]
        )["BLOCK_G"]
        for query_length, heads in ((2, 1), (4, 4), (5, 4), (8, 8), (64, 8), (2, 128))
    }
    assert list(rows.values()) == [16, 16, 32, 64, 64, 128]


def test_wide_heads_have_as_many_rows_as_registers_hold() -> None:
    wide = replace(LLAMA, heads=Heads(8, 4, 256, 256, 64))
    rows = [
        params(attention_spec(replace(wide, pages=pages), target).launches[-1])["BLOCK_M"]
        for target in (B200, H100, RTX)
        for pages in ("", "fp8")
    ]
    assert rows == [128, 128, 128, 64, 64, 64]


def test_work_of_a_step() -> None:
    """4 requests of 1000 tokens: 15 whole tiles and a part of one, for each of 8 kv heads."""
    dims = {"T": 4, "R": 4, "S": 4000, "P": 16, "num_pages": 100}
    decode = attention_spec(LLAMA, B200)
    assert evaluate(decode.iterations, dims) == (62 + 4) * 8
    assert evaluate(decode.bytes, dims) == 4000 * 8 * 256 * 2 + 4 * 32 * (128 * 2 + 128 * 4)
    nvfp4 = attention_spec(replace(LLAMA, pages="nvfp4"), B200)
    assert evaluate(nvfp4.bytes, dims) - evaluate(decode.bytes, dims) == 4000 * 8 * 256 * (9 - 32) // 16
    window = attention_spec(replace(LLAMA, window=128), B200)
    assert evaluate(window.iterations, dims) == (4 * 128 // 64 + 4) * 8
    assert evaluate(window.iterations, {**dims, "S": 256}) == (256 // 64 + 4) * 8
    # 512 new tokens of one request, which see 256 of each other at the mean: 16 tiles of 32 tokens, and one to spare
    many = {"T": 512, "R": 1, "S": 1024, "P": 16, "num_pages": 100}
    assert evaluate(prefill(LLAMA).iterations, many) == 17 * (768 // 64 + 1) * 8


def test_a_window_is_not_cut_into_more_parts_than_tiles() -> None:
    assert max_splits(LLAMA, B200) == 32
    assert max_splits(replace(LLAMA, window=128), B200) == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            {"pages": "nvfp4", "heads": Heads(4, 4, 72, 72, 64)},
            r"whole blocks of 16 for NVFP4 pages, got \(72, 72\)",
        ),
        ({"tree": True, "slopes": True}, "expected no slopes beside a tree"),
        ({"tree": True, "window": 63}, "window of 64 at least beside a tree, got 63"),
        ({"pages": "int8"}, "expected pages of fp8, nvfp4 or of the dtype of q, got 'int8'"),
    ],
)
def test_what_no_kernel_takes_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replace(LLAMA, **change)


def test_corners_have_names_of_their_own() -> None:
    assert len({corner.name for corner in CORNERS}) == len(CORNERS)
    assert all(corner.make(target).launches for corner in CORNERS for target in (B200, H100, RTX))


def test_quantised_pages_are_converted_by_hardware(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To fp16 in pairs, in kernels that spill nothing and get their pages by TMA."""
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    small = replace(LLAMA, heads=Heads(8, 2, 64, 64, 64))
    specs = [
        replace(attention_spec(replace(small, pages=pages), B200), also=()) for pages in ("fp8", "nvfp4")
    ]
    for kernel, conversion in zip(build_kernels(specs, B200), ("E4M3", "E2M1"), strict=True):
        evidence, launch = kernel.metadata["evidence"], kernel.metadata["launch"]
        assert evidence["spill_bytes"] == 0 and not kernel.metadata["choice"]["refused"]
        assert any("F2FP" in opcode and conversion in opcode for opcode in evidence["census"])
        assert [p["box"] for p in launch["parameters"] if p["kind"] == "descriptor"] == [
            [1, 64, 64 if conversion == "E4M3" else 32]
        ] * 2
