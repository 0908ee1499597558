"""Elementwise arithmetic that no other op holds: multipliers, soft-caps, activations and what stands between them."""

import torch
from torch import Tensor

from octavo.compiler.ops.op import Op, accumulator
from octavo.compiler.pointwise import NAMES, evaluate

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def pointwise(
    a: Tensor, b: Tensor | None, c: Tensor | None, d: Tensor | None, expression: str, dtype: str
) -> Tensor:
    """`expression` in fp32 or wider, rounded once to dtype. a (..., N); b, c, d of a's shape, (N,) or (..., 1)."""
    wide = accumulator(a)
    values = {name: t.to(wide) for name, t in zip(NAMES, (a, b, c, d), strict=True) if t is not None}
    result = evaluate(expression, values)
    return result if a.dtype == torch.float64 else result.to(DTYPES[dtype])


POINTWISE = Op(
    "pointwise(Tensor a, Tensor? b, Tensor? c, Tensor? d, str expression, str dtype) -> Tensor",
    pointwise,
    lambda a, b, c, d, expression, dtype: a.new_empty(
        a.shape, dtype=a.dtype if a.dtype == torch.float64 else DTYPES[dtype]
    ),
    "y = expression(a, b, c, d)",
)
