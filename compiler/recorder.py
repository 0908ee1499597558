"""Calls of a model's code that are kept in place of being made, and the moment in which they are traced after all.

A tensor that values of experts are added to waits until it is read; then those of all experts are traced together. What
nothing here knows is traced with the values that it takes, unless it works on the tokens that one expert got.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from octavo.compiler.lazy_values import Lazy, Rows, Unlike, leaves, mapped, refuse, run_on_meta
from octavo.compiler.lift_experts import KNOWN, PARTS, Lifter

NAMES = {
    "__eq__": "eq", "__ne__": "ne", "__lt__": "lt", "__le__": "le", "__gt__": "gt", "__ge__": "ge", "__add__": "add",
    "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul", "__truediv__": "div", "__neg__": "neg",
    "__pow__": "pow", "__and__": "and", "__or__": "or", "__xor__": "xor", "__invert__": "invert",
    "__matmul__": "matmul",
    "__getitem__": "getitem", "__setitem__": "setitem", "__iadd__": "add_", "__imul__": "mul_", "__isub__": "sub_",
    "__itruediv__": "div_", "greater": "gt", "less": "lt", "multiply": "mul", "concat": "cat", "concatenate": "cat",
}  # fmt: skip
FUNCTIONAL = {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not"}
VIEWS = (*PARTS, "getitem", "view", "reshape", "unsqueeze", "squeeze", "transpose", "t")


class Recorder(TorchFunctionMode):
    """While it is active, calls on what stands for recorded values are recorded too.

    known    what each stand-in stands for, by its identity
    pending  by its memory, a tensor that values are still to be added to, these, and rows that are to be overwritten
    """

    def __init__(self, weights: Sequence[Lazy] = ()) -> None:
        super().__init__()
        self.known: dict[int, Lazy] = {id(w.like): w for w in weights}
        self.pending: dict[int, tuple[Tensor, list[Lazy], list[Lazy]]] = {}
        self.equal: dict[tuple[Any, ...], Tensor] = {}
        self.kept: list[Any] = []

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = NAMES.get(getattr(function, "__name__", ""), getattr(function, "__name__", ""))
        with torch._C.DisableTorchFunction():  # the export's modes look at every size that is asked for
            result = self._recorded(function, name, args, kwargs)
        if result is not NotImplemented:
            return result
        self._settle(args, kwargs)
        return function(*args, **kwargs)

    def _recorded(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """What the model's code gets for a call that is not made now; NotImplemented: it is made."""
        lazies = any(id(leaf) in self.known for leaf in leaves((args, kwargs)))
        if not lazies and not self._starts(name, args, kwargs):
            return NotImplemented
        given, named = self._seen(args), self._seen(kwargs)
        handler = getattr(self, f"_on_{name.strip('_')}", None)
        result = NotImplemented if handler is None else handler(function, name, given, named)
        if result is NotImplemented and lazies:
            return self._record(function, name, given, named)
        return result

    def _seen(self, value: Any) -> Any:
        """Arguments with what was recorded in place of stand-ins."""
        return mapped(value, lambda leaf: self.known.get(id(leaf), leaf))

    def _starts(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a call on traced tensors is recorded."""
        return False

    def _new(
        self, kind: str, args: tuple[Any, ...], like: Tensor, rows: Rows | None = None, name: str = "",
        function: Callable[..., Any] | None = None, kwargs: dict[str, Any] | None = None,
    ) -> Tensor:  # fmt: skip
        self.known[id(like)] = Lazy(kind, function, args, kwargs or {}, like, rows, name)
        return like

    def _once(self, kind: str, args: tuple[Any, ...], like: Tensor) -> Tensor:
        """As _new; equal calls have one stand-in, as conditions are known by their identity."""
        key = (kind, *(id(a) if isinstance(a, Tensor | Lazy) else str(a) for a in args))
        if key not in self.equal:
            self.kept.append(args)
            self.equal[key] = self._new(kind, args, like)
        return self.equal[key]

    def _record(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        """A call on recorded values: kept, or made with their traced values where it is not known."""
        base = name[:-1] if name.endswith("_") and not name.startswith("_") else name
        if base not in KNOWN or (base != "add" and self._is_sum(args)):
            return self._traced(function, name, args, kwargs)
        if kwargs.get("inplace"):
            refuse(f"{name} writes to what an expert computes in place")
        rows = self._rows_of(name, (args, kwargs))
        if base != name:
            function = getattr(Tensor, FUNCTIONAL.get(base, base))
        likes = mapped((args, kwargs), lambda x: x.like if isinstance(x, Lazy) else x)
        result = run_on_meta(function, *likes)
        if base in PARTS:
            return tuple(
                self._new("op", (*args, i), part, rows, base, function, kwargs)
                for i, part in enumerate(result)
            )
        if base != name:
            return self._overwrite(args[0], base, function, args, kwargs, result)
        return self._new("op", tuple(args), result, rows, base, function, kwargs)

    def _overwrite(
        self, target: Any, name: str, function: Callable[..., Any], args: Any, kwargs: Any, result: Tensor
    ) -> Tensor:
        """A write in place: the stand-in means the new value from here on."""
        if not isinstance(target, Lazy):
            traced = self._add_later(target, name, args, kwargs)
            return (
                traced
                if traced is not None
                else self._traced(getattr(Tensor, f"{name}_"), name, args, kwargs)
            )
        if target.name in VIEWS:
            refuse(f"{name} writes in place to a part of what an expert computes")
        value = Lazy("op", function, tuple(args), kwargs, target.like, target.rows, name)
        old = Lazy(**{**vars(target), "like": result})
        value.args = (old, *args[1:])
        self.kept.append(target)
        self.known[id(target.like)] = value
        return target.like

    def _rows_of(self, name: str, values: Any) -> Rows | None:
        found = {x.rows for x in leaves(values) if isinstance(x, Lazy) and x.rows is not None}
        if len(found) > 1:
            refuse(f"{name} joins rows that different conditions chose")
        return next(iter(found), None)

    def _traced(self, function: Callable[..., Any], name: str, args: Any, kwargs: Any) -> Any:
        for x in leaves((args, kwargs)):
            if isinstance(x, Lazy) and (x.rows is not None or x.kind == "hit"):
                refuse(f"{name.strip('_')} of what an expert computes for the tokens that chose it")
        with torch._C._EnableTorchFunction():
            real = mapped((args, kwargs), lambda x: self._value(x) if isinstance(x, Lazy) else x)
            self._settle(*real)
            return function(*real[0], **real[1])

    def _value(self, value: Lazy) -> Tensor:
        """The traced value of a recorded one without rows."""
        terms, others = self._terms(value)
        if len(terms) < 2:
            result = Lifter().lift([value]).value[0]
        else:
            result = self._total(terms)
            for other in others:
                result = result + other
        self.known[id(value.like)] = value
        return result

    def _total(self, terms: list[Lazy]) -> Tensor:
        """The sum of recorded values, as one computation if they are one, in the order of their experts."""
        numbers = [number_of(term) for term in terms]
        if None not in numbers:
            terms = [terms[i] for i in sorted(range(len(terms)), key=lambda i: numbers[i] or 0)]
        try:
            lifted = Lifter().lift(terms).value
            return (
                lifted.sum(0, dtype=lifted.dtype)
                if len(terms) == lifted.shape[0] > 1
                else lifted[0] * len(terms)
            )
        except Unlike:
            total = Lifter().lift(terms[:1]).value[0]
            for term in terms[1:]:
                total = total + Lifter().lift([term]).value[0]
            return total

    def _is_sum(self, args: Any) -> bool:
        return any(isinstance(x, Lazy) and len(self._terms(x)[0]) > 1 for x in leaves(args))

    def _terms(self, value: Lazy) -> tuple[list[Lazy], list[Any]]:
        """Recorded summands of a chain of sums, in order, and the others."""
        terms: list[Lazy] = []
        others: list[Any] = []
        pending: list[Any] = [value]
        while pending:
            one = pending.pop()
            if not isinstance(one, Lazy):
                others.append(one)
            elif (
                one.kind == "op"
                and one.name == "add"
                and one.rows is None
                and len(one.args) == 2
                and not one.kwargs
            ):
                pending += [one.args[1], one.args[0]]
            else:
                terms.append(one)
        return terms, others

    def _settle(self, *values: Any) -> None:
        """Trace what was added to tensors that a call reads."""
        if not self.pending:
            return
        for leaf in leaves(values):
            if isinstance(leaf, Tensor) and id(leaf) not in self.known:
                found = self.pending.pop(memory(leaf), None)
                if found is not None:
                    self._flush(*found)

    def _flush(self, target: Tensor, terms: list[Lazy], puts: list[Lazy]) -> None:
        if puts:
            held = Lifter().condition([p.args[0].rows for p in puts]).any(0)
            target.masked_fill_(held.reshape(held.shape + (1,) * (target.dim() - held.dim())), 0)
        total = self._total([*terms, *puts])
        target.add_(total.to(target.dtype))

    def _add_later(self, target: Any, name: str, args: Any, kwargs: Any) -> Tensor | None:
        """target += value of an expert."""
        if name != "add" or kwargs or len(args) != 2 or not isinstance(target, Tensor):
            return None
        value = args[1]
        if value.rows is not None:
            refuse("what an expert computes for the tokens that chose it is added to all tokens")
        return self._wait(target, value)

    def _wait(self, target: Tensor, value: Lazy, is_put: bool = False) -> Tensor:
        _, terms, puts = self.pending.setdefault(memory(target), (target, [], []))
        if (puts and not is_put) or (terms and is_put):
            refuse("a loop both adds to rows and overwrites them")
        (puts if is_put else terms).append(value)
        return target


def number_of(value: Any) -> int | None:
    """Of the expert whose weights, part or condition a recorded value reads, as far as one is found."""
    pending, seen = [value], set[int]()
    while pending:
        one = pending.pop()
        if not isinstance(one, Lazy) or id(one) in seen:
            continue
        seen.add(id(one))
        if one.kind in ("weight", "equal"):
            return int(one.args[1])
        if one.kind == "select":
            return next(int(entry) for entry in one.args[1] if type(entry) is int)
        pending += [*leaves(one.args), *([] if one.rows is None else [one.rows.condition])]
    return None


def memory(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)
