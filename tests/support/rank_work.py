"""What ranks do in tests of groups of processes; importable, as a new process finds it by its name."""

import importlib
import io
import os
import signal
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from fake_runner import FakeRunner, make_model
from torch import Tensor, distributed

from octavo.compiler.errors import ExecutionError, RequestError
from octavo.compiler.mesh import Mesh
from octavo.runtime import process_group
from octavo.runtime.batch import Batch
from octavo.runtime.collectives import all_reduce, combine, dispatch
from octavo.runtime.dispatchers import DISPATCHERS
from octavo.runtime.distributed_engine import DistributedEngine
from octavo.runtime.engine import Engine
from octavo.runtime.liveness import own_identity
from octavo.runtime.process_group import Ranks
from octavo.runtime.sampling_params import SamplingParams

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
    second = Ranks(Mesh(dp=size), timeout_s=20)  # with the same store
    second.meet()
    total = all_reduce(second.axes["dp"], torch.tensor([float(rank)]))
    ranks.close()
    second.close()
    return [*results, array.tolist(), numbers, total.tolist()]


def operations(peers: Any, size: int) -> list[Any]:
    """Collectives with uneven and with no rows, in every way of dispatch. Tensors as lists."""
    generator = torch.Generator().manual_seed(peers.coordinate)
    counts = [(3 * rank) % 4 for rank in range(size)]
    tokens = counts[peers.coordinate]
    x = torch.randn(tokens, 32, generator=generator).bfloat16()
    experts = torch.randint(-1, LOCAL * size, (tokens, 3), generator=generator)
    weights = torch.rand(tokens, 3, generator=generator)
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
    group: Any = distributed.new_group(list(members))
    if rank not in members:
        return "not in it"
    ranks = Ranks(Mesh(ep=len(members)), group, timeout_s=20)
    return ranks.rank, ranks.all.gather_numbers([rank])


def terminated(rank: int, is_lost: bool) -> str:
    """As torchrun ends ranks once one of them is lost."""
    ranks = Ranks(Mesh(ep=2), timeout_s=20)
    ranks.meet()
    if rank == 1:
        if is_lost:
            os.kill(os.getpid(), signal.SIGKILL)
        ranks.meet()
        return "not lost"
    with ranks.explaining_termination():
        time.sleep(0.3)
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        except SystemExit as end:
            ranks.meet()
            return f"exit {end.code}"
    return "nothing happened"


class CollectiveRunner(FakeRunner):
    """A fake runner whose step, as that of a program with collectives, needs all ranks: those with other requests by
    what they say of the step's tokens, those with the same ones by the same tokens."""

    def __init__(self, ranks: Ranks, num_pages: int) -> None:
        super().__init__(num_pages, 4, num_host_pages=4)
        self._ranks = ranks
        self.fail_at: int | None = None
        self.placed: list[Any] = []
        self.counting = False

    def count_experts(self, is_on: bool = True) -> None:
        self.counting = is_on

    def expert_loads(self) -> Any:
        assert self.counting
        return np.full((2, 3), 10**self._ranks.rank)

    def place_experts(self, placements: Sequence[Any], loads: Any = None) -> None:
        self.placed += [*placements, loads]

    def run(self, batch: Batch) -> Any:
        if self.fail_at == len(self.batches):
            raise ExecutionError("the step of a rank failed")
        counts = [count for (count,) in self._ranks.dp.gather_numbers([len(batch.input_ids)])]
        said = batch.row_ranks.tolist()
        assert said == ([r for r, n in enumerate(counts) for _ in range(n)] if len(counts) > 1 else [])
        slots = zlib.crc32(batch.slot_mapping.tobytes() + batch.input_ids.tobytes())
        assert len({number for (number,) in self._ranks.replica.gather_numbers([slots])}) == 1
        return super().run(batch)


def serve(rank: int, mesh: Mesh, what: str, timeout_s: float = 20.0) -> Any:
    """Answers of an engine over the ranks."""
    ranks = Ranks(mesh, timeout_s=timeout_s)
    local = CollectiveRunner(ranks, 12)
    engine = DistributedEngine(local, ranks, lambda runner: Engine(runner, make_model(), max_requests=3))
    prompts = [[1, 2, 3], [4] * 9, [5, 6], [7, 8, 9, 10, 11], [12]]
    if what == "fail" and rank == mesh.world - 1:
        local.fail_at = 3
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    if what == "bad":
        return engine.generate([[1], [99]], params)
    if what == "other calls":
        return engine.generate(prompts) if rank else [*engine.stream(prompts)]
    if what == "served":
        if rank:
            engine.serve()
            return len(local.batches), str(local.placed)
        with suppress(RequestError):
            engine.generate([])
            engine.generate([[99]])
        stream = engine.stream(prompts, params)
        answers: list[Any] = [[next(stream)]]
        stream.close()
        answers.append([*engine.stream(prompts, params)])
        answers.append(engine.generate(prompts[:2], params))
        engine.count_experts()
        answers.append(engine.expert_loads().tolist())
        placement: Any = "a placement"
        engine.place_experts([placement], np.ones((1, 2)))
        engine.close()
        return answers
    if what == "read":
        tokens = []
        for token in engine.stream(prompts[:2] if rank == 0 else (), params):
            tokens.append((token.index, token.token_id))
            if rank == 0 and len(tokens) == 3:
                time.sleep(2.5 * timeout_s)  # a reader that thinks
        return tokens
    first = engine.generate(prompts if rank == 0 else (), params)
    if what == "kill" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 2:
        time.sleep(0.5)  # the others wait
    second = engine.generate(prompts[:1], params)
    ranks.close()
    return [each.token_ids for each in (*first, *second)], local.batches


def check_case(rank: int, size: int, root: str, case: str) -> Any:
    """Worst error over bound of a case of benchmarks/check_expert_parallel.py."""
    sys.path.insert(0, root)
    module = importlib.import_module("benchmarks.check_expert_parallel")
    ranks = Ranks(Mesh(dp=size))
    ranks.meet()
    chosen = next(each for each in module.cases(size, 5) if each.name == case)
    found = module.Bench(ranks, chosen, module.make_weights(5), 5).run()
    ranks.meet()
    return found


def run_command(rank: int, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and errors of the command `octavo` on this rank."""
    cli: Any = importlib.import_module("octavo.compiler.cli")
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
    return code, out.getvalue(), err.getvalue()
