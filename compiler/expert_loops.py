"""Loops over experts at capture: what their bodies do is recorded once an expert, and traced once for all.

A loop asks which tokens chose an expert (`torch.where`, `nonzero`, a boolean index), which torch.export cannot follow,
and does so for hundreds of experts. While this mode is active such places, parts of stacked weights, and weights of
experts that lie apart (few_experts) are recorded (lazy_values); when the tensor that the loop adds to is read, all
experts are traced together (lift_experts). Whether an expert got any token may be asked: it is taken to have, since
what it makes of none is added nowhere. Nothing else about the number may be asked.
"""

from collections.abc import Callable, Iterator, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from octavo.compiler.expert_template import Template
from octavo.compiler.lazy_values import (
    ROWS,
    Lazy,
    Rows,
    Unlike,
    empty_on_meta,
    leaves,
    refuse,
    run_on_meta,
)
from octavo.compiler.lift_experts import CASTS, RESHAPES, UNCHANGED, Lifter
from octavo.compiler.recorder import memory
from octavo.compiler.recorder_questions import Questions

PLACES = ("where", "nonzero", "argwhere")


class ExpertLoops(Questions):
    """counts: numbers of experts of the model's stacks; weights: stand-ins for weights of experts that lie apart."""

    def __init__(self, counts: frozenset[int], weights: Sequence[Lazy] = ()) -> None:
        super().__init__(weights)
        self.counts = counts
        self.rows: dict[int, Rows] = {}
        self.templates: dict[object, Template] = {}

    def _starts(self, name: str, args: Any, kwargs: Any) -> bool:
        """Whether a call on traced tensors asks what is known in a loop only."""
        first = args[0] if args else None
        if not isinstance(first, Tensor):
            return False
        if name == "bincount":
            return kwargs.get("minlength", 0) in self.counts
        if name == "eq":
            return (
                self._is_number_of_expert(args[1]) and not first.dtype.is_floating_point and first.dim() > 0
            )
        if name == "getitem":
            return self._has_mask(args[1]) or self._is_part(first, args[1])
        return name in PLACES and len(args) == 1 and first.dim() > 0

    def _is_number_of_expert(self, value: Any) -> bool:
        return type(value) is int and 0 <= value < max(self.counts, default=0)

    def _has_mask(self, index: Any) -> bool:
        return any(isinstance(i, Tensor) and i.dtype is torch.bool for i in leaves(index))

    def _is_part(self, source: Tensor, index: Any) -> bool:
        """One number along an axis of the size of a stack, and nothing but whole axes beside it."""
        entries = self._entries(index, source.dim())
        numbers = [i for i in entries if type(i) is int]
        plain = all(type(i) is int or i is None or i == slice(None) for i in entries)
        if len(numbers) != 1 or not plain or source.dim() < 2:
            return False
        axis = [i for i in entries if i is not None].index(numbers[0])
        size = source.shape[axis]
        return isinstance(size, int) and size in self.counts

    def _entries(self, index: Any, rank: int) -> list[Any]:
        """An index with an entry for each axis."""
        entries = list(index) if isinstance(index, tuple) else [index]
        used = sum(self._width(e) for e in entries if e is not None and e is not Ellipsis)
        rest = [slice(None)] * (rank - used)
        for i, entry in enumerate(entries):
            if isinstance(entry, EllipsisType):
                return [*entries[:i], *rest, *entries[i + 1 :]]
        return [*entries, *rest]

    def _width(self, entry: Any) -> int:
        like = entry.like if isinstance(entry, Lazy) else entry
        return int(like.dim()) if isinstance(like, Tensor) and like.dtype is torch.bool else 1

    def of_expert(self, key: object, number: int, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What expert `number` of a list of equal ones makes of its arguments; the first two run, and must agree."""
        with torch._C.DisableTorchFunction():
            given = [self.known.get(id(leaf), leaf) for leaf in leaves((args, kwargs))]
            template = self.templates.setdefault(key, Template())
            if template.fits(given):
                v = template.of(number, given)
                return self._new(v.kind, v.args, v.like, v.rows, v.name, v.function, v.kwargs)
        result = forward(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            template.learn(number, given, self.known.get(id(result)))
        return result

    def _on_eq(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        value, number = args
        if isinstance(value, Lazy) and value.kind == "hit":
            return int(value.args[0]) == int(number)
        if isinstance(value, Lazy) and value.kind == "number":
            return NotImplemented
        if not self._is_number_of_expert(number) or (isinstance(value, Lazy) and value.rows is not None):
            return NotImplemented
        if isinstance(value, Lazy) and value.like.dtype.is_floating_point:
            return NotImplemented
        like = run_on_meta(torch.eq, (value.like if isinstance(value, Lazy) else value, number), {})
        return self._once("equal", (value, number), like)

    def _on_where(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        return self._places(args[0]) if len(args) == 1 and not kwargs else NotImplemented

    def _on_nonzero(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        condition, as_tuple = args[0], kwargs.get("as_tuple", len(args) > 1 and args[1])
        like = condition.like if isinstance(condition, Lazy) else condition
        if like.dim() == 1 and isinstance(like.shape[0], int) and like.shape[0] in self.counts:
            return self._hits(condition)
        places = self._places(condition)
        if as_tuple:
            return places
        if len(places) > 1:
            refuse("nonzero of a condition with several axes; use torch.where or as_tuple=True")
        (place,) = (self.known[id(p)] for p in places)
        like = empty_on_meta((ROWS, 1), torch.int64)
        return self._new("op", (place, -1), like, place.rows, "unsqueeze", Tensor.unsqueeze)

    _on_argwhere = _on_nonzero

    def _on_bincount(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        count = kwargs["minlength"]
        return self._new("counts", (args[0], count), empty_on_meta((count,), torch.int64))

    def _hits(self, condition: Any) -> Tensor:
        count = (condition.like if isinstance(condition, Lazy) else condition).shape[0]
        return self._new("hits", (condition, int(count)), empty_on_meta((ROWS, 1), torch.int64))

    def _on_iter(self, function: Any, name: str, args: Any, kwargs: Any) -> Iterator[Tensor]:
        hits = args[0]
        if hits.kind != "hits":
            refuse("a loop goes over what an expert computes")
        condition, count = hits.args
        shape = hits.like.shape[1:]
        return iter(
            [self._new("hit", (e, condition), empty_on_meta(shape, torch.int64)) for e in range(count)]
        )

    def _on_unbind(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        is_loop = args[0].kind == "hits" and args[0].like.dim() > 0
        return list(self._on_iter(function, name, args, kwargs)) if is_loop else NotImplemented

    def _places(self, condition: Any) -> tuple[Tensor, ...]:
        rows = self._rows_where(condition)
        return tuple(
            self._new("place", (axis,), empty_on_meta((ROWS,), torch.int64), rows)
            for axis in range(rows.axes)
        )

    def _rows_where(self, condition: Any) -> Rows:
        if isinstance(condition, Lazy) and condition.rows is not None:
            refuse("a condition on the tokens that an expert already got")
        if id(condition) not in self.rows:
            like = condition.like if isinstance(condition, Lazy) else condition
            self.rows[id(condition)] = Rows(condition, like.dim())
            self.kept.append(condition)
        return self.rows[id(condition)]

    def _on_getitem(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        source, index = args
        if isinstance(source, Lazy) and source.kind in ("hit", "hits"):
            return self._of_hits(source, index)
        if isinstance(source, Lazy) and source.kind == "counts" and type(index) is int:
            return self._new("number", (source,), empty_on_meta((), torch.int64))
        entries = self._entries(index, (source.like if isinstance(source, Lazy) else source).dim())
        guard = next((e.args[1] for e in entries if isinstance(e, Lazy) and e.kind == "hit"), None)
        entries = [n for e in entries for n in self._numbers(e)]
        is_mask = [_is_mask(e) for e in entries]
        if any(is_mask) or any(isinstance(e, Lazy) for e in entries):
            return self._gather(source, entries, is_mask)
        if not isinstance(source, Lazy) and self._is_part(source, tuple(entries)):
            like = run_on_meta(Tensor.__getitem__, (source, tuple(entries)), {})
            return self._once("select", (source, tuple(entries), guard), like)
        return NotImplemented

    def _numbers(self, entry: Any) -> list[Any]:
        """A number of an expert in place of what stands for it; one of shape (1,) leaves an axis of size one."""
        if not isinstance(entry, Lazy) or entry.kind != "hit":
            return [entry]
        return [*[None] * entry.like.dim(), entry.args[0]]

    def _of_hits(self, source: Lazy, index: Any) -> Tensor:
        like = run_on_meta(Tensor.__getitem__, (source.like, index), {})
        if source.kind == "hits" and like.dim() == 0:
            refuse("one of the experts that are hit is taken by its place")
        return self._new(source.kind, source.args, like)

    def _gather(self, source: Any, entries: list[Any], is_mask: list[bool]) -> Tensor:
        rows: Rows | None = None
        places: list[Any] = []
        for entry, mask in zip(entries, is_mask, strict=True):
            if mask:
                places += self._places_of(entry)
                rows = places[-1].rows
            elif isinstance(entry, Lazy):
                place = _place(entry)
                rows = place.rows
                places.append(place)
            else:
                places.append(entry)
        chosen = {e.rows for e in places if isinstance(e, Lazy)}
        if len(chosen) != 1 or (isinstance(source, Lazy) and source.rows is not None):
            refuse("rows are indexed by what different conditions chose")
        waiting = not isinstance(source, Lazy) and memory(source) in self.pending
        index = tuple(e.like if isinstance(e, Lazy) else e for e in places)
        like = run_on_meta(
            Tensor.__getitem__, (source.like if isinstance(source, Lazy) else source, index), {}
        )
        return self._new("rows", (source, tuple(places)), like, rows, "waiting" if waiting else "")

    def _on_setitem(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        target, index, value = args
        if isinstance(target, Lazy):
            refuse("a part of what an expert computes is overwritten")
        if not isinstance(value, Lazy):
            return NotImplemented
        entries = self._entries(index, target.dim())
        places = [p for e in entries for p in self._places_of(e)]
        if not places or any(p.rows is not value.rows for p in places):
            refuse("what an expert computes is stored in rows that another condition chose")
        axes = tuple(p.args[0] for p in places)
        if value.kind == "op" and value.name == "add" and len(value.args) == 2:
            old = [a for a in value.args if isinstance(a, Lazy) and a.kind == "rows" and a.args[0] is target]
            if len(old) == 1:
                added = value.args[1] if value.args[0] is old[0] else value.args[0]
                self._wait(target, self._spread(target, added, axes, value.rows))
                return None
        condition = None if value.rows is None or len(axes) < value.rows.axes else value.rows.condition
        # A slot holds one expert: no two experts write to one place.
        if not isinstance(condition, Lazy) or condition.kind != "equal":
            refuse("rows of the result are overwritten by what an expert computes; add to them")
        self._wait(target, self._spread(target, value, axes, value.rows), is_put=True)
        return None

    def _places_of(self, entry: Any) -> list[Lazy]:
        if _is_mask(entry):
            rows, like = self._rows_where(entry), empty_on_meta((ROWS,), torch.int64)
            return [Lazy("place", None, (axis,), {}, like, rows) for axis in range(rows.axes)]
        return [_place(entry)] if isinstance(entry, Lazy) else []

    def _spread(self, target: Tensor, value: Any, axes: tuple[int, ...], rows: Rows | None) -> Lazy:
        if not isinstance(value, Lazy) or value.rows is None or value.rows is not rows:
            refuse("something else than what an expert computes for its rows is added to them")
        if list(axes) != sorted(axes):
            refuse("rows are stored along the axes of a condition in another order")
        like = empty_on_meta(target.shape, value.like.dtype)
        return self.known[id(self._new("spread", (value, axes), like))]

    def _on_index_add(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        names = ("input", "dim", "index", "source", "alpha")
        given = {
            **dict(zip(names, args, strict=False)),
            **{k.replace("self", "input"): v for k, v in kwargs.items()},
        }
        given["source"] = given.get("source", given.get("tensor"))
        target, index, source = given["input"], given["index"], given["source"]
        is_new = not name.endswith("_")
        in_rows = isinstance(target, Lazy) and (target.rows is not None or not is_new)
        if in_rows or not isinstance(index, Lazy) or given.get("alpha", 1) != 1 or given["dim"] != 0:
            refuse("index_add of something else than an expert's rows to the tokens")
        tokens: Tensor = target.like if isinstance(target, Lazy) else target
        value = self._spread(tokens, source, (_place(index).args[0],), _place(index).rows)
        if not is_new:
            return self._wait(tokens, value)
        like = run_on_meta(torch.add, (tokens, value.like), {})
        return self._new("op", (target, value), like, None, "add", torch.add)

    def _on_stack(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        return self._of_all(args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0))

    def _on_cat(self, function: Any, name: str, args: Any, kwargs: Any) -> Any:
        axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        is_stack = all(isinstance(v, Lazy) and v.like.shape[axis] == 1 for v in args[0])
        return self._of_all(args[0], axis, is_joined=True) if is_stack else NotImplemented

    def _of_all(self, values: Sequence[Any], axis: int, is_joined: bool = False) -> Any:
        """What all experts make, along a new axis, or an axis of size one."""
        if not all(isinstance(v, Lazy) and v.rows is None for v in values):
            return NotImplemented
        with torch._C._EnableTorchFunction():
            try:
                whole = Lifter().lift(values).value
            except Unlike:
                return NotImplemented
            whole = whole if whole.shape[0] == len(values) else whole.expand(len(values), *whole.shape[1:])
            if is_joined:
                whole = whole.squeeze(1 + axis if axis >= 0 else axis)
            return whole.movedim(0, axis)


def _is_mask(entry: Any) -> bool:
    like = entry.like if isinstance(entry, Lazy) else entry
    return isinstance(like, Tensor) and like.dtype is torch.bool


def _place(entry: Lazy) -> Lazy:
    """The places below reshapes and conversions of an index."""
    while entry.kind == "op" and entry.name in (*CASTS, *RESHAPES, *UNCHANGED, "getitem"):
        entry = entry.args[0]
    if entry.kind != "place":
        refuse("rows are indexed by what was computed from places")
    return entry
