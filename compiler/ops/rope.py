"""Rotary position embedding."""

import torch
from torch import Tensor

from octavo.compiler.ops.op import Op, accumulator


def rotate(x: Tensor, interleaved: bool) -> Tensor:
    """(-x2, x1): the halves of the last axis swapped, or its even and odd elements when interleaved."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., 0::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """x (B, T, heads, head_dim); cos, sin (B, T, rotary_dim), rotary_dim <= head_dim; the rest passes through.

    Su et al. 2021, equation 34. cos and sin hold every angle twice, in the order in which the model pairs
    elements, so the op serves scaled and partial variants without knowing them.
    """
    rotary_dim = cos.shape[-1]
    wide = accumulator(x)
    head, tail = x[..., :rotary_dim].to(wide), x[..., rotary_dim:]
    c, s = cos.unsqueeze(-2).to(wide), sin.unsqueeze(-2).to(wide)
    return torch.cat(((head * c + rotate(head, interleaved) * s).to(x.dtype), tail), dim=-1)


ROPE = Op(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved=False) -> Tensor",
    rope,
    lambda x, cos, sin, interleaved=False: torch.empty_like(x, memory_format=torch.contiguous_format),
    "y = x * cos + rotate(x) * sin",
)
