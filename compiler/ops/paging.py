"""Attention over pages, and what writes them. Pages are laid out (pages, kv_heads, page_size, head_dim).

A step holds the tokens of several requests one after another: request r owns tokens
cu_seqlens_q[r]:cu_seqlens_q[r + 1], its context is seq_lens[r] tokens long (these included), and token i of its
context lives in page page_table[r, i // page_size] at row i % page_size. slot = page * page_size + row.
Kwon et al. 2023.
"""

import torch
from torch import Tensor

from octavo.compiler.ops.attention import distance_bias, may_attend, scores_to_output
from octavo.compiler.ops.op import Op, accumulator
from octavo.compiler.ops.rope import rope


def kv_write(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """k (1, T, kv_heads, D), v (1, T, kv_heads, Dv) into the pages; slot_mapping (T,) i64, negative writes nothing."""
    page_size = k_cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    page, row = slots // page_size, slots % page_size
    k_cache[page, :, row] = k[0][kept].to(k_cache.dtype)
    v_cache[page, :, row] = v[0][kept].to(v_cache.dtype)


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    sinks: Tensor | None, scale: float, window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q (1, T, heads, D); page_table (R, P) i32; seq_lens (R,) i32; cu_seqlens_q (R + 1,) i32. Causal.

    Returns (1, T, heads, Dv). Rows of a page past a request's length are never read.
    """
    groups = q.shape[2] // k_cache.shape[1]
    wide = accumulator(q)
    out = q.new_zeros((1, q.shape[1], q.shape[2], v_cache.shape[3]))
    for request, length in enumerate(seq_lens.tolist()):
        start, end = cu_seqlens_q[request : request + 2].tolist()
        if start == end:
            continue
        key, value = (
            gather_pages(cache, page_table[request], length).to(wide).repeat_interleave(groups, dim=0)
            for cache in (k_cache, v_cache)
        )
        positions = torch.arange(length, device=q.device)
        own = positions[length - (end - start) :]
        allowed, bias = may_attend(own, positions, True, window), distance_bias(slopes, own, positions)
        query = q[0, start:end].to(wide).transpose(0, 1)
        result = scores_to_output(query, key, value, allowed, scale, softcap, sinks, bias)
        out[0, start:end] = result.transpose(0, 1).to(q.dtype)
    return out


def gather_pages(cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a request as (kv_heads, length, D)."""
    page_size = cache.shape[2]
    used = cache[pages[: -(-length // page_size)].long()]
    return used.transpose(0, 1).flatten(1, 2)[:, :length]


def rope_kv_write(
    qkv: Tensor, cos_table: Tensor, sin_table: Tensor, positions: Tensor, slot_mapping: Tensor,
    k_cache: Tensor, v_cache: Tensor, num_heads: int, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """qkv (1, T, (heads + kv_heads) * D + kv_heads * Dv): rotate q and k, write k and v, return q.

    cos_table, sin_table (max positions, rotary_dim); positions (1, T) i64; returns (1, T, heads, D).
    """
    num_kv_heads, head_dim, value_dim = k_cache.shape[1], k_cache.shape[3], v_cache.shape[3]
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_dim]
    q, k, v = (
        part.unflatten(-1, (heads, -1))
        for part, heads in zip(qkv.split(widths, -1), (num_heads, num_kv_heads, num_kv_heads), strict=True)
    )
    cos, sin = cos_table[positions], sin_table[positions]
    kv_write(rope(k, cos, sin, interleaved), v, k_cache, v_cache, slot_mapping)
    return rope(q, cos, sin, interleaved)


KV_WRITE = Op(
    "kv_write(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()",
    kv_write,
    lambda k, v, k_cache, v_cache, slot_mapping: None,
    "cache[slot] = (k, v)",
)
PAGED_ATTENTION = Op(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor seq_lens, "
    "Tensor cu_seqlens_q, Tensor? sinks, float scale, int window=0, float softcap=0.0, Tensor? slopes=None) -> Tensor",
    paged_attention,
    lambda q, k_cache, v_cache, *rest, **options: q.new_empty((*q.shape[:3], v_cache.shape[3])),
    "attention of each request's new tokens over its pages",
)
ROPE_KV_WRITE = Op(
    "rope_kv_write(Tensor qkv, Tensor cos_table, Tensor sin_table, Tensor positions, Tensor slot_mapping, "
    "Tensor(a!) k_cache, Tensor(b!) v_cache, int num_heads, bool interleaved=False) -> Tensor",
    rope_kv_write,
    lambda qkv, cos_table, sin_table, positions, slot_mapping, k_cache, v_cache, num_heads, interleaved=False: (
        qkv.new_empty((*qkv.shape[:2], num_heads, k_cache.shape[3]))
    ),
    "q = rope(q); cache[slot] = (rope(k), v)",
)
