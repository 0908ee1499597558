"""Arithmetic and conditions on sizes: `(T + 63) // 64 * 256`, `T <= 16 and R > 1`, with named dimensions.

Parsed against a whitelist, never executed as Python; bounded in length, depth and value, as text from files
must be.
"""

import ast
import operator
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache

from octavo.compiler.errors import ArtifactError

MAX_LENGTH = 4096
MAX_DEPTH = 200
MAX_VALUE = 2**63 - 1

_ARITHMETIC: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_SIZE = "names, whole numbers, + - * // and ()"
_CONDITION = "comparisons of sizes joined by 'and', 'or'"


def evaluate(expression: int | str, dims: Mapping[str, int]) -> int:
    """The value of an expression of names in `dims`, whole numbers, + - * // and parentheses.

    Every intermediate value must lie within +-(2**63 - 1). Anything else is an ArtifactError: expressions
    come from files, so a bad one means a damaged or foreign artifact.
    """
    if type(expression) is int:
        return _bounded(expression, "")
    text = _text(expression)
    return _value(_parse(text, _SIZE), dims, text)


def validate(expression: int | str, names: Collection[str]) -> None:
    """Check that an expression is well-formed and uses only `names`; raises ArtifactError otherwise."""
    if type(expression) is int:
        _bounded(expression, "")
        return
    text = _text(expression)
    _check_names(_parse(text, _SIZE), names, text)


def at_most(count: int | str, limit: int | str) -> str:
    """The lesser of a size, which is never negative, and one above 0, in the operations that there are."""
    # 0 below the limit, 1 from there on: 2 q // (q + 1) is 1 for every whole q above 0
    times = f"(({count}) // ({limit}))"
    return f"({count}) + (({limit}) - ({count})) * (2 * {times} // ({times} + 1))"


def holds(condition: str, dims: Mapping[str, int]) -> bool:
    """Whether comparisons of expressions, joined by `and` and `or`, are true; empty text always holds."""
    text = _text(condition)
    return not text or _truth(_parse(text, _CONDITION), dims, text)


def validate_condition(condition: str, names: Collection[str]) -> None:
    """As `validate`, for a condition."""
    text = _text(condition)
    if text:
        _check_names(_parse(text, _CONDITION), names, text)


def _text(expression: int | str) -> str:
    if not isinstance(expression, str):
        raise _error(str(expression), f"expected a whole number or text, got {type(expression).__name__}")
    return expression


@lru_cache(maxsize=4096)
def _parse(text: str, grammar: str) -> ast.expr:
    if len(text) > MAX_LENGTH:
        raise _error(text, f"expected at most {MAX_LENGTH} characters, got {len(text)}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise _error(text, f"expected {grammar}, got {error}") from None
    if grammar == _CONDITION:
        _check_condition(tree, text)
    else:
        _check_size(tree, text)
    return tree


def _check_condition(tree: ast.expr, text: str, depth: int = 1) -> None:
    if depth > MAX_DEPTH:
        raise _error(text, f"expected at most {MAX_DEPTH} nested operations")
    match tree:
        case ast.BoolOp(values=values):
            for value in values:
                _check_condition(value, text, depth + 1)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(
            type(op) in _COMPARISONS for op in ops
        ):
            for side in (left, *others):
                _check_size(side, text)
        case _:
            raise _error(text, f"expected {_CONDITION}, got {type(tree).__name__}")


def _check_size(tree: ast.expr, text: str) -> None:
    """Only the whitelisted nodes, and not nested so deeply that evaluating could exhaust the stack."""
    pending = [(tree, 1)]
    while pending:
        node, depth = pending.pop()
        if depth > MAX_DEPTH:
            raise _error(text, f"expected at most {MAX_DEPTH} nested operations")
        match node:
            case ast.Name():
                pass
            case ast.Constant(value=value) if type(value) is int:
                _bounded(value, text)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                pending.append((operand, depth + 1))
            case ast.BinOp(left=left, right=right, op=op) if type(op) in _ARITHMETIC:
                pending += [(left, depth + 1), (right, depth + 1)]
            case _:
                raise _error(text, f"expected {_SIZE}, got {type(node).__name__}")


def _check_names(tree: ast.expr, names: Collection[str], text: str) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id not in names:
            raise _unknown(node.id, names, text)


def _truth(node: ast.expr, dims: Mapping[str, int], text: str) -> bool:
    if isinstance(node, ast.BoolOp):
        combine = all if isinstance(node.op, ast.And) else any
        return combine(_truth(value, dims, text) for value in node.values)
    assert isinstance(node, ast.Compare), f"unchecked node {ast.dump(node)}"
    values = [_value(side, dims, text) for side in (node.left, *node.comparators)]
    pairs = zip(node.ops, values[:-1], values[1:], strict=True)
    return all(_COMPARISONS[type(op)](a, b) for op, a, b in pairs)


def _value(node: ast.expr, dims: Mapping[str, int], text: str) -> int:
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            if name not in dims:
                raise _unknown(name, dims, text)
            return int(dims[name])
        case ast.UnaryOp(operand=operand):
            return -_value(operand, dims, text)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _value(left, dims, text), _value(right, dims, text)
            if isinstance(op, ast.FloorDiv) and b == 0:
                raise _error(text, "expected a divisor other than 0")
            return _bounded(_ARITHMETIC[type(op)](a, b), text)
    raise AssertionError(f"unchecked node {ast.dump(node)}")


def _bounded(value: int, text: str) -> int:
    if abs(value) > MAX_VALUE:
        raise _error(text, "expected every value within +-(2**63 - 1), got a larger one")
    return value


def _unknown(name: str, names: Collection[str], text: str) -> ArtifactError:
    return _error(text, f"expected names among {', '.join(sorted(names)) or '(none)'}, got '{name}'")


def _error(text: str, problem: str) -> ArtifactError:
    shown = repr(text if len(text) <= 80 else text[:77] + "...")
    return ArtifactError(
        f"expression {shown}: {problem}; the artifact is damaged or foreign, compile it again"
    )
