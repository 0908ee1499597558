"""Attention over one sequence per batch row: the form in which models are captured."""

import torch
from torch import Tensor

from octavo.compiler.ops.op import Op, accumulator


def scores_to_output(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float, softcap: float, sinks: Tensor | None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(softcap(q k^T scale) + bias, masked) v, with a row that may attend to nothing giving zero.

    q (..., heads, Q, D); k, v (..., heads, S, D); allowed and bias broadcast to (..., heads, Q, S), True
    attends; sinks (heads,) takes part in the softmax's denominator only.
    """
    scores = q @ k.transpose(-1, -2) * scale
    if softcap > 0.0:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype).view(-1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights @ v


def may_attend(query_positions: Tensor, key_positions: Tensor, causal: bool, window: int) -> Tensor:
    """(Q, S) bool. window counts the keys that a query sees, itself included; 0 means all."""
    distance = query_positions[:, None] - key_positions[None, :]
    allowed = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        allowed = allowed & (distance >= 0)
    if window > 0:
        allowed = allowed & (distance < window)
    return allowed


def distance_bias(slopes: Tensor | None, query_positions: Tensor, key_positions: Tensor) -> Tensor | None:
    """slopes (heads,) times key - query, as (heads, Q, S) in fp32 or wider. Press et al. 2022 (ALiBi)."""
    if slopes is None:
        return None
    wide = slopes.to(accumulator(slopes))
    return wide[:, None, None] * (key_positions[None, :] - query_positions[:, None]).to(wide.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, causal: bool = True,
    window: int = 0, softcap: float = 0.0, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q (B, T, heads, D); k (B, T, kv_heads, D); v (B, T, kv_heads, Dv); returns (B, T, heads, Dv).

    slopes (heads,) times the distance from query to key, negative for keys before it, is added to the scores.
    """
    wide = accumulator(q)
    groups = q.shape[2] // k.shape[2]
    heads_first = [t.to(wide).transpose(1, 2) for t in (q, k, v)]
    key, value = (t.repeat_interleave(groups, dim=1) for t in heads_first[1:])
    positions = torch.arange(q.shape[1], device=q.device)
    allowed = may_attend(positions, positions, causal, window)
    bias = distance_bias(slopes, positions, positions)
    out = scores_to_output(heads_first[0], key, value, allowed, scale, softcap, sinks, bias)
    return out.transpose(1, 2).contiguous().to(v.dtype)


ATTENTION = Op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, bool causal=True, int window=0, "
    "float softcap=0.0, Tensor? slopes=None) -> Tensor",
    attention,
    lambda q, k, v, *rest, **options: v.new_empty((*q.shape[:3], v.shape[3])),
    "y = softmax(mask(softcap(q k^T * scale) + slopes * (key - query))) v",
)
