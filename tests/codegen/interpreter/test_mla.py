"""Latent attention's kernels in Triton's interpreter, against the dialect's reference in fp64.

Pages that no request owns and rows past a request's length hold nan, so that one read of them shows.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_interpreter import poisoned

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.mla import HeadProduct, Latents
from octavo.codegen.mla_fp8_triton import mla_fp8_spec, queries_spec
from octavo.codegen.mla_triton import head_linear_spec, latent_write_spec, mla_spec
from octavo.compiler.ops.mla import head_linear, latent_write, paged_mla_attention
from octavo.compiler.target import Target, load_target

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TARGET = load_target("b200")
MLA, COMBINE = "triton/paged_mla_attention.py.jinja", "triton/paged_attention_combine.py.jinja"
PLAIN = Latents(4, 32, 16, 64, "bf16", "bf16", 0.2)
VARIANTS = {
    "plain": PLAIN,
    "window": replace(PLAIN, window=20),
    "softcap": replace(PLAIN, softcap=3.0),
    "both_fp32": replace(PLAIN, dtype="fp32", cache_dtype="fp32", window=9, softcap=2.0),
    "pages_of_16": replace(PLAIN, page_size=16),
    "odd_sizes": replace(PLAIN, heads=5, rank=24, rope_dim=12),
    "two_tiles_of_heads": replace(PLAIN, heads=70),
    "deepseek_v3": Latents(128, 512, 64, 64, "bf16", "bf16", 192**-0.5),
}


def run(launch: Launch, latents: Latents, lengths: list[tuple[int, int]]) -> tuple[list[str], Tensor, Tensor]:
    """lengths holds (new tokens, context with them) per request; the templates, the result, its reference."""
    dtype, size = DTYPES[latents.dtype], latents.page_size
    generator = torch.Generator().manual_seed(sum(map(sum, lengths)))
    used = [-(-context // size) for _, context in lengths]
    pages = 1 + torch.randperm(sum(used) + 2, generator=generator)
    table = torch.zeros(len(lengths), max(used), dtype=torch.int32)
    cache = torch.full((len(pages) + 1, 1, size, latents.width), float("nan"), dtype=dtype)
    for request, (_, context) in enumerate(lengths):
        owned, pages = pages[: used[request]], pages[used[request] :]
        table[request, : used[request]] = owned
        for i, page in enumerate(owned.tolist()):
            rows = min(size, context - i * size)
            cache[page, 0, :rows] = torch.randn((rows, latents.width), generator=generator).to(dtype)
    tokens = sum(new for new, _ in lengths)
    q_latent, q_rope = (
        torch.randn(1, tokens, latents.heads, width, generator=generator).to(dtype)
        for width in (latents.rank, latents.rope_dim)
    )
    seq_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).to(torch.int32)
    out = torch.full((tokens, latents.heads, latents.rank), float("nan"), dtype=dtype)
    tensors = {
        "q_latent": q_latent[0], "q_rope": q_rope[0], "cache": cache, "page_table": table, "seq_lens": seq_lens,
        "cu_seqlens_q": starts, "out": out,
    }  # fmt: skip
    ran = launch(mla_spec(latents, TARGET), tensors, {"T": tokens, "R": len(lengths), "P": table.shape[1]})
    expected = paged_mla_attention(
        q_latent.double(), q_rope.double(), cache.double(), table, seq_lens, starts, latents.scale, latents.window,
        latents.softcap,
    )  # fmt: skip
    return ran, out, expected[0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode(launch: Launch, assert_rounds_to: Check, variant: str) -> None:
    contexts = (1, 65) if variant == "deepseek_v3" else (1, 63, 64, 65, 150)
    ran, out, expected = run(launch, VARIANTS[variant], [(1, context) for context in contexts])
    assert ran == [MLA, COMBINE]
    assert_rounds_to(out, expected, sums=0.5)


def test_decode_of_one_request_in_many_parts(launch: Launch, assert_rounds_to: Check) -> None:
    ran, out, expected = run(launch, replace(PLAIN, page_size=16), [(1, 700)])
    assert ran == [MLA, COMBINE]
    assert_rounds_to(out, expected, sums=0.5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill(launch: Launch, assert_rounds_to: Check, variant: str) -> None:
    """A fresh prompt, a chunk that ends with its page, a decode among them, a chunk deep in a context."""
    lengths = [(3, 3), (1, 65)] if variant == "deepseek_v3" else [(17, 17), (30, 64), (1, 65), (3, 130)]
    ran, out, expected = run(launch, VARIANTS[variant], lengths)
    assert ran == [MLA]
    assert_rounds_to(out, expected, sums=0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [5, 20])
def test_a_product_for_each_head(launch: Launch, assert_rounds_to: Check, dtype: str, tokens: int) -> None:
    x, weight = torch.randn(1, tokens, 3, 72).to(DTYPES[dtype]), torch.randn(3, 100, 72).to(DTYPES[dtype])
    out = torch.full((tokens, 3, 100), float("nan"), dtype=DTYPES[dtype])
    spec = head_linear_spec(HeadProduct(3, 100, 72, dtype, dtype))
    ran = launch(spec, {"x": x[0], "weight": weight, "out": out}, {"T": tokens})
    assert ran == ["triton/head_linear.py.jinja"]
    assert_rounds_to(out, head_linear(x.double(), weight.double())[0], sums=0.1)


def test_a_product_for_each_head_may_be_the_logits(launch: Launch, assert_rounds_to: Check) -> None:
    x, weight = torch.randn(1, 5, 3, 40).bfloat16(), torch.randn(3, 20, 40).bfloat16()
    out = torch.full((5, 3, 20), float("nan"))
    launch(
        head_linear_spec(HeadProduct(3, 20, 40, "bf16", "fp32", "L")),
        {"x": x[0], "weight": weight, "out": out},
        {"T": 99, "L": 5},
    )
    assert_rounds_to(out, head_linear(x.double(), weight.double())[0], sums=0.1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_written_next_to_each_other(launch: Launch, dtype: str) -> None:
    latent, k_rope = torch.randn(1, 4, 24).to(DTYPES[dtype]), torch.randn(1, 4, 12).to(DTYPES[dtype])
    slots = torch.tensor([9, -1, 0, 5])
    caches = [torch.full((3, 1, 4, 36), 7.0, dtype=DTYPES[dtype]) for _ in range(2)]
    tensors = {"latent": latent[0], "k_rope": k_rope[0], "cache": caches[0], "slot_mapping": slots}
    launch(latent_write_spec(24, 12, dtype), tensors, {"T": 4})
    latent_write(latent, k_rope, caches[1], slots)
    assert torch.equal(caches[0], caches[1])


RTX = load_target("rtx_pro_6000")
E4M3 = torch.float8_e4m3fn
FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16}
QUERIES, MLA_FP8 = "triton/latent_queries_fp8.py.jinja", "triton/paged_mla_fp8.py.jinja"
WIDE = Latents(64, 32, 16, 64, "bf16", "fp8", 0.2)
FP8_VARIANTS = {
    "native": WIDE,
    "native_halves": replace(WIDE, heads=128),
    "native_gathered": replace(WIDE, page_size=16, softcap=3.0),
    "native_odd": replace(WIDE, heads=70, rank=24, rope_dim=12),
    "fp16": replace(WIDE, heads=16, window=20),
    "fp16_odd": replace(WIDE, heads=5, rank=24, rope_dim=12, page_size=32, dtype="fp16"),
}


def codes_of(q: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes and a multiplier for each row."""
    amax = q.float().abs().amax(-1, keepdim=True)
    scale = torch.where(amax > 0, amax / 448, 1.0)
    return (q.float() / scale).to(E4M3), scale


