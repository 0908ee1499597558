"""What ranks do in tests of groups of processes; importable, as a new process finds it by its name."""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed

from octavo.compiler.mesh import Mesh
from octavo.runtime import process_group
from octavo.runtime.collectives import all_reduce, combine, dispatch
from octavo.runtime.dispatchers import DISPATCHERS
from octavo.runtime.liveness import own_identity
from octavo.runtime.process_group import Ranks

TIMEOUT_S = 1.0
LOCAL = 2


def every_operation(rank: int, size: int) -> list[Any]:
    """Results that the same operations must have with ranks that are threads."""
    ranks = Ranks(Mesh(dp=size), timeout_s=20)
    ranks.meet()
    results = operations(ranks.axes["dp"], size)
    array = np.full(5, rank, np.uint8)
    ranks.replica.broadcast(array)  # of one rank
    ranks.all.broadcast(array)
    numbers = ranks.all.gather_numbers([rank, -(2**40)])
    second = Ranks(Mesh(tp=size), timeout_s=20)  # with the same store
    second.meet()
    total = all_reduce(second.axes["tp"], torch.tensor([float(rank)]))
    ranks.close()
    second.close()
    return [*results, array.tolist(), numbers, total.tolist()]


def operations(peers: Any, size: int) -> list[Any]:
    """Collectives with uneven and with no rows, in every way of dispatch. Tensors as lists."""
    generator = torch.Generator().manual_seed(peers.coordinate)
    counts = [(3 * rank) % 4 for rank in range(size)]
    tokens = counts[peers.coordinate]
    x = torch.randn(1, tokens, 32, generator=generator).bfloat16()
    experts = torch.randint(-1, LOCAL * size, (1, tokens, 3), generator=generator)
    weights = torch.rand(1, tokens, 3, generator=generator)
    results: list[Tensor] = [
        peers.all_gather(torch.full((2, 3), peers.coordinate)),
        peers.all_gather(torch.empty(0, 3)),
        all_reduce(peers, torch.randn(7, generator=generator).bfloat16()),
        all_reduce(peers, torch.randn(40_001, generator=generator)),
    ]
    for name, make in DISPATCHERS.items():
        for wire in ("model", "nvfp4"):
            dispatcher = make(peers)
            came = dispatch(dispatcher, peers, x, experts, weights, counts, None, LOCAL, wire)
            parts = came[0] * (peers.coordinate + 1)
            results += [*came, combine(dispatcher, peers, parts, came[3], experts, LOCAL)]
            assert name in DISPATCHERS
    return [each.tolist() for each in results]


def lose(rank: int, size: int, lost: int, sign: str, operation: str, far: bool = False) -> str:
    """A rank ends or stops, the others are in an operation with it. Returns what came of that."""
    identity = own_identity()
    if far:
        process_group.BEAT_S = process_group.SEARCH_S = 0.2
        identity = replace(identity, machine=f"machine of {rank}", host=f"host{rank}")
    ranks = Ranks(Mesh(dp=size), timeout_s=TIMEOUT_S, identity=identity)
    ranks.meet()
    peers = ranks.axes["dp"]
    peers.all_gather(torch.ones(3))
    ranks.all.gather_numbers([rank])
    if rank == lost:
        if sign == "error":
            ranks.fail("ValueError: seven")
            return "left"
        os.kill(os.getpid(), signal.SIGKILL if sign == "kill" else signal.SIGSTOP)
    if operation == "all_gather":
        peers.all_gather(torch.ones(3))
    elif operation == "exchange":
        peers.exchange(torch.ones(size, 3))
    elif operation == "broadcast":
        ranks.all.broadcast(np.zeros(1 << 20, np.uint8))
    else:
        ranks.meet()
    return "nothing happened"


def slow(rank: int, size: int) -> str:
    """A rank that works for longer than others wait for it."""
    ranks = Ranks(Mesh(ep=size), timeout_s=0.5)
    ranks.meet()
    ranks.axes["ep"].all_gather(torch.ones(3))
    if rank == 1:
        time.sleep(3)
        return "slow"
    ranks.axes["ep"].all_gather(torch.ones(3))
    return "nothing happened"


def with_own_group(rank: int, members: Sequence[int]) -> Any:
    """A caller who has a group of some of its processes already, in an order of its own."""
    distributed.init_process_group("gloo")
    group = distributed.new_group(list(members))
    if rank not in members:
        return "not in it"
    ranks = Ranks(Mesh(ep=len(members)), group, timeout_s=20)
    return ranks.rank, ranks.all.gather_numbers([rank])


def wrong_world(rank: int, size: int) -> None:
    Ranks(Mesh(dp=2, ep=size))
