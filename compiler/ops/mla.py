"""Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are products of one latent.

Shapes: H heads, R latent rank, Dr rotary width shared by all heads, Dn and Dv widths of a head's other key part
and of its value. A head's score of a token with latent c is q_nope . (W_uk c) + q_rope . k_rope, which equals
(W_uk^T q_nope) . c + q_rope . k_rope: in that absorbed form only c and k_rope are kept of a token.
"""

import torch
from torch import Tensor

from octavo.compiler.ops.attention import attention, may_attend, scores_to_output
from octavo.compiler.ops.linear import linear
from octavo.compiler.ops.op import Op, accumulator
from octavo.compiler.ops.paging import page_values, places_in_step, scaled_rows


def mla_attention(
    q_nope: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, w_uk: Tensor, w_uv: Tensor, scale: float,
    causal: bool = True, window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """The expanded form: q_nope (B, T, H, Dn); q_rope (B, T, H, Dr); latent (B, T, R); k_rope (B, T, Dr);
    w_uk (H * Dn, R); w_uv (H * Dv, R); returns (B, T, H, Dv)."""
    heads = q_nope.shape[2]
    k_nope, v = (linear(latent, weight).unflatten(-1, (heads, -1)) for weight in (w_uk, w_uv))
    shared = k_rope.unsqueeze(2).expand(-1, -1, heads, -1)
    q, k = torch.cat((q_nope, q_rope), dim=-1), torch.cat((k_nope, shared), dim=-1)
    return attention(q, k, v, None, scale, causal, window, softcap)


def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """A product for each head: x (B, T, H, K); weight (H, N, K); returns (B, T, H, N), rounded once."""
    wide = accumulator(x)
    return torch.einsum("bthk,hnk->bthn", x.to(wide), weight.to(wide)).to(x.dtype)


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, scale: float, causal: bool = True,
    window: int = 0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """The absorbed form, between the products: q_latent (B, T, H, R); the rest as above; returns (B, T, H, R)."""
    q, k = torch.cat((q_latent, q_rope), dim=-1), torch.cat((latent, k_rope), dim=-1)
    return attention(q, k.unsqueeze(2), latent.unsqueeze(2), None, scale, causal, window, softcap)


def latent_write(
    latent: Tensor, k_rope: Tensor, cache: Tensor, slot_mapping: Tensor, multiplier: Tensor | None = None
) -> None:
    """latent (1, T, R), k_rope (1, T, Dr) next to each other into pages (pages, 1, page_size, R + Dr).

    slot_mapping (T,) i64; a negative slot writes nothing. multiplier (1,) fp32: of E4M3 pages, for both parts.
    """
    page_size = cache.shape[2]
    kept = slot_mapping >= 0
    slots = slot_mapping[kept]
    rows = torch.cat((latent[0], k_rope[0]), dim=-1)[kept]
    if multiplier is not None:
        rows = scaled_rows(rows, multiplier)
    cache[slots // page_size, 0, slots % page_size] = rows.to(cache.dtype)


def paged_mla_attention(
    q_latent: Tensor, q_rope: Tensor, cache: Tensor, page_table: Tensor, seq_lens: Tensor, cu_seqlens_q: Tensor,
    scale: float, window: int = 0, softcap: float = 0.0, multiplier: Tensor | None = None, tree: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q_latent (1, T, H, R); q_rope (1, T, H, Dr); returns (1, T, H, R). Causal; the step and tree as in paging.py."""
    wide, rank = accumulator(q_latent), q_latent.shape[3]
    queries = torch.cat((q_latent, q_rope), dim=-1)[0].to(wide)
    out = torch.zeros_like(q_latent, memory_format=torch.contiguous_format)
    for request, length in enumerate(seq_lens.tolist()):
        start, end = cu_seqlens_q[request : request + 2].tolist()
        if start == end:
            continue
        key = page_values(cache, None, multiplier, page_table[request], length).to(wide)
        own, positions, seen = places_in_step(length, end - start, None if tree is None else tree[start:end])
        allowed = may_attend(own, positions, True, window) & seen
        query = queries[start:end].transpose(0, 1)
        result = scores_to_output(query, key, key[..., :rank], allowed, scale, softcap, None)
        out[0, start:end] = result.transpose(0, 1).to(out.dtype)
    return out


MLA_ATTENTION = Op(
    "mla_attention(Tensor q_nope, Tensor q_rope, Tensor latent, Tensor k_rope, Tensor w_uk, Tensor w_uv, "
    "float scale, bool causal=True, int window=0, float softcap=0.0) -> Tensor",
    mla_attention,
    lambda q_nope, q_rope, latent, k_rope, w_uk, w_uv, *rest, **options: q_nope.new_empty(
        (*q_nope.shape[:3], w_uv.shape[0] // q_nope.shape[2])
    ),
    "y = attention(q, (W_uk c, k_rope), W_uv c)",
)
HEAD_LINEAR = Op(
    "head_linear(Tensor x, Tensor weight) -> Tensor",
    head_linear,
    lambda x, weight: x.new_empty((*x.shape[:3], weight.shape[1])),
    "y[h] = x[h] @ weight[h].T",
)
LATENT_ATTENTION = Op(
    "latent_attention(Tensor q_latent, Tensor q_rope, Tensor latent, Tensor k_rope, float scale, "
    "bool causal=True, int window=0, float softcap=0.0) -> Tensor",
    latent_attention,
    lambda q_latent, *rest, **options: torch.empty_like(q_latent, memory_format=torch.contiguous_format),
    "y = attention((q_latent, q_rope), (c, k_rope), c)",
)
LATENT_WRITE = Op(
    "latent_write(Tensor latent, Tensor k_rope, Tensor(a!) cache, Tensor slot_mapping, "
    "Tensor? multiplier=None) -> ()",
    latent_write,
    lambda latent, k_rope, cache, slot_mapping, multiplier=None: None,
    "cache[slot] = (c, k_rope)",
)
PAGED_MLA_ATTENTION = Op(
    "paged_mla_attention(Tensor q_latent, Tensor q_rope, Tensor cache, Tensor page_table, Tensor seq_lens, "
    "Tensor cu_seqlens_q, float scale, int window=0, float softcap=0.0, Tensor? multiplier=None, "
    "Tensor? tree=None) -> Tensor",
    paged_mla_attention,
    lambda q_latent, *rest, **options: torch.empty_like(q_latent, memory_format=torch.contiguous_format),
    "latent attention of each request's new tokens over its pages",
)
