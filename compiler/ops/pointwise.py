"""Elementwise arithmetic that no other op holds: multipliers, soft-caps, activations and what stands between them."""

import ast
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from octavo.compiler.ops.op import Op, accumulator
from octavo.compiler.pointwise import FUNCTIONS, NAMES, OPERATORS, parse

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "rsqrt": torch.rsqrt, "sqrt": torch.sqrt,
    "silu": torch.nn.functional.silu, "relu": torch.relu, "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}  # fmt: skip
assert set(CALLS) == set(FUNCTIONS)


def evaluate(expression: str, values: Mapping[str, Tensor]) -> Tensor:
    """The value, computed in the dtype of `values`."""
    result: Tensor = _evaluate(parse(expression), values)
    return result


def _evaluate(tree: ast.expr, values: Mapping[str, Tensor]) -> Any:
    match tree:
        case ast.Name(id=name):
            return values[name]
        case ast.Constant(value=value):
            return value
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)][1](_evaluate(left, values), _evaluate(right, values))
        case ast.UnaryOp(operand=operand):
            return -_evaluate(operand, values)
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            return CALLS[name](_evaluate(argument, values))
    raise AssertionError(f"{ast.dump(tree)} passed the check")


def kind(operand: Tensor, a: Tensor) -> str:
    """ "rows" (..., N) like a, "vector" (N,) that all rows share, or "column" (..., 1), one value for each row."""
    if operand.dim() < a.dim():
        return "vector"
    return "rows" if operand.shape[-1] == a.shape[-1] else "column"


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
