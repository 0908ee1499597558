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


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x (..., hidden); weight, bias (hidden,). Ba et al. 2016."""
    wide = x.to(accumulator(x))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(y.dtype)
    if bias is not None:
        y = y + bias.to(y.dtype)
    return y.to(x.dtype)


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
LAYER_NORM = Op(
    "layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    layer_norm,
    lambda x, weight, bias, eps: torch.empty_like(x, memory_format=torch.contiguous_format),
    "y = (x - mean(x)) * rsqrt(var(x) + eps) * weight + bias",
)
