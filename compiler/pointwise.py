"""Elementwise arithmetic as text: `silu(a) * b`. One grammar, evaluated by ops/pointwise and written as kernel code.

Names a, b, c, d; finite numbers; + - * /; unary minus; calls of FUNCTIONS of what reads a name. Parsed, never
executed as Python.
"""

import ast
import math
import re
from collections.abc import Callable
from typing import Any

from octavo.compiler.errors import IllegalGraphError

NAMES = ("a", "b", "c", "d")
FUNCTIONS = ("exp", "tanh", "sigmoid", "rsqrt", "sqrt", "silu", "relu", "gelu", "gelu_tanh")
# Those of a gated layer: activation(gate) * up.
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
OPERATORS: dict[type[ast.operator], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Add: ("+", lambda x, y: x + y), ast.Sub: ("-", lambda x, y: x - y), ast.Mult: ("*", lambda x, y: x * y),
    ast.Div: ("/", lambda x, y: x / y),
}  # fmt: skip
MAX_LENGTH = 4000
# Python's parser ends at 200 open parentheses, and everything that walks the tree calls itself for each level.
MAX_DEPTH = 64
# Kernels show the text in a comment of one line: no newlines, no backslashes, no comments of its own.
CHARACTERS = re.compile(r"[A-Za-z0-9_.+\-*/() ]*")


def parse(expression: str) -> ast.expr:
    """The syntax tree. Raises IllegalGraphError for anything outside the grammar."""
    if len(expression) > MAX_LENGTH:
        raise IllegalGraphError(f"pointwise: at most {MAX_LENGTH} characters, got {len(expression)}")
    shown = repr(expression if len(expression) <= 80 else expression[:77] + "...")
    try:
        if not CHARACTERS.fullmatch(expression):
            raise ValueError("a character is not in the grammar")
        tree = ast.parse(expression, mode="eval").body
        if not _check(tree):
            raise ValueError("it reads no tensor")
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError) as error:
        raise IllegalGraphError(f"pointwise: {shown} is not an elementwise expression: {error}") from None
    return tree


def _check(tree: ast.expr, depth: int = 1) -> bool:
    """Whether the expression reads a tensor. Raises ValueError for what is not in the grammar."""
    if depth > MAX_DEPTH:
        raise ValueError(f"at most {MAX_DEPTH} levels")
    match tree:
        case ast.Name(id=name) if name in NAMES:
            return True
        case ast.Constant(value=int() | float() as value) if type(value) is not bool and math.isfinite(value):
            return False
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return _check(left, depth + 1) | _check(right, depth + 1)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _check(operand, depth + 1)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in FUNCTIONS:
            if _check(argument, depth + 1):
                return True
    raise ValueError(f"{ast.unparse(tree)[:60]!r} is not in the grammar")


def write(expression: str, number: Callable[[float], str], call: Callable[[str, str], str]) -> str:
    """The expression in another language: number(value) writes a literal, call(function, argument) a call."""

    def text(tree: ast.expr) -> str:
        match tree:
            case ast.Name(id=name):
                return name
            case ast.Constant(value=value):
                return number(float(value))  # type: ignore[arg-type]
            case ast.BinOp(left=left, op=op, right=right):
                return f"({text(left)} {OPERATORS[type(op)][0]} {text(right)})"
            case ast.UnaryOp(operand=operand):
                return f"(-{text(operand)})"
            case ast.Call(func=ast.Name(id=name), args=[argument]):
                return call(name, text(argument))
        raise AssertionError(f"{ast.dump(tree)} passed the check")

    return text(parse(expression))


def operations(expression: str) -> int:
    """Arithmetic operations for each element; a function counts as 8."""
    nodes = list(ast.walk(parse(expression)))
    return sum(isinstance(n, ast.BinOp | ast.UnaryOp) + 8 * isinstance(n, ast.Call) for n in nodes)
