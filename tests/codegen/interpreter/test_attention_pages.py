"""Paged attention over FP8, NVFP4 and plain pages, with several tokens of a request, trees and empty requests.

The oracle is a softmax in fp64 over gathered keys. Pages that no request owns, rows past a request's length and
their scales hold nan, and entries of the page table past a request name no page.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from nvfp4 import any_codes, dequantize
from torch import Tensor

from octavo.codegen.attention_triton import Attention, Form, attention_spec, combine_spec, split_spec
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.specs_triton import Heads
from octavo.compiler.target import load_target

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
B200, H100 = load_target("b200"), load_target("h100")
SPLIT = ["triton/paged_attention_decode.py.jinja", "triton/paged_attention_combine.py.jinja"]
WHOLE = ["triton/paged_attention_prefill.py.jinja"]
NO_PAGE = 1 << 20
FP16_MAX = 65504.0


@dataclass
class Step:
    """What a step gives a kernel, and what its tokens should get."""

    tensors: dict[str, Tensor]
    dims: dict[str, int]
    expected: Tensor


def attention(
    heads: int,
    kv_heads: int,
    pages: str = "",
    dtype: str = "bf16",
    page_size: int = 64,
    dim: int = 32,
    **rest: Any,
) -> Attention:
    return Attention(Heads(heads, kv_heads, dim, dim, page_size), dtype, dim**-0.5, pages=pages, **rest)


def filled(shape: tuple[int, ...], pages: str, generator: torch.Generator) -> tuple[list[Tensor], Tensor]:
    """Contents of a cache as a kernel reads them, and their fp64 values without the multiplier."""
    count, width = math.prod(shape[:-1]), shape[-1]
    if pages == "nvfp4":
        codes, scales = any_codes(count, width, generator)
        values = dequantize(codes, scales, 1.0).view(shape)
        return [codes.view(*shape[:-1], width // 2), scales.view(*shape[:-1], width // 16)], values
    if pages == "fp8":
        cache = (torch.randn(shape, generator=generator) * 60).to(torch.float8_e4m3fn)
        return [cache], cache.double()
    cache = torch.randn(shape, generator=generator).to(torch.bfloat16)
    return [cache], cache.double()


def poison(cache: Tensor, kept: Tensor) -> None:
    """Nan, or what reads as nan, in all rows of (pages, kv_heads, page_size, width) that are not kept."""
    raw = cache if cache.dtype == torch.bfloat16 else cache.view(torch.uint8)
    nan = float("nan") if cache.dtype == torch.bfloat16 else 0xFF if cache.dtype == torch.uint8 else 0x7F
    raw[~kept[:, None, :].expand(cache.shape[:3])] = nan


def step(
    attention: Attention, lengths: list[tuple[int, int]], trees: dict[int, list[int]] | None = None
) -> Step:
    """lengths: (new tokens, context with them) per request; trees: request -> the mask of each new token."""
    heads = attention.heads
    generator = torch.Generator().manual_seed(sum(map(sum, lengths)))
    used = [-(-context // heads.page_size) for _, context in lengths]
    order = torch.randperm(sum(used) + 3, generator=generator)
    table = torch.full((len(lengths), max(*used, 1) + 1), NO_PAGE, dtype=torch.int32)
    kept = torch.zeros(len(order), heads.page_size, dtype=torch.bool)
    for request, (_, context) in enumerate(lengths):
        owned, order = order[: used[request]], order[used[request] :]
        table[request, : used[request]] = owned
        for i, page in enumerate(owned.tolist()):
            kept[page, : context - i * heads.page_size] = True
    multipliers = {"": 1.0, "fp8": 1 / 64, "nvfp4": 1 / 128}
    multiplier = torch.tensor([multipliers[attention.pages]])
    value_multiplier = 3 * multiplier if attention.pages else multiplier
    shapes = [(len(kept), heads.num_kv_heads, heads.page_size, d) for d in (heads.head_dim, heads.value_dim)]
    (keys, key_values), (values, value_values) = (filled(s, attention.pages, generator) for s in shapes)
    for cache in (*keys, *values):
        poison(cache, kept)
    tokens = sum(new for new, _ in lengths)
    tree = torch.zeros(tokens, dtype=torch.int64)
    starts = torch.tensor([0, *(new for new, _ in lengths)]).cumsum(0).to(torch.int32)
    for request, masks in (trees or {}).items():
        tree[starts[request] : starts[request + 1]] = torch.tensor(masks)
    q = (2 * torch.randn(tokens, heads.num_heads, heads.head_dim, generator=generator)).to(torch.bfloat16)
    tensors = {
        "q": q, "k_cache": keys[0], "v_cache": values[0], "k_scales": keys[-1], "v_scales": values[-1],
        "multipliers": torch.cat((multiplier, value_multiplier)), "page_table": table, "cu_seqlens_q": starts,
        "seq_lens": torch.tensor([context for _, context in lengths], dtype=torch.int32), "tree": tree,
        "sinks": torch.randn(heads.num_heads, generator=generator).to(torch.bfloat16),
        "slopes": 0.5 ** (1.0 + torch.arange(heads.num_heads)),
        "out": torch.full((tokens, heads.num_heads, heads.value_dim), float("nan"), dtype=torch.bfloat16),
    }  # fmt: skip
    dims = {"T": tokens, "R": len(lengths), "P": table.shape[1], "num_pages": len(kept)}
    cached = (key_values * multiplier, value_values * value_multiplier)
    return Step(tensors, dims, oracle(attention, lengths, tensors, cached))


def oracle(
    attention: Attention,
    lengths: list[tuple[int, int]],
    tensors: dict[str, Tensor],
    cached: tuple[Tensor, Tensor],
) -> Tensor:
    """Each query against the keys it sees, one after another, in fp64."""
    heads, expected = attention.heads, []
    for request, (new, context) in enumerate(lengths):
        place = torch.arange(context)
        page = tensors["page_table"][request, place // heads.page_size].long()
        keys, values = (cache[page, :, place % heads.page_size] for cache in cached)
        start = int(tensors["cu_seqlens_q"][request])
        masks = tensors["tree"][start : start + new].tolist()
        for i in range(new):
            ahead = [j for j in range(i + 1) if masks[i] == 0 or masks[i] >> j & 1 or not attention.tree]
            seen = [*range(context - new), *(context - new + j for j in ahead)] if context else []
            # as far in the sequence as there are ancestors; so are the keys of a branch, which is in order
            position = len(seen) - 1
            if attention.window:
                seen = seen[max(position + 1 - attention.window, 0) :]
            expected.append(attend(attention, tensors, start + i, keys[seen], values[seen]))
    return torch.stack(expected)


def attend(
    attention: Attention, tensors: dict[str, Tensor], token: int, keys: Tensor, values: Tensor
) -> Tensor:
    """One token: keys and values (n, kv_heads, width) -> (heads, value_dim)."""
    query, rows = tensors["q"][token].double(), []
    for head in range(attention.heads.num_heads):
        kv = head // attention.heads.group
        scores = keys[:, kv] @ query[head].clamp(-FP16_MAX, FP16_MAX) * attention.scale
        if attention.softcap:
            scores = attention.softcap * torch.tanh(scores / attention.softcap)
        if attention.slopes:
            scores = scores - tensors["slopes"][head].double() * torch.arange(len(keys)).flip(0)
        sink = tensors["sinks"][head].double() if attention.sinks else torch.tensor(float("-inf"))
        weights = torch.softmax(torch.cat([scores, sink.double()[None]]), 0)[:-1] if len(keys) else scores
        rows.append(weights @ values[:, kv])
    return torch.stack(rows)


def run(launch: Launch, spec: KernelSpec, given: Step) -> tuple[list[str], Tensor]:
    ran = launch(spec, given.tensors, given.dims)
    return ran, given.tensors["out"]


ENDS = [(1, context) for context in (0, 1, 64, 65)]


@pytest.mark.parametrize(("page_size", "dim"), [(16, 32), (64, 64), (128, 32)])
@pytest.mark.parametrize("pages", ["fp8", "nvfp4"])
def test_decode_of_quantised_pages(
    launch: Launch, assert_rounds_to: Check, pages: str, page_size: int, dim: int
) -> None:
    """A request of length 0 gets zeros. Scales of heads of 64 are read four at a time."""
    layer = attention(3, 1, pages=pages, page_size=page_size, dim=dim)
    given = step(layer, ENDS)
    ran, out = run(launch, attention_spec(layer, B200), given)
    assert ran == SPLIT
    assert (out[0] == 0).all()
    assert_rounds_to(out, given.expected, sums=0.5)


@pytest.mark.parametrize(("page_size", "dim"), [(32, 32), (64, 64)])
@pytest.mark.parametrize("pages", ["fp8", "nvfp4"])
def test_prefill_of_quantised_pages(
    launch: Launch, assert_rounds_to: Check, pages: str, page_size: int, dim: int
) -> None:
    layer = attention(3, 1, pages=pages, page_size=page_size, dim=dim)
    given = step(layer, [(17, 17), (0, 40), (5, 64), (1, 0), (2, 66)])
    ran, out = run(launch, attention_spec(layer, B200), given)
    assert ran == WHOLE
    assert_rounds_to(out, given.expected, sums=0.5)


@pytest.mark.parametrize("new", [1, 3])
def test_e2m1_without_the_conversions_of_blackwell(launch: Launch, assert_rounds_to: Check, new: int) -> None:
    layer = attention(2, 1, pages="nvfp4", window=20, softcap=5.0, sinks=True)
    given = step(layer, [(new, 70), (new, 64)])
    _, out = run(launch, attention_spec(layer, H100), given)
    assert_rounds_to(out, given.expected, sums=0.5)


@pytest.mark.parametrize("pages", ["fp8", "nvfp4"])
def test_queries_beyond_fp16_are_cut_to_it(launch: Launch, assert_rounds_to: Check, pages: str) -> None:
    layer = attention(1, 1, pages=pages)
    first, second = (step(layer, [(1, 40)]) for _ in range(2))
    for given, large in ((first, 1e30), (second, FP16_MAX)):
        given.tensors["q"] *= 1e-6
        given.tensors["q"][0, 0, 3] = large
        run(launch, attention_spec(layer, B200), given)
    assert torch.equal(first.tensors["out"], second.tensors["out"])
    assert first.tensors["out"].isfinite().all()


@pytest.mark.parametrize(
    "heads", [(1, 1), (4, 2), (3, 1), (8, 2), (7, 1), (8, 1), (16, 1), (17, 1), (128, 1)], ids=str
)
def test_every_group_of_heads(launch: Launch, assert_rounds_to: Check, heads: tuple[int, int]) -> None:
    layer = attention(*heads, dim=16)
    for lengths, kernels in (([(1, 65)], SPLIT), ([(2, 66)], WHOLE)):
        given = step(layer, lengths)
        ran, out = run(launch, attention_spec(layer, B200), given)
        assert ran == kernels
        assert_rounds_to(out, given.expected, sums=0.5)


FEW = {
    "plain": attention(4, 1, query_length=4),
    "one_head": attention(1, 1, query_length=8, slopes=True),
    "window": attention(3, 1, query_length=5, window=30, softcap=4.0, sinks=True),
    "fp8": attention(4, 1, query_length=4, pages="fp8", page_size=32),
    "nvfp4": attention(3, 1, query_length=4, pages="nvfp4", sinks=True),
}


@pytest.mark.parametrize("layer", FEW.values(), ids=FEW)
def test_few_tokens_of_each_request(launch: Launch, assert_rounds_to: Check, layer: Attention) -> None:
    """As many as fill a tile, more of one request than that, none, one, and all of a context.

    The first has tokens whose window starts in the second tile beside those whose window starts in the first.
    """
    for lengths in ([(4, 95), (3, 3), (0, 9), (2, 64)], [(9, 66), (1, 0), (1, 1)]):
        given = step(layer, lengths)
        ran, out = run(launch, attention_spec(layer, B200), given)
        assert ran == SPLIT
        assert_rounds_to(out, given.expected, sums=0.5)


def slide(given: Step, attention: Attention, lengths: list[tuple[int, int]]) -> int:
    """Have the null page, all zeros, for pages that slid out of every token's window, which get nan; how many did."""
    size, table = attention.heads.page_size, given.tensors["page_table"]
    owned = {int(page) for page in table.flatten() if page != NO_PAGE}
    null = next(page for page in range(given.dims["num_pages"]) if page not in owned)
    caches = [given.tensors[name] for name in ("k_cache", "v_cache", "k_scales", "v_scales")]
    num_slid = 0
    for request, (new, context) in enumerate(lengths):
        first = max(context - new + 1 - attention.window, 0) // size
        for cache in caches:
            poison(
                cache, ~torch.isin(torch.arange(len(cache)), table[request, :first])[:, None].expand(-1, size)
            )
        table[request, :first] = null
        num_slid += first
    for cache in caches:
        cache.view(torch.uint8)[null] = 0
    return num_slid


