"""Where a value lies along each axis of a mesh, and the collective that brings it to where it is wanted."""

from dataclasses import dataclass, replace
from typing import Literal

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.mesh import AXES

# Along one axis: None, the same on every rank; "partial", the value is the sum over the ranks; a number, every rank has
# an equal part of that dimension; "tokens", every rank has the rows of its own requests.
Where = int | None | Literal["partial", "tokens"]


@dataclass(frozen=True)
class Placement:
    """Of one value. Dimensions count from the first, in the graph's shapes."""

    dp: Where = None
    ep: Where = None
    tp: Where = None

    def along(self, axis: str) -> Where:
        found: Where = getattr(self, axis)
        return found

    def at(self, axis: str, where: Where) -> "Placement":
        return replace(self, **{axis: where})

    def __str__(self) -> str:
        parts = [f"{axis} {text(self.along(axis))}" for axis in AXES if self.along(axis) is not None]
        return ", ".join(parts) or "replicated"


REPLICATED = Placement()


def text(where: Where) -> str:
    """For people: "replicated", "sharded(1)", "partial", "own tokens"."""
    if where is None:
        return "replicated"
    if where == "tokens":
        return "own tokens"
    return where if isinstance(where, str) else f"sharded({where})"


def collective(has: Where, wants: Where) -> str:
    """The collective that changes one placement along an axis into another.

    Raises IllegalGraphError where there is none: what every rank has whole would count once a rank as part of a sum,
    and rows of different requests are not parts of one value.
    """
    if has == "partial" and wants is None:
        return "all_reduce"
    if has == "partial" and isinstance(wants, int):
        return "reduce_scatter"
    if isinstance(has, int) and wants is None:
        return "all_gather"
    raise IllegalGraphError(f"no collective makes a value {text(wants)} that is {text(has)}")
