"""Normalisation."""

import torch
from torch import Tensor

from octavo.compiler.ops.op import Op, accumulator


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x (..., hidden); weight (hidden,). Zhang and Sennrich 2019; offset is 1 in Gemma's spelling."""
    wide = x.to(accumulator(x))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * scale * (weight.to(wide.dtype) + offset)).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The residual addition and the norm that reads it. Returns (norm of the sum, the sum in x's dtype)."""
    total = x + residual
    return rms_norm(total, weight, eps, offset), total


RMS_NORM = Op(
    "rms_norm(Tensor x, Tensor weight, float eps, float offset=0.0) -> Tensor",
    rms_norm,
    lambda x, weight, eps, offset=0.0: torch.empty_like(x, memory_format=torch.contiguous_format),
    "y = x * rsqrt(mean(x^2) + eps) * (offset + weight)",
)
ADD_RMS_NORM = Op(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, float offset=0.0) -> (Tensor, Tensor)",
    add_rms_norm,
    lambda x, residual, weight, eps, offset=0.0: (torch.empty_like(x), torch.empty_like(x)),
    "s = x + residual; y = rms_norm(s)",
)
