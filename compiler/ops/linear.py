"""Matrix products with weights."""

import torch
from torch import Tensor

from octavo.compiler.ops.op import Op


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K); weight (N, K); bias (N,). Sums in fp32 or wider, one rounding to x's dtype."""
    return torch.nn.functional.linear(x, weight, bias)


LINEAR = Op(
    "linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    linear,
    lambda x, weight, bias=None: x.new_empty((*x.shape[:-1], weight.shape[0])),
    "y = x @ weight.T + bias",
)
