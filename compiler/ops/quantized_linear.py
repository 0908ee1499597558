"""Matrix products with quantised weights.

A weight of NVFP4 is codes (N, K / 2) u8 and block scales E4M3, in `layout` "linear" (N, K / 16) or "swizzled_128x4".
alpha: fp32, the product of the outer scales of both sides that are known beforehand: one element, or (N,) where rows of
the weight were quantised apart. row_scale (..., 1) fp32: the outer scales of x's rows, where they are its own.

The sum over K is in fp32, of products that are exact; then y = sum * alpha * row_scale + bias, rounded once to dtype.
"""

import torch
from torch import Tensor

from octavo.compiler import nvfp4
from octavo.compiler.ops.op import Op, accumulator

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def nvfp4_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, alpha: Tensor, row_scale: Tensor | None,
    bias: Tensor | None, dtype: str, layout: str = "linear",
) -> Tensor:  # fmt: skip
    """x: codes (..., K / 2) and x_scale in `layout`, as quantize makes them; returns (..., N) of dtype."""
    left = decode(x.flatten(0, -2), x_scale, layout)
    right = decode(weight, weight_scale, layout)
    sums = (left @ right.T).unflatten(0, x.shape[:-1])
    return finish(sums, alpha, row_scale, bias).to(DTYPES[dtype])


def nvfp4_weight_linear(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    alpha: Tensor,
    bias: Tensor | None,
    layout: str = "linear",
) -> Tensor:
    """x (..., K) of bf16 or fp32 times a weight of NVFP4; returns (..., N) of x's dtype."""
    wide = accumulator(x)
    sums = x.to(wide) @ decode(weight, weight_scale, layout).to(wide).T
    return finish(sums, alpha, None, bias).to(x.dtype)


def fp8_linear(
    x: Tensor, weight: Tensor, alpha: Tensor, row_scale: Tensor | None, bias: Tensor | None, dtype: str
) -> Tensor:
    """x (..., K) and weight (N, K) of E4M3; returns (..., N) of dtype."""
    return finish(x.float() @ weight.float().T, alpha, row_scale, bias).to(DTYPES[dtype])


def decode(codes: Tensor, scales: Tensor, layout: str) -> Tensor:
    """code * block scale (rows, K), exact in fp32."""
    rows, length = codes.shape[0], 2 * codes.shape[1]
    if layout == "swizzled_128x4":
        scales = nvfp4.unswizzle(scales, rows, length // nvfp4.BLOCK_ELEMENTS)
    return nvfp4.dequantize(codes, scales.reshape(rows, length // nvfp4.BLOCK_ELEMENTS), torch.ones(()))


def finish(sums: Tensor, alpha: Tensor, row_scale: Tensor | None, bias: Tensor | None) -> Tensor:
    y = sums * alpha.to(sums.dtype)
    if row_scale is not None:
        y = y * row_scale.to(y.dtype)
    return y if bias is None else y + bias.to(y.dtype)


NVFP4_LINEAR = Op(
    "nvfp4_linear(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, Tensor alpha, Tensor? row_scale, "
    "Tensor? bias, str dtype, str layout='linear') -> Tensor",
    nvfp4_linear,
    lambda x, x_scale, weight, weight_scale, alpha, row_scale, bias, dtype, layout="linear": x.new_empty(
        (*x.shape[:-1], weight.shape[0]), dtype=DTYPES[dtype]
    ),
    "y = alpha * row_scale * (x * x_scale) @ (weight * weight_scale).T + bias",
)
NVFP4_WEIGHT_LINEAR = Op(
    "nvfp4_weight_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor alpha, Tensor? bias, "
    "str layout='linear') -> Tensor",
    nvfp4_weight_linear,
    lambda x, weight, weight_scale, alpha, bias, layout="linear": x.new_empty(
        (*x.shape[:-1], weight.shape[0])
    ),
    "y = alpha * x @ (weight * weight_scale).T + bias",
)
FP8_LINEAR = Op(
    "fp8_linear(Tensor x, Tensor weight, Tensor alpha, Tensor? row_scale, Tensor? bias, str dtype) -> Tensor",
    fp8_linear,
    lambda x, weight, alpha, row_scale, bias, dtype: x.new_empty(
        (*x.shape[:-1], weight.shape[0]), dtype=DTYPES[dtype]
    ),
    "y = alpha * row_scale * x @ weight.T + bias",
)
