"""Attention over pages, and what writes them. Pages are laid out (pages, kv_heads, page_size, head_dim).

A step holds the tokens of several requests one after another: request r owns tokens
cu_seqlens_q[r]:cu_seqlens_q[r + 1], its context is seq_lens[r] tokens long (these included), and token i of its
context lives in page page_table[r, i // page_size] at row i % page_size. slot = page * page_size + row.
Kwon et al. 2023.

Pages hold the model's dtype; or E4M3 times a multiplier; or NVFP4: codes u8 (pages, kv_heads, page_size, D / 2) in
the cache and E4M3 scales (pages, kv_heads, page_size, D / 16), one for 16 elements, beside it. multipliers (2,) fp32
are the outer scales of keys and of values, at least 2^-80.
"""

import torch
from torch import Tensor

from octavo.compiler import nvfp4
from octavo.compiler.ops.attention import distance_bias, may_attend, scores_to_output
from octavo.compiler.ops.op import Op, accumulator
from octavo.compiler.ops.rope import rope


def kv_write(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None, multipliers: Tensor | None = None,
) -> None:  # fmt: skip
    """k (1, T, kv_heads, D), v (1, T, kv_heads, Dv) into the pages; slot_mapping (T,) i64, negative: nothing."""
    page_size = k_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page, row = slots // page_size, slots % page_size
    for index, (value, cache, scales) in enumerate(((k, k_cache, k_scales), (v, v_cache, v_scales))):
        rows = value[0][kept]
        if multipliers is None:
            cache[page, :, row] = rows.to(cache.dtype)
        elif scales is None:
            cache[page, :, row] = scaled_rows(rows, multipliers[index]).to(cache.dtype)
        else:
            cache[page, :, row], scales[page, :, row] = nvfp4.quantize(rows, multipliers[index])


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    sinks: Tensor | None, scale: float, window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, multipliers: Tensor | None = None,
    tree: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q (1, T, heads, D); page_table (R, P) i32; seq_lens (R,) i32; cu_seqlens_q (R + 1,) i32. Causal.

    tree (T,) i64: bit j is set if the token sees token j of its request in this step, itself among them, and it is as
    far in its sequence as it sees tokens; 0, or None: it sees all before it.
    Returns (1, T, heads, Dv). Rows of a page past a request's length are never read.
    """
    groups = q.shape[2] // k_cache.shape[1]
    wide = accumulator(q)
    out = q.new_zeros((1, q.shape[1], q.shape[2], page_width(v_cache, v_scales)))
    for request, length in enumerate(seq_lens.tolist()):
        start, end = cu_seqlens_q[request : request + 2].tolist()
        if start == end:
            continue
        key, value = (
            page_values(cache, scales, multiplier, page_table[request], length)
            .to(wide)
            .repeat_interleave(groups, dim=0)
            for cache, scales, multiplier in (
                (k_cache, k_scales, None if multipliers is None else multipliers[0]),
                (v_cache, v_scales, None if multipliers is None else multipliers[1]),
            )
        )
        masks = None if tree is None else tree[start:end]
        own, positions, seen = places_in_step(length, end - start, masks)
        allowed, bias = may_attend(own, positions, True, window) & seen, distance_bias(slopes, own, positions)
        query = q[0, start:end].to(wide).transpose(0, 1)
        result = scores_to_output(query, key, value, allowed, scale, softcap, sinks, bias)
        out[0, start:end] = result.transpose(0, 1).to(q.dtype)
    return out


def places_in_step(length: int, count: int, masks: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Of a request's `count` new tokens their positions (count,), those of all its `length` tokens, and what each new
    one may see of these by its mask (count, length)."""
    positions, before = torch.arange(length), length - count
    seen = torch.ones((count, length), dtype=torch.bool)
    if masks is None or not bool(masks.any()):
        return positions[before:], positions, seen
    seen[:, before:] = (masks[:, None] >> torch.arange(count)) & 1 == 1
    positions[before:] = before + seen[:, before:].sum(1) - 1
    return positions[before:].clone(), positions, seen