@pytest.mark.parametrize("query_length", [1, 4])
@pytest.mark.parametrize("pages", ["", "fp8", "nvfp4"])
def test_pages_that_slid_past_a_window_are_the_null_page(
    launch: Launch, assert_rounds_to: Check, pages: str, query_length: int
) -> None:
    """Tiles of 64 keys begin before the window, which begins in the middle of a page of 16."""
    layer = attention(3, 1, pages=pages, page_size=16, window=22, query_length=query_length)
    for lengths in ([(1, 120), (1, 70)], [(3, 120), (2, 70)], [(9, 120), (1, 66)]):
        given = step(layer, lengths)
        assert slide(given, layer, lengths) > 4
        _, out = run(launch, attention_spec(layer, B200), given)
        assert_rounds_to(out, given.expected, sums=0.5)


def chain(length: int) -> list[int]:
    """Each token sees all before it; the last of 64 has the sign's bit too."""
    return [(2 << i) - 1 if i < 63 else -1 for i in range(length)]


def of_parents(*parents: int) -> list[int]:
    """The masks of tokens of which each but the first names the one before it in its branch."""
    masks: list[int] = []
    for i, parent in enumerate(parents):
        masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
    return masks


TREE = of_parents(-1, 0, 0, 1, 1, 2, 5)


