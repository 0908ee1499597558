"""Values of a model's loop over its experts, recorded in place of being computed.

What a loop computes for one expert it computes for all, with other weights. So nothing in its body is traced: each
call is kept as a Lazy, and the model's code goes on with a stand-in on the meta device. lift_experts makes one
computation of those of all experts. Rows that a condition chose have a stand-in for their number.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from octavo.compiler.errors import CaptureError

ROWS = 99991  # stands for the number of rows that a condition chose: a prime that no width is a multiple of
TOKENS = 10007  # stands for the number of tokens


class Unlike(Exception):
    """Why values of several experts are not one computation."""


class Count(int):
    """How many rows a condition chose: some, it is not known how many."""

    def _compared(self, other: int, name: str) -> bool:
        """The answer for any number of rows but none; there must be one."""
        few, many = (getattr(int(n), name)(other) for n in (1, 1 << 62))
        if few != many or (name in ("__eq__", "__ne__") and other > 0):
            raise CaptureError(
                f"capture: the number of tokens that an expert gets is compared with {other}; a program has one form "
                "for every step, so only whether there are any may be asked"
            )
        return bool(few)

    def __eq__(self, other: object) -> bool:
        return self._compared(other, "__eq__") if type(other) is int else int(self) == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __gt__(self, other: int) -> bool:
        return self._compared(other, "__gt__") if type(other) is int else int(self) > other

    def __ge__(self, other: int) -> bool:
        return self._compared(other, "__ge__") if type(other) is int else int(self) >= other

    def __lt__(self, other: int) -> bool:
        return self._compared(other, "__lt__") if type(other) is int else int(self) < other

    def __le__(self, other: int) -> bool:
        return self._compared(other, "__le__") if type(other) is int else int(self) <= other

    def __hash__(self) -> int:
        return hash(int(self))


@dataclass(eq=False)
class Rows:
    """Places (in the order of the condition's axes) in which a condition holds."""

    condition: Any
    axes: int


@dataclass(eq=False)
class Lazy:
    """A call that was not made.

    kind    op: `function` of args; weight: args (stack, expert); select: args (tensor, entries, guard); equal: args
            (tensor, number); place: args (axis of the condition,); rows: args (tensor, entries); spread: args (rows,
            axes of the condition that stay); hits, hit: args (condition, how many), (number, condition); some,
            number: args (condition,)
    like    stands for the value in the model's code, on the meta device
    rows    of what a condition chose: its axis 0 is that of the rows
    """

    kind: str
    function: Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    like: Tensor
    rows: Rows | None = None
    name: str = ""


def refuse(what: str) -> NoReturn:
    raise CaptureError(
        f"capture: {what}; a program has one form for every step: of what an expert's tokens go through, products, "
        "elementwise functions, conversions, parts and reshapes are followed, and sums back into the tokens"
    )


def leaves(value: Any) -> Iterator[Any]:
    """Tensors and others in nested tuples, lists and dictionaries."""
    if isinstance(value, tuple | list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    else:
        yield value


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple | list):
        items = [mapped(item, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {name: mapped(item, change) for name, item in value.items()}
    return change(value)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """No mode sees what is called meanwhile: neither an export's nor ours."""
    guard = torch._C._ExcludeDispatchKeyGuard(_PRE_DISPATCH)
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), guard:
        yield


_PRE_DISPATCH = torch._C.DispatchKeySet(torch._C.DispatchKey.PreDispatch)
_SIZES: dict[Any, int] = {}


def size_on_meta(size: Any) -> int:
    """A size as a number: of symbolic ones, what they are for TOKENS tokens."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    if expression not in _SIZES:
        _SIZES[expression] = int(expression.subs({symbol: TOKENS for symbol in expression.free_symbols}))
    return _SIZES[expression]


def _for_meta(value: Any) -> Any:
    """A stand-in for a traced tensor, and numbers for its sizes. Only where no mode is active."""
    if isinstance(value, Tensor) and type(value) is not Tensor:
        return torch.empty([size_on_meta(d) for d in value.shape], dtype=value.dtype, device="meta")
    if isinstance(value, torch.SymInt | Count):
        return size_on_meta(value)
    return "meta" if isinstance(value, torch.device) else value


def empty_on_meta(shape: Any, dtype: torch.dtype) -> Tensor:
    with _apart():
        return torch.empty([size_on_meta(d) for d in shape], dtype=dtype, device="meta")


# Results by function and arguments: experts do the same, and what a call gives is slow to find out.
_RESULTS: dict[Any, Any] = {}


def run_on_meta(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Stand-ins for what a call gives."""
    with _apart(), torch.no_grad():
        key = (function, _key(args), _key(kwargs))
        if key not in _RESULTS:
            result = function(*mapped(args, _for_meta), **mapped(kwargs, _for_meta))
            _RESULTS[key] = mapped(result, lambda x: (x.shape, x.dtype) if isinstance(x, Tensor) else x)
            return result
        return _made(_RESULTS[key])


def _key(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return (type(value).__name__, *map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(v)) for name, v in value.items())
    if isinstance(value, Tensor):
        return ("tensor", tuple(size_on_meta(d) for d in value.shape), value.dtype)
    if isinstance(value, torch.SymInt | int):
        return size_on_meta(value) if type(value) is not bool else ("bool", value)
    return (type(value).__name__, str(value))


def _made(form: Any) -> Any:
    if isinstance(form, tuple) and len(form) == 2 and isinstance(form[0], torch.Size):
        return torch.empty(form[0], dtype=form[1], device="meta")
    return type(form)(map(_made, form)) if isinstance(form, tuple | list) else form
