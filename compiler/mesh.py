"""Ranks and the axes that they lie along: which of them share a batch, an expert's part or a head."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

AXES = ("dp", "ep", "tp")


@dataclass(frozen=True)
class Mesh:
    """Sizes of the axes, the outermost first: rank = (d * ep + e) * tp + t.

    dp  ranks along it have requests of their own
    ep  ranks along it compute the same tokens with the same weights, but for the experts
    tp  ranks along it compute the same tokens, each with a part of every head count, width and expert
    Experts are spread over all ranks, or, where there is only tp, cut along their width.
    """

    dp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        return self.dp * self.ep * self.tp

    def size(self, axis: str) -> int:
        size: int = getattr(self, axis)
        return size

    def coordinates(self, rank: int) -> dict[str, int]:
        """{"dp": d, "ep": e, "tp": t} of a rank."""
        rest, t = divmod(rank, self.tp)
        d, e = divmod(rest, self.ep)
        return {"dp": d, "ep": e, "tp": t}

    def rank(self, d: int = 0, e: int = 0, t: int = 0) -> int:
        return (d * self.ep + e) * self.tp + t

    def group(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from this one along an axis only, in the order of their coordinates."""
        own = self.coordinates(rank)
        return tuple(
            self.rank(*({**own, axis: place}[name] for name in AXES)) for place in range(self.size(axis))
        )

    def groups(self, axis: str) -> Iterator[tuple[int, ...]]:
        """Every group of an axis, in the order of their first ranks."""
        others = [name for name in AXES if name != axis]
        for places in product(*(range(self.size(name)) for name in others)):
            own = dict(zip(others, places, strict=True))
            yield self.group(self.rank(*(own.get(name, 0) for name in AXES)), axis)

    def __str__(self) -> str:
        return " x ".join(f"{name} {self.size(name)}" for name in AXES)


ONE_RANK = Mesh()
