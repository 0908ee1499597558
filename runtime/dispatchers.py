"""How tokens travel to the ranks of their experts, and what these made of them back. Three ways, equal results.

A dispatcher moves rows of bytes. It knows nothing of experts: `wanted` says which rank gets which token.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.compiler.errors import ExecutionError

NOBODY = -1


class Peers(Protocol):
    """The ranks along an axis, as dispatchers need them: process_group.AxisGroup."""

    @property
    def size(self) -> int: ...

    @property
    def coordinate(self) -> int: ...

    def all_gather(self, x: Tensor) -> Tensor: ...

    def exchange(
        self, x: Tensor, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor: ...


class Dispatcher(Protocol):
    """Every rank calls both, whether or not it has tokens. T tokens of this rank, D ranks."""

    def send(self, payload: Tensor, wanted: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Rows (M, bytes) u8 of what came, and whose they are (M,) i64, NOBODY for rows that hold nothing but zeros.

        payload  (T, bytes) u8; wanted (T, D) bool: which rank gets which
        counts   tokens of each rank: as many on every rank
        Those that hold something are in the order of (rank, token).
        """
        ...

    def send_back(self, parts: Tensor, source: Tensor, wanted: Tensor) -> list[Tensor]:
        """From each rank in turn, what it made of the tokens that `wanted` sent there, in their order; rows behind
        those mean nothing.

        parts  (N, H), row for row of source (N,) i64: whose it is. Those of NOBODY come last
        """
        ...


class AllGather:
    """Everybody sees everything and takes its own. The reference: D times the bytes that are needed."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def send(self, payload: Tensor, wanted: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        own = torch.cat((payload, wanted.to(torch.uint8)), -1)
        padded = own.new_zeros((max(counts), own.shape[-1]))
        padded[: len(own)] = own
        gathered = self._peers.all_gather(padded)  # padding is wanted by nobody
        mine = gathered[..., payload.shape[-1] + self._peers.coordinate].bool()
        source, token = torch.where(mine)
        return gathered[source, token, : payload.shape[-1]], source

    def send_back(self, parts: Tensor, source: Tensor, wanted: Tensor) -> list[Tensor]:
        all_parts, all_sources = self._peers.all_gather(parts), self._peers.all_gather(source)
        mine = all_sources == self._peers.coordinate
        return [part[of_rank] for part, of_rank in zip(all_parts, mine, strict=True)]


class AllToAll:
    """Exactly the rows that are needed; how many is exchanged first."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    def send(self, payload: Tensor, wanted: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        sends = wanted.sum(0)
        receives = self._peers.exchange(sends)
        tokens = torch.where(wanted.T)[1]  # those for the first rank, then those for the next
        rows = self._peers.exchange(payload[tokens], sends.tolist(), receives.tolist())
        ranks = torch.arange(self._peers.size, device=rows.device)
        return rows, ranks.repeat_interleave(receives)

    def send_back(self, parts: Tensor, source: Tensor, wanted: Tensor) -> list[Tensor]:
        sends = of_each(source, self._peers.size).tolist()
        receives = wanted.sum(0).tolist()
        return list(self._peers.exchange(parts[: sum(sends)], sends, receives).split(receives))


class Padded:
    """As many rows to every rank, however few are needed: no size depends on where tokens go, as CUDA graphs need it.

    capacity  rows to each rank, at least the most tokens that a rank has; None: the most that one has in the step
    """

    def __init__(self, peers: Peers, capacity: int | None = None) -> None:
        self._peers = peers
        self._fixed = capacity
        self._capacity = 0  # of the step

    def send(self, payload: Tensor, wanted: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        self._capacity = max(counts) if self._fixed is None else self._fixed
        if max(counts) > self._capacity:
            raise ExecutionError(
                f"dispatch: expected at most {self._capacity} tokens a rank, got {max(counts)}; "
                "give the dispatcher the capacity of the largest step"
            )
        marked = torch.cat((payload, payload.new_ones((len(payload), 1))), -1)
        place = torch.cumsum(wanted, 0) - 1
        came = self._exchange([(marked, place[:, d], wanted[:, d]) for d in range(self._peers.size)])
        ranks = torch.arange(self._peers.size, device=came.device).repeat_interleave(self._capacity)
        return came[:, :-1], torch.where(came[:, -1] > 0, ranks, NOBODY)

    def send_back(self, parts: Tensor, source: Tensor, wanted: Tensor) -> list[Tensor]:
        sizes = of_each(source, self._peers.size)
        first = torch.cumsum(sizes, 0) - sizes
        row = torch.arange(len(parts), device=parts.device)
        mine = [(parts, row - first[d], source == d) for d in range(self._peers.size)]
        return list(
            self._exchange(mine).chunk(self._peers.size) if self._capacity else [parts[:0]] * len(mine)
        )

    def _exchange(self, rows: Sequence[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
        """To each rank its rows at their places, those that are chosen: (rows, places, chosen)."""
        kind = rows[0][0]
        buffer = kind.new_zeros((self._peers.size, self._capacity + 1, kind.shape[-1]))
        for rank, (own, place, chosen) in enumerate(rows):
            buffer[rank, torch.where(chosen, place, self._capacity)] = own  # the last row takes the others
        return self._peers.exchange(buffer[:, : self._capacity].flatten(0, 1).contiguous())


def of_each(source: Tensor, size: int) -> Tensor:
    """How many rows are of each rank (size,)."""
    return (source[:, None] == torch.arange(size, device=source.device)).sum(0)


DISPATCHERS: Mapping[str, Callable[[Peers], Dispatcher]] = {
    "all_gather": AllGather,
    "all_to_all": AllToAll,
    "padded": Padded,
}