@pytest.mark.parametrize("query_length", [1, 8])
@pytest.mark.parametrize(
    "rest", [{}, {"window": 64, "sinks": True}, {"pages": "fp8", "softcap": 5.0}], ids=str
)
def test_trees(launch: Launch, assert_rounds_to: Check, rest: dict[str, Any], query_length: int) -> None:
    """Beside each other: a tree, a prompt, a tree of two roots over a page's end, a token of no tree."""
    layer = attention(3, 1, tree=True, query_length=query_length, **rest)
    lengths = [(7, 90), (9, 9), (4, 66), (1, 30)]
    given = step(layer, lengths, {0: TREE, 2: of_parents(-1, -1, 0, 1)})
    ran, out = run(launch, attention_spec(layer, B200), given)
    assert ran == (SPLIT if query_length > 1 else WHOLE)
    assert_rounds_to(out, given.expected, sums=0.5)


def test_a_tree_larger_than_half_a_mask(launch: Launch, assert_rounds_to: Check) -> None:
    layer = attention(1, 1, tree=True)
    given = step(layer, [(44, 80)], {0: of_parents(-1, *range(39), 0, 0, 40, 0)})
    _, out = run(launch, attention_spec(layer, B200), given)
    assert_rounds_to(out, given.expected, sums=0.5)


