"""A graph in fp64: what a rewrite must equal, whatever dtype the model computes in."""

import itertools
from typing import Any

import torch
from torch import Tensor
from torch.fx import Interpreter


class Wide(Interpreter):
    """Runs a graph in fp64: conversions to a narrower dtype are left out."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args = tuple(_wide_dtype(a) for a in args)
        kwargs = {name: _wide_dtype(value) for name, value in kwargs.items()}
        if target is torch.ops.aten._grouped_mm.default:
            return _grouped_mm(*args, **kwargs)
        return super().call_function(target, args, kwargs)


def widened(value: Any) -> Any:
    """A float or complex tensor in the widest dtype of its kind; anything else as it is."""
    if isinstance(value, Tensor) and value.dtype.is_complex:
        return value.to(torch.complex128)
    return value.double() if isinstance(value, Tensor) and value.dtype.is_floating_point else value


def _wide_dtype(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value


def _grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """Rows offs[g - 1] to offs[g] of a (R, K) by b[g] (K, N); torch has it in narrow dtypes only."""
    ends = [0, *offs.tolist()]
    parts = [a[start:end] @ b[g] for g, (start, end) in enumerate(itertools.pairwise(ends))]
    rest = a.new_zeros(len(a) - ends[-1], b.shape[2])
    return torch.cat([*parts, rest])
