"""Writes to pages of FP8 and NVFP4, byte for byte what the plain writes leave, quantised."""

from collections.abc import Callable
from dataclasses import replace

import nvfp4
import pytest
import torch
from torch import Tensor
from triton_interpreter import poisoned

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.kv_quantize_triton import (
    kv_write_quantize_spec,
    latent_write_quantize_spec,
    rope_kv_write_quantize_spec,
)
from octavo.codegen.specs_triton import Heads, kv_write_spec, rope_kv_write_spec
from octavo.compiler.target import load_target

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
B200 = load_target("b200")
TARGETS = {"hardware": B200, "portable": replace(B200, arch=90)}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# of pages of 16: the last token of a page, the first of the next but one, one that is not kept, page 1
SLOTS = torch.tensor([15, 32, -1, 18])
NUM_PAGES, PAGE_SIZE = 4, 16
MULTIPLIERS = {"k": 0.0123, "v": 3.3}
HEADS = [Heads(6, 3, 80, 48, PAGE_SIZE), Heads(8, 1, 96, 32, PAGE_SIZE)]


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


def pages_of(heads: Heads, pages: str) -> dict[str, Tensor]:
    """Poisoned caches by argument name, and the multipliers."""
    held = {"multipliers": torch.tensor(list(MULTIPLIERS.values()))}
    for name, size in (("k", heads.head_dim), ("v", heads.value_dim)):
        shape = [NUM_PAGES, heads.num_kv_heads, PAGE_SIZE]
        if pages == "nvfp4":
            held[f"{name}_cache"] = poisoned([*shape, size // 2], "u8")
            held[f"{name}_scales"] = poisoned([*shape, size // 16], "fp8")
        else:
            held[f"{name}_cache"] = poisoned([*shape, size], "fp8")
    return held


def check(pages: str, held: dict[str, Tensor], plain: dict[str, Tensor]) -> None:
    """Rows that the plain write left are quantised by the book, all others as they were."""
    for name, multiplier in MULTIPLIERS.items():
        rows = plain[f"{name}_cache"].flatten(0, 2)
        is_written = ~rows.isnan().all(-1)
        assert int(is_written.sum()) == 3 * plain[f"{name}_cache"].shape[1]
        if pages == "nvfp4":
            codes, scales = nvfp4.quantize(rows[is_written].float(), float(torch.tensor(multiplier)))
            parts = {f"{name}_cache": codes, f"{name}_scales": scales}
        else:
            wide = rows[is_written].float() / torch.tensor(multiplier)
            parts = {f"{name}_cache": wide.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)}
        for cache, wanted in parts.items():
            got = as_bytes(held[cache].flatten(0, 2))
            assert torch.equal(got[is_written], as_bytes(wanted)), cache
            assert (got[~is_written] == 0xFF).all(), cache


def plain_caches(heads: Heads, dtype: torch.dtype) -> dict[str, Tensor]:
    sizes = {"k_cache": heads.head_dim, "v_cache": heads.value_dim}
    shape = (NUM_PAGES, heads.num_kv_heads, PAGE_SIZE)
    return {name: torch.full((*shape, size), float("nan"), dtype=dtype) for name, size in sizes.items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("pages", ["fp8", "nvfp4"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.label)
def test_keys_and_values(launch: Launch, target: str, pages: str, heads: Heads) -> None:
    dtype = "fp32" if target == "portable" else "bf16"
    k, v = (
        (torch.randn(4, heads.num_kv_heads, size) * torch.logspace(-3, 2, 4)[:, None, None]).to(DTYPES[dtype])
        for size in (heads.head_dim, heads.value_dim)
    )
    k[0, 0, :16] = 0.0
    k[2], v[2] = float("nan"), float("inf")  # of the token that is not kept
    plain, held = plain_caches(heads, k.dtype), pages_of(heads, pages)
    inputs = {"k": k, "v": v, "slot_mapping": SLOTS}
    launch(kv_write_spec("T", heads, dtype), inputs | plain, {"T": 4})
    launch(kv_write_quantize_spec("T", heads, dtype, pages, TARGETS[target]), inputs | held, {"T": 4})
    check(pages, held, plain)


@pytest.mark.parametrize("pages", ["fp8", "nvfp4"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: heads.label)
def test_rotated_keys(launch: Launch, pages: str, interleaved: bool, heads: Heads) -> None:
    kv_width = heads.num_kv_heads * (heads.head_dim + heads.value_dim)
    qkv = torch.randn(4, heads.num_heads * heads.head_dim + kv_width).bfloat16()
    inputs = {
        "qkv": qkv, "cos_table": torch.randn(30, 16).bfloat16(), "sin_table": torch.randn(30, 16).bfloat16(),
        "positions": torch.tensor([7, 8, 29, 0]), "slot_mapping": SLOTS,
    }  # fmt: skip
    plain, held = plain_caches(heads, qkv.dtype), pages_of(heads, pages)
    q = [torch.full((4, heads.num_heads, heads.head_dim), float("nan"), dtype=qkv.dtype) for _ in range(2)]
    spec = rope_kv_write_spec("T", heads, 16, "bf16", interleaved)
    launch(spec, inputs | plain | {"out": q[0]}, {"T": 4})
    fused = rope_kv_write_quantize_spec("T", heads, 16, "bf16", interleaved, pages, B200)
    launch(fused, inputs | held | {"out": q[1]}, {"T": 4})
    assert torch.equal(q[0], q[1])
    check(pages, held, plain)


def test_what_is_not_finite_stays_in_its_row_of_a_page(launch: Launch) -> None:
    heads = Heads(2, 2, 32, 32, PAGE_SIZE)
    k = torch.ones(2, 2, 32)
    k[0, 1, 3] = float("nan")
    slots = {"k": k, "v": torch.ones(2, 2, 32), "slot_mapping": torch.tensor([4, 5])}
    for pages in ("fp8", "nvfp4"):
        held = pages_of(heads, pages)
        launch(kv_write_quantize_spec("T", heads, "fp32", pages, B200), slots | held, {"T": 2})
        seen = held["k_scales" if pages == "nvfp4" else "k_cache"][0, :, 4:6].float()
        assert seen.isnan().sum() == 1 and seen[1, 0, 0 if pages == "nvfp4" else 3].isnan()


@pytest.mark.parametrize(("rank", "rope_dim", "dtype"), [(512, 64, "bf16"), (40, 12, "fp32")])
def test_latents(launch: Launch, rank: int, rope_dim: int, dtype: str) -> None:
    latent, k_rope = (torch.randn(4, size).to(DTYPES[dtype]) * 3 for size in (rank, rope_dim))
    latent[0, :3] = torch.tensor([1e4, -1e4, 0.0])
    latent[2] = float("nan")
    multiplier = torch.tensor([0.011])
    cache = poisoned([3, PAGE_SIZE, rank + rope_dim], "fp8")
    tensors = {
        "latent": latent,
        "k_rope": k_rope,
        "multiplier": multiplier,
        "cache": cache,
        "slot_mapping": SLOTS,
    }
    launch(latent_write_quantize_spec(rank, rope_dim, dtype), tensors, {"T": 4})
    wanted = poisoned([3 * PAGE_SIZE, rank + rope_dim], "fp8")
    kept = torch.tensor([0, 1, 3])
    rows = torch.cat((latent, k_rope), 1)[kept].float() / multiplier
    as_bytes(wanted)[SLOTS[kept]] = as_bytes(rows.clamp(-448.0, 448.0).to(torch.float8_e4m3fn))
    assert torch.equal(as_bytes(cache).flatten(0, 1), as_bytes(wanted))
