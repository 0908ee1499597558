"""Recorded values of all experts  ->  one traced computation with an axis of experts in front.

A value of rows that a condition chose is computed for every place of the condition, (E, places, ...), and counts where
the condition holds. So the traced graph is the dense form of the loop, equal to it for any routing; fuse_moe makes of
it what computes the chosen rows only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.compiler.lazy_values import ROWS, TOKENS, Lazy, Rows, Unlike, leaves, refuse

CASTS = frozenset("to float double half bfloat16 type type_as int long bool _to_copy".split())
UNCHANGED = frozenset("contiguous clone detach dropout alias positive cpu cuda".split())
RESHAPES = frozenset("view reshape unsqueeze squeeze flatten unflatten view_as reshape_as".split())
ELEMENTWISE = frozenset(
    "add sub rsub mul div true_divide neg pow square sqrt rsqrt exp log abs silu gelu relu relu6 sigmoid tanh softplus "
    "mish elu leaky_relu hardswish hardsigmoid hardtanh erf clamp clamp_min clamp_max clip minimum maximum where eq ne "
    "lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not and or xor invert masked_fill "
    "reciprocal".split()
)
PRODUCTS = frozenset("linear matmul mm".split())
TRANSPOSES = frozenset("t transpose permute swapaxes T mT".split())
REDUCTIONS = frozenset("sum mean any all amax amin softmax".split())
PARTS = frozenset("chunk split unbind tensor_split".split())
KNOWN = (
    CASTS
    | UNCHANGED
    | RESHAPES
    | ELEMENTWISE
    | PRODUCTS
    | TRANSPOSES
    | REDUCTIONS
    | PARTS
    | {"getitem", "cat", "expand"}
)


@dataclass(frozen=True)
class Lifted:
    """(E or 1, axes of the rows' condition, sizes of the value without its rows); axes: 0 for a value without rows."""

    value: Tensor
    axes: int = 0


class Lifter:
    """Lifts values of `count` experts; what was lifted once is there."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, ...], Lifted] = {}
        self.kept: list[Any] = []

    def lift(self, values: Sequence[Any]) -> Lifted:
        """values: one of each expert. Raises Unlike where they are not one computation."""
        if len(values) > 1 and all(v is values[0] for v in values):
            return self.lift(values[:1])
        key = tuple(map(id, values))
        if key not in self.known:
            self.known[key] = self._lift(values)
            self.kept.append(values)
        return self.known[key]

    def _lift(self, values: Sequence[Any]) -> Lifted:
        first = values[0]
        if not isinstance(first, Lazy):
            if any(not isinstance(v, Tensor) or v.shape != first.shape for v in values):
                raise Unlike("their tensors have different sizes")
            return Lifted(first[None] if len(values) == 1 else torch.stack(list(values)))
        if any(not isinstance(v, Lazy) or (v.kind, v.name) != (first.kind, first.name) for v in values):
            raise Unlike("they call different functions")
        lift: Callable[[Sequence[Lazy]], Lifted] = getattr(self, f"_{first.kind}")
        return lift(values)

    def _weight(self, values: Sequence[Lazy]) -> Lifted:
        stack = values[0].args[0]
        if any(v.args[0] is not stack for v in values):
            raise Unlike("their weights come from different lists")
        return Lifted(_chosen(stack(), 0, [v.args[1] for v in values]))

    def _select(self, values: Sequence[Lazy]) -> Lifted:
        source, entries, guard = values[0].args
        place = next(i for i, entry in enumerate(entries) if type(entry) is int)
        for v in values:
            if v.args[0] is not source or len(v.args[1]) != len(entries):
                raise Unlike("their parts are of different tensors")
        numbers = [int(v.args[1][place]) for v in values]
        whole = source[(*entries[:place], slice(None), *entries[place + 1 :])]
        axis = sum(entry is None or isinstance(entry, slice) for entry in entries[:place])
        result = _chosen(whole.movedim(axis, 0) if axis else whole, 0, numbers)
        if guard is not None and not result.dtype.is_floating_point:
            reached = _chosen(guard, 0, numbers).to(torch.bool)
            result = (
                result * reached.reshape(-1, *[1] * (result.dim() - 1))
                if result.dtype != torch.bool
                else (result & reached.reshape(-1, *[1] * (result.dim() - 1)))
            )
        return Lifted(result)

    def _equal(self, values: Sequence[Lazy]) -> Lifted:
        operand = self.lift([v.args[0] for v in values]).value
        numbers = torch.tensor([v.args[1] for v in values], device=operand.device)
        if [v.args[1] for v in values] == list(range(len(values))):
            numbers = torch.arange(len(values), device=operand.device)
        return Lifted(operand == numbers.reshape(-1, *[1] * (operand.dim() - 1)))

    def _counts(self, values: Sequence[Lazy]) -> Lifted:
        ids, count = values[0].args
        of_each = torch.nn.functional.one_hot(self.lift([ids]).value.flatten(), count).sum(0)
        return Lifted(of_each[None])

    def _place(self, values: Sequence[Lazy]) -> Lifted:
        refuse("the places in which a condition holds are used as numbers, not as an index")

    def _hit(self, values: Sequence[Lazy]) -> Lifted:
        refuse("the number of an expert that is hit is used as a value")

    def condition(self, rows: Sequence[Rows]) -> Tensor:
        """(E or 1, axes of the condition), bool."""
        return self.lift([r.condition for r in rows]).value.to(torch.bool)

    def _rows(self, values: Sequence[Lazy]) -> Lifted:
        """source[entries]: the axes that places index come to the front, in the order of the condition."""
        entries, axes = values[0].args[1], values[0].rows.axes  # type: ignore[union-attr]
        if values[0].name:
            refuse("an expert reads rows that other experts were added to")
        numbers = [[e for e in v.args[1] if type(e) is int] for v in values]
        if any(len(v.args[1]) != len(entries) for v in values):
            raise Unlike("their rows are of different tensors")
        source = self.lift([v.args[0] for v in values]).value  # (E | 1, sizes)
        index: list[Any] = []
        kept: list[Any] = []  # for each axis that is left: the axis of the condition, or None
        for entry in entries:
            if type(entry) is int:
                index.append(entry)
            else:
                index.append(slice(None) if isinstance(entry, Lazy) else entry)
                kept.append(entry.args[0] if isinstance(entry, Lazy) else None)
        place = next((i for i, entry in enumerate(index) if type(entry) is int), None)
        if place is None:
            result = source[(slice(None), *index)]
        elif len(numbers[0]) > 1 or source.shape[0] != 1:
            refuse("a value with rows is indexed by several numbers")
        else:
            whole = source[0][(*index[:place], slice(None), *index[place + 1 :])]
            axis = sum(i is None or isinstance(i, slice) for i in index[:place])
            result = _chosen(whole.movedim(axis, 0) if axis else whole, 0, [n[0] for n in numbers])
        kept += [None] * (result.dim() - 1 - len(kept))
        rest = [i for i, k in enumerate(kept) if k is None]
        order = [kept.index(axis) for axis in range(axes) if axis in kept]
        result = result.permute(0, *(1 + i for i in (*order, *rest)))
        for axis in range(axes):
            if axis not in kept:
                result = result.unsqueeze(1 + axis)
        return Lifted(result, axes)

    def _spread(self, values: Sequence[Lazy]) -> Lifted:
        """Rows back at their places, zero elsewhere, summed over the axes of the condition that do not stay."""
        source = self.lift([v.args[0] for v in values])
        held = self.condition([v.args[0].rows for v in values])
        rest = source.value.dim() - 1 - source.axes
        kept = torch.where(held.reshape(held.shape + (1,) * rest), source.value, 0)
        gone = [1 + axis for axis in range(source.axes) if axis not in values[0].args[1]]
        return Lifted(kept.sum(gone) if gone else kept)

    def _op(self, values: Sequence[Lazy]) -> Lifted:
        first = values[0]
        args, axes = self._arguments(values)
        name, like = first.name, first.like
        if name in CASTS:
            return Lifted(args[0].to(like.dtype), axes)
        if name in UNCHANGED:
            return Lifted(args[0], axes)
        if name in RESHAPES:
            return Lifted(args[0].reshape(*args[0].shape[: 1 + axes], *_rest(like, axes, args[0])), axes)
        if name in PRODUCTS:
            return Lifted(_product(name, args), axes)
        if name in TRANSPOSES:
            return Lifted(_transposed(first, args, axes), axes)
        if name in PARTS:
            return Lifted(_parts(first, args[0])[first.args[-1]], axes)
        if name == "getitem":
            entries = first.args[1] if isinstance(first.args[1], tuple) else (first.args[1],)
            if axes and _row_axis(first.args[0].like):
                refuse("rows that an expert gets are indexed behind another axis")
            lead = (slice(None),) * (1 + axes) if entries[0] is not Ellipsis else ()
            return Lifted(args[0][(*lead, *(entries[1:] if axes and lead else entries))], axes)
        if name == "cat":
            return Lifted(torch.cat(args[0], _from_the_end(first, like)), axes)
        if name == "expand":
            return Lifted(args[0].expand(*args[0].shape[: 1 + axes], *_rest(like, axes, args[0])), axes)
        if name in REDUCTIONS:
            return Lifted(_reduced(first, args[0]), axes)
        function = first.function
        assert function is not None
        return Lifted(function(*args, **self._keywords(first)), axes)

    def _keywords(self, value: Lazy) -> dict[str, Any]:
        return {k: v for k, v in value.kwargs.items() if k not in ("out", "inplace")}

    def _arguments(self, values: Sequence[Lazy]) -> tuple[list[Any], int]:
        """Lifted arguments, aligned from the right, and the axes of their condition."""
        first = values[0]
        axes = 0 if first.rows is None else first.rows.axes
        lifted: list[Any] = []
        for index in range(len(first.args)):
            group = [v.args[index] if index < len(v.args) else None for v in values]
            lifted.append(self._argument(group))
        if any(v.kwargs.keys() != first.kwargs.keys() for v in values) or any(
            isinstance(leaf, Lazy) for leaf in leaves(first.kwargs)
        ):
            refuse(f"{first.name} takes values of an expert by name")
        aligned = first.name not in PRODUCTS
        ranks = [len(x.value.shape) - 1 - x.axes for x in _lifted(lifted)]
        has_rows = [x.axes > 0 for x in _lifted(lifted)]
        # Without its rows a value has one axis less than its stand-in.
        rank = max((r for r, h in zip(ranks, has_rows, strict=True) if h or not any(has_rows)), default=0)

        def value(x: Any) -> Any:
            if not isinstance(x, Lifted):
                return x
            return _aligned(x, axes, rank) if aligned else x.value

        return [[value(x) for x in a] if isinstance(a, list) else value(a) for a in lifted], axes

    def _argument(self, group: Sequence[Any]) -> Any:
        first = group[0]
        if isinstance(first, list | tuple) and any(isinstance(x, Lazy | Tensor) for x in first):
            return [self._argument([g[i] for g in group]) for i in range(len(first))]
        if isinstance(first, Lazy | Tensor):
            return self.lift(group)
        if any(type(g) is not type(first) or not (g is first or g == first) for g in group):
            raise Unlike("their numbers differ")
        return first


def _lifted(values: Sequence[Any]) -> list[Lifted]:
    flat = [x for v in values for x in (v if isinstance(v, list) else [v])]
    return [x for x in flat if isinstance(x, Lifted)]


def _aligned(x: Lifted, axes: int, rank: int) -> Tensor:
    """With axes of size one between experts (and places) and what it has."""
    value = x.value
    own = value.dim() - 1 - x.axes
    if axes and not x.axes and own == rank + 1:
        value, own = value.squeeze(1), own - 1  # it had an axis of size one for the rows
    for _ in range(rank - own):
        value = value.unsqueeze(1 + x.axes)
    for _ in range(axes - x.axes):
        value = value.unsqueeze(1)
    return value


def _chosen(stack: Tensor, axis: int, numbers: Sequence[int]) -> Tensor:
    """Those of `numbers` along an axis: all of them in order, mostly."""
    if list(numbers) == list(range(stack.shape[axis])):
        return stack
    if len(numbers) == 1:
        return stack.narrow(axis, numbers[0] % int(stack.shape[axis]), 1)
    return torch.stack([stack.select(axis, n) for n in numbers], axis)


def _rest(like: Tensor, axes: int, value: Tensor) -> list[Any]:
    """Sizes of a stand-in without its rows; those of tokens are what is left."""
    sizes = [d for d in like.shape]
    if axes:
        place = _row_axis(like)
        if any(d != 1 for d in sizes[:place]):
            refuse("rows that an expert gets are reshaped into other rows")
        return sizes[place + 1 :] if place == 0 else [*sizes[:place], *sizes[place + 1 :]]
    numbers = [-1 if d and d % TOKENS == 0 else d for d in sizes]
    return numbers if numbers.count(-1) <= 1 else [*value.shape[1:]]


def _row_axis(like: Tensor) -> int:
    places = [i for i, d in enumerate(like.shape) if d == ROWS]
    if len(places) != 1:
        refuse(f"rows that an expert gets become {len(places)} axes")
    return places[0]


def _from_the_end(value: Lazy, like: Tensor, name: str = "dim", position: int = 1, default: int = 0) -> int:
    """An axis of a stand-in, counted from the end, where lifted values agree with it. The rows' own is refused."""
    given = value.args[position] if len(value.args) > position else value.kwargs.get(name, default)
    axis = int(given) % like.dim()
    if value.rows is not None and axis == 0:
        refuse(f"{value.name} works along the rows that an expert gets")
    return axis - like.dim()


def _product(name: str, args: Sequence[Any]) -> Tensor:
    x, weight, *bias = args
    letters = "abcdfghklmn"[: x.dim() - 2]
    if weight.dim() != 3:
        refuse(f"an expert's rows are multiplied by what has {weight.dim() - 1} axes")
    order = "eoi" if name == "linear" else "eio"
    result = torch.einsum(f"e{letters}i,{order}->e{letters}o", x, weight)
    if bias and bias[0] is not None:
        result = result + bias[0].reshape(-1, *[1] * len(letters), bias[0].shape[-1])
    return result


def _transposed(value: Lazy, args: Sequence[Any], axes: int) -> Tensor:
    if axes:
        refuse("rows that an expert gets are transposed")
    x: Tensor = args[0]
    if value.name in ("t", "T", "mT"):
        return x.transpose(-1, -2) if x.dim() == 3 else x
    rank = value.like.dim()
    dims = [d for d in leaves(list(value.args[1:]))] or list(value.kwargs.values())
    if value.name == "permute":
        return x.permute(0, *(1 + int(d) % rank for d in leaves(dims)))
    return x.transpose(*(int(d) % rank - rank for d in dims))


def _parts(value: Lazy, x: Tensor) -> Sequence[Tensor]:
    *given, _ = value.args
    source = given[0].like if isinstance(given[0], Lazy) else given[0]
    whole = Lazy("op", None, tuple(given), value.kwargs, source, value.rows, value.name)
    position = 1 if value.name == "unbind" else 2
    axis = _from_the_end(whole, source, "dim", position)
    if value.name == "unbind":
        return x.unbind(axis)
    size = given[1] if len(given) > 1 else next(v for k, v in value.kwargs.items() if k != "dim")
    parts: Sequence[Tensor] = getattr(torch, value.name)(x, size, axis)
    return parts


def _reduced(value: Lazy, x: Tensor) -> Tensor:
    source = value.args[0].like
    given = value.args[1] if len(value.args) > 1 else value.kwargs.get("dim")
    if given is None:
        refuse(f"{value.name} over all that an expert gets")
    rank = source.dim()
    dims = [int(d) % rank for d in (given if isinstance(given, tuple | list) else [given])]
    if value.rows is not None and 0 in dims:
        refuse(f"{value.name} works along the rows that an expert gets")
    kept = value.args[2] if len(value.args) > 2 else value.kwargs.get("keepdim", False)
    if value.name == "softmax":
        return x.softmax(dims[0] - rank, dtype=value.like.dtype)
    options = {"dtype": value.like.dtype} if value.name in ("sum", "mean") else {}
    axes = [d - rank for d in dims]
    single = axes[0] if value.name in ("any", "all") and len(axes) == 1 else axes
    result: Tensor = getattr(torch, value.name)(x, single, keepdim=bool(kept), **options)
    return result
