"""What a model's code asks of recorded values: sizes, dtypes, and whether any token chose an expert."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from octavo.compiler.lazy_values import (
    ROWS,
    Count,
    Lazy,
    empty_on_meta,
    leaves,
    refuse,
    run_on_meta,
    size_on_meta,
)
from octavo.compiler.lift_experts import UNCHANGED
from octavo.compiler.recorder import Recorder

ATTRIBUTES = frozenset(
    "dtype ndim layout is_sparse requires_grad is_leaf is_quantized names grad is_cuda".split()
)


class Questions(Recorder):
    """Answers from the stand-ins; numbers of chosen rows are Counts."""

    def _on_get(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        """An attribute: x.shape, x.dtype, x.T."""
        value, attribute = args[0], getattr(function, "__self__", None)
        which = getattr(attribute, "__name__", "")
        if which == "shape":
            return torch.Size([self._size(value, d) for d in value.like.shape])
        if which in ("T", "mT"):
            return self._record(getattr(Tensor, which).__get__, which, args, kwargs)
        if which == "device":
            return self._device(value)
        if which in ("data", "is_meta"):
            return value.like if which == "data" else False
        if which in ATTRIBUTES:
            return run_on_meta(function, (value.like,), {})
        refuse(f"{which} of what an expert computes")

    def _device(self, value: Lazy) -> torch.device:
        tensors = (x for x in self._below(value) if isinstance(x, Tensor))
        return next((t.device for t in tensors), torch.device("cpu"))

    def _below(self, value: Lazy) -> Iterator[Any]:
        for x in leaves((value.args, value.rows.condition if value.rows is not None else None)):
            if isinstance(x, Lazy):
                yield from self._below(x)
            elif callable(x) and value.kind == "weight":
                yield x()
            else:
                yield x

    def _size(self, value: Lazy, size: int) -> Any:
        if value.rows is not None or value.kind == "hits":
            return Count(size) if size % ROWS == 0 and size else size
        return self._symbolic(value, size)

    def _symbolic(self, value: Lazy, size: int) -> Any:
        """The traced size for which a number stands in a value of all tokens."""
        for x in self._below(value):
            for d in x.shape if isinstance(x, Tensor) else ():
                if isinstance(d, torch.SymInt) and size_on_meta(d) == size:
                    return d
        return size

    def _on_size(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        sizes = [self._size(args[0], d) for d in args[0].like.shape]
        axis = args[1] if len(args) > 1 else kwargs.get("dim")
        return torch.Size(sizes) if axis is None else sizes[axis]

    def _on_numel(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        return Count(args[0].like.numel()) if args[0].rows is not None else args[0].like.numel()

    def _on_len(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        return Count(args[0].like.shape[0])

    def _on_dim(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        return args[0].like.dim()

    def _on_is_floating_point(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        return args[0].like.is_floating_point()

    def _on_index(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        if args[0].kind != "hit":
            refuse("what an expert computes is used as a number")
        return args[0].args[0]

    _on_item = _on_int = _on_index

    def _on_tolist(self, function: Any, name: str, args: Any, kwargs: Any) -> list[Any]:
        """Tokens of each expert; numbers of experts that are hit."""
        value = args[0]
        while value.kind == "op" and value.name in UNCHANGED:
            value = value.args[0]
        if value.kind == "counts":
            return [Count(1)] * value.args[1]
        if value.kind == "hits" and value.like.dim() == 1:
            return list(range(value.args[1]))
        refuse("what an expert computes is used as a list of numbers")

    def _on_bool(self, function: Any, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a condition holds anywhere: taken to."""
        value = args[0]
        answer = _holds_somewhere(value)
        if answer is None:
            refuse(
                f"a branch depends on {value.name or value.kind} of what tokens chose; only whether any did may be "
                "asked"
            )
        return answer

    def _on_any(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        if len(args) > 1 or kwargs:
            return NotImplemented
        return self._new("some", (args[0],), empty_on_meta((), torch.bool), name=name)

    def _on_sum(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        if len(args) > 1 or kwargs or args[0].like.dtype.is_floating_point:
            return NotImplemented
        return self._new("number", (args[0],), empty_on_meta((), torch.int64), name=name)

    _on_count_nonzero = _on_sum


def _holds_somewhere(value: Lazy) -> bool | None:
    """The answer for a condition that holds somewhere; None where it is another question."""
    if value.kind in ("some", "number") and isinstance(value.args[0], Lazy):
        return True
    if value.kind == "op" and isinstance(value.args[0], Lazy) and value.args[0].kind == "number":
        count, other = Count(1), value.args[1]
        compare = {"gt": count.__gt__, "ge": count.__ge__, "lt": count.__lt__, "le": count.__le__,
                   "eq": count.__eq__, "ne": count.__ne__}.get(value.name)  # fmt: skip
        return None if compare is None or type(other) is not int else bool(compare(other))
    return None