def run_fp8(
    launch: Launch, latents: Latents, lengths: list[tuple[int, int]], target: Target = TARGET
) -> tuple[list[str], Tensor, Tensor]:
    """lengths holds (new tokens, context with them) per request; the templates, the result, its reference."""
    dtype, size, cache_scale = FLOATS[latents.dtype], latents.page_size, 0.03
    used = [-(-context // size) for _, context in lengths]
    pages = 1 + torch.randperm(sum(used) + 2)
    table = torch.zeros(len(lengths), max(used), dtype=torch.int32)
    cache = torch.full((len(pages) + 1, 1, size, latents.width), float("nan"))
    for request, (_, context) in enumerate(lengths):
        owned, pages = pages[: used[request]], pages[used[request] :]
        table[request, : used[request]] = owned
        for i, page in enumerate(owned.tolist()):
            rows = min(size, context - i * size)
            cache[page, 0, :rows] = torch.randn(rows, latents.width) / cache_scale
    codes = cache.to(E4M3)
    tokens = sum(new for new, _ in lengths)
    q = torch.randn(tokens, latents.heads, latents.width).to(dtype)
    seq_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).to(torch.int32)
    out = torch.full((tokens, latents.heads, latents.rank), float("nan"), dtype=dtype)
    tensors = {
        "q_latent": q[..., : latents.rank].contiguous(), "q_rope": q[..., latents.rank :].contiguous(), "cache": codes,
        "multiplier": torch.tensor([cache_scale]), "page_table": table, "seq_lens": seq_lens, "cu_seqlens_q": starts,
        "out": out,
    }  # fmt: skip
    spec = mla_fp8_spec(latents, target)
    dims = {"T": tokens, "R": len(lengths), "P": table.shape[1], "num_pages": len(cache)}
    ran = launch(spec, tensors, dims)
    wide = q.double()
    if QUERIES in ran:
        quantised, scale = codes_of(q)
        wide = quantised.double() * scale.double()
    expected = paged_mla_attention(
        wide[None, ..., : latents.rank], wide[None, ..., latents.rank :], codes.double() * cache_scale, table, seq_lens,
        starts, latents.scale, latents.window, latents.softcap,
    )  # fmt: skip
    return ran, out, expected[0]


def assert_near(out: Tensor, expected: Tensor, ran: list[str]) -> None:
    """FP8 weights are off by 2^-4 of themselves at most, fp16 ones by 2^-11; many of them make up a sum."""
    assert not out.isnan().any()
    error = float((out.double() - expected).abs().max() / expected.abs().max())
    assert error < (0.04 if QUERIES in ran else 0.004), error


@pytest.mark.parametrize("variant", FP8_VARIANTS)
def test_decode_of_fp8_pages(launch: Launch, variant: str) -> None:
    # a program of the joining kernel for each request and head: few of many heads
    contexts = (129,) if FP8_VARIANTS[variant].heads > 16 else (1, 65, 129)
    ran, out, expected = run_fp8(launch, FP8_VARIANTS[variant], [(1, context) for context in contexts])
    assert [name for name in ran if name != QUERIES] == [MLA_FP8, COMBINE]
    assert (QUERIES in ran) == variant.startswith("native")
    assert_near(out, expected, ran)


@pytest.mark.parametrize("variant", FP8_VARIANTS)
def test_prefill_over_fp8_pages(launch: Launch, variant: str) -> None:
    ran, out, expected = run_fp8(launch, FP8_VARIANTS[variant], [(3, 3), (1, 65)])
    assert [name for name in ran if name != QUERIES] == [MLA_FP8]
    assert_near(out, expected, ran)


def test_small_shared_memory_takes_16_rows(launch: Launch) -> None:
    for new, launches in ((1, [MLA_FP8, COMBINE]), (3, [MLA_FP8])):
        ran, out, expected = run_fp8(launch, replace(WIDE, heads=20), [(new, 70)], RTX)
        assert ran == launches
        assert_near(out, expected, ran)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_queries_are_rounded_row_by_row(launch: Launch, dtype: str) -> None:
    latents = Latents(7, 24, 12, 64, dtype, "fp8", 1.0)
    q = (torch.randn(3, 7, 36) * torch.logspace(-3, 3, 7)[None, :, None]).to(FLOATS[dtype])
    q[1, 2] = 0.0
    q[0, 0] = torch.where(torch.arange(36) == 35, 448.0, 0.0)
    tensors = {
        "q_latent": q[..., :24].contiguous(), "q_rope": q[..., 24:].contiguous(), "q": poisoned([3, 7, 36], "fp8"),
        "q_scale": poisoned([3, 7], "fp32"),
    }  # fmt: skip
    spec = replace(queries_spec(latents), scratch=())
    launch(spec, tensors, {"T": 3})
    codes, scale = codes_of(q)
    assert torch.equal(tensors["q"].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(tensors["q_scale"], scale[..., 0])


@pytest.mark.slow
@pytest.mark.parametrize("variant", FP8_VARIANTS)
@pytest.mark.parametrize("context", [1, 2, 63, 64, 127, 128, 700])
def test_fp8_pages_of_every_length(launch: Launch, variant: str, context: int) -> None:
    for new in {1, min(context, 5)}:
        ran, out, expected = run_fp8(launch, FP8_VARIANTS[variant], [(1, 65), (new, context), (1, 1)])
        assert_near(out, expected, ran)
