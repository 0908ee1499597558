"""What one expert recorded, for the others of its list: the same calls with other weights and other rows.

The modules are equal (few_experts compares their types, sizes and attributes), so they do the same. That is not taken
on trust alone: the first two run, and what the second recorded must be what the first one says of it.
"""

from typing import Any

from torch import Tensor

from octavo.compiler.lazy_values import Lazy, Rows, empty_on_meta, mapped


class Template:
    """given, result: what the expert `number` got and made; once confirmed, it speaks for all."""

    def __init__(self) -> None:
        self.number = -1
        self.given: list[Any] = []
        self.result: Lazy | None = None
        self.confirmed = False
        self.failed = False

    def learn(self, number: int, given: list[Any], result: Lazy | None) -> None:
        """What a run of expert `number` recorded: the first is kept, the second confirms it."""
        if result is None:
            self.failed = True  # traced, not recorded
        elif self.result is None:
            self.number, self.given, self.result = number, given, result
        elif number != self.number and not self.failed:
            alike = self._alike(given) and _same(self.of(number, given), result, {})
            self.confirmed, self.failed = alike, not alike

    def fits(self, given: list[Any]) -> bool:
        return self.confirmed and not self.failed and self._alike(given)

    def _alike(self, given: list[Any]) -> bool:
        return len(given) == len(self.given) and all(
            _is_like(a, b) for a, b in zip(given, self.given, strict=True)
        )

    def of(self, number: int, given: list[Any]) -> Lazy:
        """The result for expert `number`, of what it got."""
        assert self.result is not None
        known = {id(a): b for a, b in zip(self.given, given, strict=True) if isinstance(a, Lazy)}
        rows: dict[int, Rows | None] = {id(a.rows): b.rows for a, b in zip(self.given, given, strict=True)
                                        if isinstance(a, Lazy) and a.rows is not None}  # fmt: skip

        def copied(value: Any) -> Any:
            if not isinstance(value, Lazy):
                return value
            if id(value) not in known:
                args = mapped(value.args, copied)
                if value.kind == "weight" and value.args[1] == self.number:
                    args = (value.args[0], number)
                own = rows.get(id(value.rows), value.rows)
                known[id(value)] = Lazy(
                    value.kind, value.function, args, value.kwargs, value.like, own, value.name
                )
            return known[id(value)]

        result: Lazy = copied(self.result)
        result.like = empty_on_meta(result.like.shape, result.like.dtype)
        return result


def _is_like(a: Any, b: Any) -> bool:
    if isinstance(a, Lazy) and isinstance(b, Lazy):
        same_form = (a.like.shape, a.like.dtype) == (b.like.shape, b.like.dtype)
        return same_form and (a.rows is None) == (b.rows is None)
    if isinstance(a, Tensor | Lazy) or isinstance(b, Tensor | Lazy):
        return a is b
    return type(a) is type(b) and bool(a == b)


def _same(a: Any, b: Any, seen: dict[tuple[int, int], bool]) -> bool:
    """Whether two records are of the same calls on the same values."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        return len(a) == len(b) and all(_same(x, y, seen) for x, y in zip(a, b, strict=True))
    if not (isinstance(a, Lazy) and isinstance(b, Lazy)):
        return a is b or (not isinstance(a, Tensor | Lazy) and type(a) is type(b) and bool(a == b))
    key = (id(a), id(b))
    if key not in seen:
        seen[key] = a is b or (
            (a.kind, a.name, a.rows) == (b.kind, b.name, b.rows)
            and a.function == b.function
            and _same(list(a.kwargs.items()), list(b.kwargs.items()), seen)
            and _same(a.args, b.args, seen)
        )
    return seen[key]