def page_width(cache: Tensor, scales: Tensor | None) -> int:
    """Elements that a page holds of a head and token."""
    return cache.shape[3] if scales is None else 2 * cache.shape[3]


def scaled_rows(rows: Tensor, multiplier: Tensor) -> Tensor:
    """rows / multiplier in fp32, no larger than E4M3 holds."""
    return (rows.float() / multiplier).clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX)


def page_values(
    cache: Tensor, scales: Tensor | None, multiplier: Tensor | None, pages: Tensor, length: int
) -> Tensor:
    """What the pages of a request stand for: (kv_heads, length, D), fp32 where there is a multiplier."""
    codes = gather_pages(cache, pages, length)
    if multiplier is None:
        return codes
    if scales is None:
        return codes.float() * multiplier
    return nvfp4.dequantize(codes, gather_pages(scales, pages, length), multiplier)


def gather_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a request as (kv_heads, length, D)."""
    page_size = cache.shape[2]
    used = cache[pages[: -(-length // page_size)].long()]
    return used.transpose(0, 1).flatten(1, 2)[:, :length]


def rope_kv_write(
    qkv: Tensor, cos_table: Tensor, sin_table: Tensor, positions: Tensor, slot_mapping: Tensor,
    k_cache: Tensor, v_cache: Tensor, num_heads: int, interleaved: bool = False, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None, multipliers: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """qkv (1, T, (heads + kv_heads) * D + kv_heads * Dv): rotate q and k, write k and v, return q.

    cos_table, sin_table (max positions, rotary_dim); positions (1, T) i64; returns (1, T, heads, D).
    """
    num_kv_heads, head_dim, value_dim = (
        k_cache.shape[1],
        page_width(k_cache, k_scales),
        page_width(v_cache, v_scales),
    )
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_dim]
    q, k, v = (
        part.unflatten(-1, (heads, -1))
        for part, heads in zip(qkv.split(widths, -1), (num_heads, num_kv_heads, num_kv_heads), strict=True)
    )
    cos, sin = cos_table[positions], sin_table[positions]
    k = rope(k, cos, sin, interleaved)
    kv_write(k, v, k_cache, v_cache, slot_mapping, k_scales, v_scales, multipliers)
    return rope(q, cos, sin, interleaved)


def _paged_attention_fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    sinks: Tensor | None, scale: float, window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None,
    k_scales: Tensor | None = None, v_scales: Tensor | None = None, multipliers: Tensor | None = None,
    tree: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return q.new_empty((*q.shape[:3], page_width(v_cache, v_scales)))


def _rope_kv_write_fake(
    qkv: Tensor, cos_table: Tensor, sin_table: Tensor, positions: Tensor, slot_mapping: Tensor,
    k_cache: Tensor, v_cache: Tensor, num_heads: int, interleaved: bool = False, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None, multipliers: Tensor | None = None,
) -> Tensor:  # fmt: skip
    return qkv.new_empty((*qkv.shape[:2], num_heads, page_width(k_cache, k_scales)))


KV_WRITE = Op(
    "kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None, Tensor? multipliers=None) -> ()",
    kv_write,
    lambda k, v, k_cache, v_cache, slot_mapping, k_scales=None, v_scales=None, multipliers=None: None,
    "cache[slot] = (k, v)",
)
PAGED_ATTENTION = Op(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, "
    "Tensor cu_seqlens_q, Tensor? sinks, float scale, int window=0, float softcap=0.0, Tensor? slopes=None, "
    "Tensor? k_scales=None, Tensor? v_scales=None, Tensor? multipliers=None, Tensor? tree=None) -> Tensor",
    paged_attention,
    _paged_attention_fake,
    "attention of each request's new tokens over its pages",
)
ROPE_KV_WRITE = Op(
    "rope_kv_write(Tensor qkv, Tensor cos_table, Tensor sin_table, Tensor positions, Tensor slot_mapping, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, int num_heads, bool interleaved=False, "
    "Tensor(c!)? k_scales=None, Tensor(d!)? v_scales=None, Tensor? multipliers=None) -> Tensor",
    rope_kv_write,
    _rope_kv_write_fake,
    "q = rope(q); cache[slot] = (rope(k), v)",
)
