"""Paged attention: a step of one token per request, and any other, against the dialect's reference in fp64.

Pages that no request owns and rows past a request's length hold nan, so that one read of them shows.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from octavo.codegen.attention_triton import Attention, attention_spec
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.specs_triton import Heads
from octavo.compiler.ops.paging import paged_attention
from octavo.compiler.target import load_target

Launch = Callable[[KernelSpec, dict[str, torch.Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
TARGET = load_target("b200")
DECODE = ["triton/paged_attention_decode.py.jinja", "triton/paged_attention_combine.py.jinja"]
PREFILL = ["triton/paged_attention_prefill.py.jinja"]
PLAIN = Attention(Heads(9, 3, 64, 64, 64), "bf16", 0.125)


def with_heads(attention: Attention, *heads: int) -> Attention:
    return replace(attention, heads=Heads(*heads), scale=heads[2] ** -0.5)


def run(
    launch: Launch, attention: Attention, lengths: list[tuple[int, int]]
) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """lengths holds (new tokens, context with them) per request; the templates, the result, its reference."""
    heads, dtype = attention.heads, DTYPES[attention.dtype]
    generator = torch.Generator().manual_seed(sum(map(sum, lengths)))
    used = [-(-context // heads.page_size) for _, context in lengths]
    pages = 1 + torch.randperm(sum(used) + 2, generator=generator)
    table = torch.zeros(len(lengths), max(used), dtype=torch.int32)
    caches = [
        torch.full((len(pages) + 1, heads.num_kv_heads, heads.page_size, size), float("nan"), dtype=dtype)
        for size in (heads.head_dim, heads.value_dim)
    ]
    for request, (_, context) in enumerate(lengths):
        owned, pages = pages[: used[request]], pages[used[request] :]
        table[request, : used[request]] = owned
        for cache in caches:
            for i, page in enumerate(owned.tolist()):
                rows = min(heads.page_size, context - i * heads.page_size)
                shape = (heads.num_kv_heads, rows, cache.shape[3])
                cache[page, :, :rows] = torch.randn(shape, generator=generator).to(dtype)
    tokens = sum(new for new, _ in lengths)
    q = (2 * torch.randn(1, tokens, heads.num_heads, heads.head_dim, generator=generator)).to(dtype)
    sinks = torch.randn(heads.num_heads, generator=generator).to(dtype)
    slopes = 0.5 ** (1.0 + torch.arange(heads.num_heads))
    seq_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).to(torch.int32)
    out = torch.full((tokens, heads.num_heads, heads.value_dim), float("nan"), dtype=dtype)
    tensors = {
        "q": q[0], "k_cache": caches[0], "v_cache": caches[1], "page_table": table, "seq_lens": seq_lens,
        "cu_seqlens_q": starts, "sinks": sinks, "slopes": slopes, "out": out,
    }  # fmt: skip
    dims = {"T": tokens, "R": len(lengths), "P": table.shape[1], "num_pages": len(caches[0])}
    ran = launch(attention_spec(attention, TARGET), tensors, dims)
    expected = paged_attention(
        q.double(), caches[0].double(), caches[1].double(), table, seq_lens, starts,
        sinks.double() if attention.sinks else None, attention.scale, attention.window, attention.softcap,
        slopes if attention.slopes else None,
    )  # fmt: skip
    return ran, out, expected[0]


# one kv head: what varies here is the same for each
SMALL = with_heads(PLAIN, 3, 1, 64, 64, 64)
VARIANTS = {
    "plain": PLAIN,
    "window": replace(SMALL, window=20),
    "window_of_a_tile": replace(SMALL, window=64),
    "softcap": replace(SMALL, softcap=3.0),
    "sinks": replace(PLAIN, sinks=True),
    "slopes": replace(PLAIN, slopes=True),
    "all": replace(SMALL, window=70, softcap=5.0, sinks=True, slopes=True),
    "fp32": replace(SMALL, dtype="fp32"),
    "fp32_all": replace(SMALL, dtype="fp32", window=9, softcap=2.0, sinks=True),
    "pages_of_16": with_heads(SMALL, 6, 2, 64, 64, 16),
    "pages_of_32": with_heads(SMALL, 3, 1, 64, 64, 32),
    "pages_of_128": with_heads(SMALL, 3, 1, 64, 64, 128),
    "one_to_one": with_heads(SMALL, 2, 2, 64, 64, 64),
    "one_kv_head": with_heads(SMALL, 20, 1, 64, 64, 64),
    "group_of_4": with_heads(SMALL, 8, 2, 128, 128, 64),
    "odd_head_sizes": with_heads(SMALL, 4, 2, 80, 48, 64),
    "wide_heads": with_heads(SMALL, 2, 1, 256, 256, 64),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_decode(launch: Launch, assert_rounds_to: Check, variant: str) -> None:
    lengths = [(1, context) for context in (1, 63, 64, 65, 150)]
    ran, out, expected = run(launch, VARIANTS[variant], lengths)
    assert ran == DECODE
    assert_rounds_to(out, expected, sums=0.5)


def test_decode_of_one_request_in_many_parts(launch: Launch, assert_rounds_to: Check) -> None:
    ran, out, expected = run(launch, with_heads(PLAIN, 2, 1, 64, 64, 16), [(1, 700)])
    assert ran == DECODE
    assert_rounds_to(out, expected, sums=0.5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_prefill(launch: Launch, assert_rounds_to: Check, variant: str) -> None:
    """A fresh prompt, a chunk that ends with its page, a decode among them, a chunk deep in a context."""
    ran, out, expected = run(launch, VARIANTS[variant], [(17, 17), (30, 64), (1, 65), (3, 130)])
    assert ran == PREFILL
    assert_rounds_to(out, expected, sums=0.5)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("new", [42, 64, 130])
def test_prefill_of_several_tiles(launch: Launch, assert_rounds_to: Check, new: int, window: int) -> None:
    """With the window, a tile starts with keys that only its first rows see."""
    lengths = [(2, 2), (new, new + 5), (new, new)]
    ran, out, expected = run(launch, replace(SMALL, window=window), lengths)
    assert ran == PREFILL
    assert_rounds_to(out, expected, sums=0.5)


def test_prefill_of_one_request(launch: Launch, assert_rounds_to: Check) -> None:
    ran, out, expected = run(launch, PLAIN, [(5, 70)])
    assert ran == PREFILL
    assert_rounds_to(out, expected, sums=0.5)