@pytest.mark.parametrize("query_length", [1, 64])
def test_a_chain_is_causal(launch: Launch, query_length: int) -> None:
    """Up to the longest that a mask holds."""
    tree = attention(1, 1, tree=True, query_length=query_length)
    given = step(tree, [(64, 100), (3, 70)], {0: chain(64), 1: chain(3)})
    _, out = run(launch, attention_spec(tree, B200), given)
    causal = replace(given, tensors={**given.tensors, "out": torch.full_like(out, float("nan"))})
    _, expected = run(launch, attention_spec(replace(tree, tree=False), B200), causal)
    assert torch.equal(out, expected)


FORMS = [
    Form(64, 4, 3), Form(64, 4, 3, tma=True), Form(128, 4, 2, tma=True), Form(16, 8, 1), Form(32, 4, 2, tma=True),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("pages", ["", "fp8", "nvfp4"])
def test_pages_by_pointers_and_by_tensor_maps(
    launch: Launch, assert_rounds_to: Check, pages: str, form: Form
) -> None:
    """Tiles of a page, of half of it, and of several; a context that ends in each half."""
    layer = attention(2, 1, pages=pages, page_size=128, window=100)
    given = step(layer, [(1, context) for context in (1, 128, 200)])
    split = split_spec(layer, B200, 2, 16, form, is_ragged=False)
    _, out = run(launch, replace(split, also=(combine_spec(layer, 2),)), given)
    assert_rounds_to(out, given.expected, sums=0.5)
