"""Quantised mixtures of experts and experts in parallel without an interpreter: sizes, launches, refusals, builds."""

from dataclasses import replace
from pathlib import Path

import pytest

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.dispatch_triton import wire_bytes
from octavo.codegen.evidence import evidence_row
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.moe_corners import CORNERS, DEEPSEEK, LAYERS
from octavo.codegen.moe_grouped import Grouped, Places, Unit
from octavo.codegen.moe_nvfp4_triton import refuse_nvfp4, size_refusal
from octavo.codegen.moe_quantized_triton import SCHEMES, experts_spec, product_spec, products
from octavo.compiler.expression import evaluate, holds
from octavo.compiler.target import load_target

B200 = load_target("b200")


def test_bytes_of_a_row_on_the_wire() -> None:
    assert wire_bytes("nvfp4", 7168) == 4032 == 3584 + 448
    assert wire_bytes("fp8", 7168) == 7184
    assert wire_bytes("bf16", 7168) == 14336
    assert wire_bytes("nvfp4", 2880) == 1632  # 1620, in whole pieces of 16
    with pytest.raises(ValueError, match="kind must be one of nvfp4, fp8, bf16, got 'int8'"):
        wire_bytes("int8", 7168)
    with pytest.raises(ValueError, match="a multiple of 16 elements, got 100"):
        wire_bytes("nvfp4", 100)


@pytest.mark.parametrize("tile", [16, 64, 128])
@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 40, 1000])
def test_rows_suffice_for_every_routing(tokens: int, tile: int) -> None:
    """The most tiles: experts with one pair each but one, which has the others."""
    experts, top_k = 12, 3
    places, pairs = Places("T", experts, top_k, tile), tokens * top_k
    most = max((used + (pairs - used) // tile for used in range(1, min(experts, pairs) + 1)), default=0)
    bound = evaluate(places.tiles, {"T": tokens})
    assert most <= bound <= most + 1
    assert evaluate(places.rows, {"T": tokens}) == bound * tile
    assert evaluate(places.scale_tiles, {"T": tokens}) == -(-bound * tile // 128)


def launched(spec: KernelSpec, tokens: int) -> list[str]:
    kernels = [kernel for kernel in spec.launches if holds(kernel.when, {"T": tokens})]
    names = []
    for kernel in kernels:
        tile = dict(kernel.params).get("BLOCK_M", dict(kernel.params).get("TILE", ""))
        names.append(f"{kernel.template.split('/')[1].split('.')[0]} {tile}".strip())
    return names


def test_launches_of_few_and_of_many_pairs() -> None:
    spec = experts_spec(DEEPSEEK, "nvfp4", B200)
    assert launched(spec, 128) == [
        "moe_permute 16", "moe_quantize 16", "moe_nvfp4_few 16", "moe_nvfp4_few 16", "moe_combine",
    ]  # fmt: skip
    assert launched(spec, 129)[:2] == ["moe_count", "moe_permute 16"]
    assert launched(spec, 1025) == [
        "moe_count", "moe_permute 128", "moe_quantize 128", "moe_nvfp4 128", "moe_nvfp4 128", "moe_combine",
    ]  # fmt: skip
    assert launched(experts_spec(DEEPSEEK, "fp8", B200), 1025)[3:6] == [
        "moe_fp8 128", "moe_quantize 128", "moe_fp8 128",
    ]  # fmt: skip
    assert launched(experts_spec(DEEPSEEK, "weight_only", B200), 1025)[3:5] == ["moe_few 64"] * 2


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("tokens", [1, 1024, 1025, 8192])
def test_tensor_maps_lie_within_the_scratch(scheme: str, tokens: int) -> None:
    spec, dims = experts_spec(LAYERS["deepseek"], scheme, B200), {"T": tokens}
    held = {name: [evaluate(size, dims) for size in shape] for name, _, shape in spec.scratch}
    for kernel in spec.launches:
        for arg in kernel.args:
            if arg.kind == "descriptor" and arg.name in held and holds(kernel.when, dims):
                sizes = [evaluate(size, dims) for size in arg.shape]
                assert product(sizes) <= product(held[arg.name]), arg.name
                assert tokens <= 1024 or product(sizes) == product(held[arg.name]), arg.name


def product(sizes: list[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def test_costs_count_the_weights_of_experts_that_can_be_reached() -> None:
    gate_up, down = products(DEEPSEEK, DEEPSEEK.places(16), "nvfp4")
    first, second = (product_spec(one, "nvfp4", B200) for one in (gate_up, down))
    for tokens, reached in ((1, 8), (31, 248), (40, 256)):
        pairs, dims = 8 * tokens, {"T": tokens}
        weight = 4096 * 7168 * 9 // 16
        assert evaluate(first.bytes, dims) == pairs * (4032 + 1152) + reached * weight
        assert evaluate(second.bytes, dims) == pairs * (1152 + 14336) + reached * weight // 2
        assert evaluate(first.flops, dims) == pairs * 2 * 4096 * 7168
    assert evaluate(first.iterations, {"T": 1}) == 8 * 32 * 28


def test_sizes_that_do_not_fit_are_refused_with_the_numbers() -> None:
    plain = Grouped(Places("T", 2, 1, 16), "x", "w", "y", 200, 320)
    assert size_refusal(plain, "nvfp4") is None
    assert size_refusal(replace(plain, k=336), "nvfp4") == "K must be a multiple of 64 for nvfp4, got 336"
    assert size_refusal(replace(plain, n=100), "nvfp4") == "N must be a multiple of 8 for nvfp4, got 100"
    gated = replace(plain, unit=Unit())
    assert size_refusal(gated, "nvfp4") == "N must be a multiple of 128 for nvfp4, got 200"
    assert size_refusal(replace(plain, k=24), "fp8") == "K must be a multiple of 16 for fp8, got 24"


def test_hopper_is_told_what_serves_instead() -> None:
    assert refuse_nvfp4(B200) is None
    assert refuse_nvfp4(load_target("h100")) == "sm_90 has no FP4 tensor core; the weight-only kernel serves"
    refused = {corner.name for corner in CORNERS if corner.refuse(load_target("h100"))}
    assert {corner.name for corner in CORNERS if corner.name.startswith("moe nvfp4")} == refused


def test_products_of_deepseek_keep_every_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path))
    specs = []
    for tile in (128, 16):
        gate_up, _ = products(DEEPSEEK, Places("T", 256, 8, tile), "nvfp4")
        specs.append(product_spec(gate_up, "nvfp4", B200))
    for kernel in build_kernels(specs, B200):
        row = evidence_row(kernel)
        assert (row["spill_bytes"], row["refused"]) == (0, 0)
        assert "UTCOMMA" in str(row["key_opcodes"]) and "UTMALDG" in str(row["key_opcodes"])
