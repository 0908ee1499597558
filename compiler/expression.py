"""Arithmetic on sizes: `(T + 63) // 64 * 256` with named dimensions. No eval, bounded in length, depth and value."""

import ast
from collections.abc import Collection, Mapping
from functools import lru_cache

from octavo.compiler.errors import ArtifactError

MAX_LENGTH = 4096
MAX_DEPTH = 200
MAX_VALUE = 2**63 - 1

_OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//"}


def evaluate(expression: int | str, dims: Mapping[str, int]) -> int:
    """The value of an expression of names in `dims`, whole numbers, + - * // and parentheses.

    Every intermediate value must lie within +-(2**63 - 1). Raises ArtifactError for anything else: expressions come
    from files, so a bad one means a damaged or foreign artifact.
    """
    if isinstance(expression, int) and not isinstance(expression, bool):
        return _bounded(expression, str(expression)[:80])
    return _value(_parse(expression), dims, expression)


def validate(expression: int | str, names: Collection[str]) -> None:
    """Check that an expression is well-formed and uses only `names`; raises ArtifactError otherwise."""
    if isinstance(expression, int) and not isinstance(expression, bool):
        _bounded(expression, str(expression)[:80])
        return
    tree = _parse(expression)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in names:
            raise _error(expression, f"expected names among {', '.join(sorted(names))}, got '{node.id}'")


@lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    if not isinstance(expression, str):
        raise ArtifactError(f"expression: expected a whole number or text, got {type(expression).__name__}")
    if len(expression) > MAX_LENGTH:
        raise _error(expression, f"expected at most {MAX_LENGTH} characters, got {len(expression)}")
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _error(expression, f"expected names, whole numbers, + - * // and (), got {error}") from None
    _check(tree, expression)
    return tree


def _check(tree: ast.expr, expression: str) -> None:
    """Only the whitelisted nodes, and not nested so deeply that evaluating could exhaust the stack."""
    pending = [(tree, 1)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _error(expression, f"expected at most {MAX_DEPTH} nested operations")
        match node:
            case ast.Name():
                pass
            case ast.Constant(value=value) if type(value) is int:
                _bounded(value, expression)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                pending.append((operand, depth + 1))
            case ast.BinOp(left=left, right=right, op=op) if type(op) in _OPERATORS:
                pending += [(left, depth + 1), (right, depth + 1)]
            case _:
                raise _error(
                    expression, f"expected names, whole numbers, + - * // and (), got {type(node).__name__}"
                )


def _value(node: ast.expr, dims: Mapping[str, int], expression: str) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            if name not in dims:
                raise _error(expression, f"expected names among {', '.join(sorted(dims))}, got '{name}'")
            return int(dims[name])
        case ast.UnaryOp(operand=operand):
            return -_value(operand, dims, expression)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, dims, expression), _value(right, dims, expression)
            return _bounded(_apply(type(op), a, b, expression), expression)
    raise AssertionError(f"unchecked node {ast.dump(node)}")


def _apply(op: type[ast.operator], a: int, b: int, expression: str) -> int:
    if op is ast.Add:
        return a + b
    if op is ast.Sub:
        return a - b
    if op is ast.Mult:
        return a * b
    if b == 0:
        raise _error(expression, "expected a divisor other than 0")
    return a // b


def _bounded(value: int, expression: str) -> int:
    if abs(value) > MAX_VALUE:
        raise _error(expression, "expected every value within +-(2**63 - 1), got a larger one")
    return value


def _error(expression: str, problem: str) -> ArtifactError:
    shown = expression if len(expression) <= 80 else expression[:77] + "..."
    return ArtifactError(f"expression '{shown}': {problem}; the artifact is damaged or foreign, compile it again")
