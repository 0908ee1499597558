"""Ranks as threads of this process: what a group of ranks does, without a network."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
LIMIT_S = 20.0


class Board:
    """Where the ranks put what the others read."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=LIMIT_S)
        self.values: list[list[Tensor]] = [[] for _ in range(size)]
        self.num_bytes = 0  # that ranks sent to others


class ThreadPeers:
    """The ranks of an axis, as collectives need them."""

    def __init__(self, board: Board, coordinate: int) -> None:
        self._board = board
        self.coordinate = coordinate

    @property
    def size(self) -> int:
        return self._board.size

    def _swap(self, own: Sequence[Tensor]) -> list[list[Tensor]]:
        board = self._board
        board.values[self.coordinate] = [each.clone() for each in own]
        board.barrier.wait()
        came = list(board.values)
        board.barrier.wait()
        return came

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.stack([each[0] for each in self._swap([x])])

    def exchange(
        self, x: Tensor, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        assert sends is not None or len(x) % self.size == 0
        parts = x.split(list(sends)) if sends is not None else x.chunk(self.size)
        parts = [x[:0]] * self.size if sends is None and len(x) == 0 else list(parts)
        assert len(parts) == self.size
        self._board.num_bytes += sum(p.nbytes for rank, p in enumerate(parts) if rank != self.coordinate)
        came = [each[self.coordinate] for each in self._swap(parts)]
        assert receives is None or [len(each) for each in came] == list(receives)
        return torch.cat(came)


def on_ranks(size: int, work: Callable[[ThreadPeers], Result]) -> list[Result]:
    """What `work` returns on each of `size` ranks; the first error of one is raised."""
    board = Board(size)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(_guarded, work, ThreadPeers(board, rank), board) for rank in range(size)]
    failed = [error for future in futures if (error := future.exception())]
    for error in failed:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


def _guarded(work: Callable[[ThreadPeers], Result], peers: ThreadPeers, board: Board) -> Result:
    try:
        return work(peers)
    except BaseException:
        board.barrier.abort()
        raise
