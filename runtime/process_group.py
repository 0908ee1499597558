"""The ranks of a mesh over torch.distributed. Every operation ends in time, and an error names the rank at fault.

Processes find each other through a store: that of torchrun, or of a ProcessGroup that the caller has. The groups of
the mesh's axes are Ranks' own (Gloo for memory of this machine, NCCL for that of a GPU), so that nothing depends on
which groups a process made before.
"""

import atexit
import json
import math
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed

from octavo.compiler.errors import ExecutionError, OptionError, RankError
from octavo.compiler.mesh import AXES, Mesh
from octavo.runtime.liveness import STOPPED, Identity, own_identity, state

dist: Any = distributed  # many of its names are not typed

TIMEOUT_S = 20.0
START_TIMEOUT_S = 600.0
# How long a failed operation looks for the rank at fault: a process takes a moment to go.
SEARCH_S = 2.0
BEAT_S = 1.0
# NCCL ends the process when it has waited for too long, without a word about who is missing: not before that is said.
GRACE_S = 120.0
STORE_S = 3.0  # longest wait for an answer of the store
# Beats without which a rank of another machine is held for lost: after a failure, and while it may be loading.
BEATS, BEATS_AT_MEETINGS = 2.5, 10.0
FAILURE = "failure"
Answer = TypeVar("Answer")


class AxisGroup:
    """The ranks along one axis, seen from one of them; coordinates number them.

    ranks       of the world, by coordinate
    coordinate  this rank's
    """

    def __init__(self, owner: "Ranks", name: str, ranks: Sequence[int]) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.coordinate = self.ranks.index(owner.rank)
        self._owner = owner
        self._backends: dict[str, Any] = {}  # by kind of device

    @property
    def size(self) -> int:
        return len(self.ranks)

    def all_gather(self, x: Tensor) -> Tensor:
        """x of every rank, equal in shape: (size, *x.shape)."""
        result = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        if self.size == 1 or x.numel() == 0:
            result.copy_(x.expand_as(result))
            return result
        parts, own = list(_bytes(result).chunk(self.size)), _bytes(x.contiguous())
        self._run("all_gather", x, lambda backend: backend.allgather([parts], [own]))
        return result

    def exchange(
        self, x: Tensor, sends: Sequence[int] | None = None, receives: Sequence[int] | None = None
    ) -> Tensor:
        """Rows of x to the ranks, `sends` of them to each in turn; what they sent comes back, `receives` of each.

        Without counts every rank gets an equal part. Every rank calls it, whether or not it has rows.
        """
        sends = [len(x) // self.size] * self.size if sends is None else list(sends)
        receives = sends if receives is None else list(receives)
        if self.size == 1:
            return x.clone()
        result = x.new_empty((sum(receives), *x.shape[1:]))
        width = math.prod(x.shape[1:]) * x.itemsize
        out, own = _bytes(result), _bytes(x.contiguous())
        to, of = [count * width for count in sends], [count * width for count in receives]
        self._run("all_to_all", x, lambda backend: backend.alltoall_base(out, own, of, to))
        return result

    def broadcast(self, array: NDArray[np.uint8]) -> None:
        """Fill the array of every rank with that of coordinate 0."""
        if self.size > 1 and array.size:
            tensor = torch.from_numpy(array)
            self._run("broadcast", tensor, lambda backend: backend.broadcast(tensor, 0))

    def gather_numbers(self, values: Sequence[int]) -> list[list[int]]:
        """The i64 numbers of every rank, as many on each, by coordinate."""
        numbers: list[list[int]] = self.all_gather(torch.tensor(values, dtype=torch.int64)).tolist()
        return numbers

    def gather_objects(self, value: Any) -> list[Any]:
        """Any value of every rank, by coordinate; ranks of a program trust each other."""
        own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        sizes = [size for (size,) in self.gather_numbers([len(own)])]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        rows = self.all_gather(padded).numpy()
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _run(self, what: str, x: Tensor, start: Callable[[Any], Any]) -> None:
        try:
            work = start(self._backend(x.device))
            if x.device.type == "cuda":
                wait_for(work, self._owner.timeout_s)
            work.wait()
        except RuntimeError as error:
            raise self._owner.failure(f"{what} over {self.name}", self.ranks, error) from error

    def _backend(self, device: torch.device) -> Any:
        if device.type not in self._backends:
            self._backends[device.type] = self._owner.connect(f"{self.name}/{self.ranks}", device, self)
        return self._backends[device.type]

    def close(self) -> None:
        """Connections end, and with them what others wait for here."""
        self._backends.clear()


class Ranks:
    """All ranks of a mesh, seen from this process.

    mesh       of as many ranks as there are processes
    group      a ProcessGroup of the caller, which tells who is who; None: what torchrun set in the environment
    timeout_s  longest that an operation waits for the others
    identity   None: this process. Processes of other machines are known by a sign of life through the store

    Raises OptionError if the processes are not as many as the mesh has ranks.
    """

    def __init__(
        self, mesh: Mesh, group: distributed.ProcessGroup | None = None, *, timeout_s: float = TIMEOUT_S,
        identity: Identity | None = None,
    ) -> None:  # fmt: skip
        self.mesh = mesh
        self.timeout_s = timeout_s
        store, self.rank, world = _from_environment(mesh) if group is None else _of_caller(group)
        check_world(mesh, world)
        # A process may make several, in the same order on all ranks; each has keys of its own.
        number = store.add(f"octavo/{self.rank}", 1)
        self._store: Any = dist.PrefixStore(f"octavo/{number}", store)
        self._is_store_silent = False
        self._is_searching = False
        self._num_meetings = 0
        self._beats = threading.Event()
        self.identities = self._introduce(identity or own_identity())
        if len({each.machine for each in self.identities}) > 1:
            threading.Thread(target=self._beat, name="sign of life", daemon=True).start()
        self.axes = {axis: AxisGroup(self, axis, mesh.group(self.rank, axis)) for axis in AXES}
        first = self.rank - self.rank % (mesh.ep * mesh.tp)
        self.replica = AxisGroup(self, "ep and tp", range(first, first + mesh.ep * mesh.tp))
        self.all = AxisGroup(self, "all ranks", range(mesh.world))
        # Threads of Gloo let go of tensors, which they cannot while the interpreter is taken down.
        atexit.register(self.close)

    @property
    def dp(self) -> AxisGroup:
        """The ranks with requests of their own."""
        return self.axes["dp"]

    def connect(self, name: str, device: torch.device, group: AxisGroup) -> Any:
        """A backend of torch.distributed for tensors of a device, with these ranks."""
        store = dist.PrefixStore(f"{name}/{device.type}", self._store)
        limit = timedelta(seconds=self.timeout_s)
        if device.type == "cpu":
            return dist.ProcessGroupGloo(store, group.coordinate, group.size, limit)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit + timedelta(seconds=GRACE_S)
        return dist.ProcessGroupNCCL(store, group.coordinate, group.size, options)

    def meet(self) -> None:
        """Wait until every rank is here, however long it works before that, while it lives. RankError otherwise."""
        place, self._num_meetings = f"meeting {self._num_meetings}", self._num_meetings + 1
        began = looked = time.monotonic()
        self._store.set(f"{place}/{self.rank}", "")
        missing = list(range(self.mesh.world))
        while missing := [rank for rank in missing if not self._has(f"{place}/{rank}")]:
            now = time.monotonic()
            if now - looked > BEAT_S:
                looked = now
                if found := self._told() or self._found(missing, BEATS_AT_MEETINGS):
                    raise self._agreed(f"{found}: the others wait for it")
            time.sleep(0.005 if now - began < 1 else 0.05)

    def fail(self, message: str) -> None:
        """End the others, with why this rank ends."""
        self._agreed(f"rank {self.rank} ({self.identities[self.rank]}) ended: {message}")
        self.close()

    def failure(self, what: str, ranks: Iterable[int], error: Exception | None = None) -> RankError:
        """The error to raise where `what` with `ranks` failed: who is at fault, as far as can be seen."""
        self._is_searching = True
        try:
            found = self._search()
            if not found:
                late = error is not None and "imed out" in str(error)
                others = [rank for rank in ranks if rank != self.rank]
                found = f"ranks {_listed(others)} run, but " + (
                    f"one of them did not take part within {self.timeout_s:.0f} s" if late else str(error)
                )
            return self._agreed(f"{found}: {what} cannot end; start all ranks again")
        finally:
            self._is_searching = False

    @contextmanager
    def explaining_termination(self) -> Iterator[None]:
        """In the main thread: where torchrun ends this rank as another is lost, a RankError says which. A termination
        for another reason is as ever.
        """

        def explain(*_: object) -> None:
            if self._is_searching:
                return  # it is about to be said
            self._is_searching = True
            if found := self._search():
                raise self._agreed(f"{found}; start all ranks again")
            raise SystemExit(128 + signal.SIGTERM)

        before = signal.signal(signal.SIGTERM, explain)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, before)

    def close(self) -> None:
        """Leave the groups."""
        atexit.unregister(self.close)
        self._beats.set()
        for group in (*self.axes.values(), self.replica, self.all):
            group.close()

    def _introduce(self, own: Identity) -> list[Identity]:
        """Everybody's process, by rank."""
        self._store.set(f"identity/{self.rank}", json.dumps(asdict(own)))
        keys = [f"identity/{rank}" for rank in range(self.mesh.world)]
        try:
            self._store.wait(keys, timedelta(seconds=START_TIMEOUT_S))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise RankError(
                f"ranks {_listed(missing)} did not come within {START_TIMEOUT_S:.0f} s"
            ) from error
        return [Identity(**json.loads(self._store.get(key))) for key in keys]

    def _search(self) -> str:
        """Who is at fault. Waits a moment for what others have to say, and for a process to be gone."""
        end = time.monotonic() + SEARCH_S
        while time.monotonic() < end:
            if found := self._told() or self._found(range(self.mesh.world)):
                return found
            time.sleep(0.02)
        return self._found(range(self.mesh.world), BEATS)

    def _found(self, ranks: Iterable[int], beats: float = 0) -> str:
        """The first of these ranks that does not run. beats: how many to wait for of ranks of other machines."""
        own = self.identities[self.rank]
        far = [rank for rank in ranks if self.identities[rank].machine != own.machine]
        states = {rank: state(self.identities[rank]) for rank in ranks if rank not in far}
        if beats and far and not any(states.values()):
            states |= dict.fromkeys(
                self._silent(far, beats), f"gave no sign of life for {beats * BEAT_S:.1f} s"
            )
        # Those that a stopped one kept waiting may have left since, so it goes first.
        for rank, found in sorted(states.items(), key=lambda each: each[1] != STOPPED):
            if found:
                return f"rank {rank} ({self.identities[rank]}) {found}"
        return ""

    def _silent(self, ranks: Iterable[int], beats: float) -> list[int]:
        before = {rank: self._read(f"beat/{rank}") for rank in ranks}
        time.sleep(beats * BEAT_S)
        return [rank for rank, beat in before.items() if self._read(f"beat/{rank}") == beat]

    def _beat(self) -> None:
        count = 0
        while not self._beats.wait(BEAT_S):
            count += 1
            try:
                self._store.set(f"beat/{self.rank}", str(count))
            except RuntimeError:
                return  # the store is gone, and nobody can read it

    def _told(self) -> str:
        """What the rank that failed first wrote."""
        return self._read(FAILURE)

    def _agreed(self, message: str) -> RankError:
        """The error that all ranks raise: that of the first to say one."""
        return RankError(self._ask(lambda: self._store.compare_set(FAILURE, "", message).decode(), message))

    def _has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]), False)

    def _read(self, key: str) -> str:
        return self._ask(lambda: self._store.get(key).decode(), "") if self._has(key) else ""

    def _ask(self, question: Callable[[], Answer], otherwise: Answer) -> Answer:
        """What the store says; `otherwise` if its process is gone, or does not answer in time."""
        answers: list[Answer] = []

        def ask() -> None:
            with suppress(RuntimeError):
                answers.append(question())

        if not self._is_store_silent:
            thread = threading.Thread(target=ask, daemon=True)
            thread.start()
            thread.join(STORE_S)
            self._is_store_silent = thread.is_alive()
        return answers[0] if answers else otherwise


def wait_for(work: Any, limit_s: float) -> None:
    """Until an operation on a GPU has ended. RuntimeError if it does not in time."""
    end = time.monotonic() + limit_s
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"Timed out after {limit_s:.0f} s")
        time.sleep(0)


def check_world(mesh: Mesh, world: int) -> None:
    """OptionError unless there are as many processes as ranks."""
    if world != mesh.world:
        raise OptionError(
            f"ranks: expected {mesh.world} processes ({mesh}), as the artifact was compiled for, got {world}; type "
            f"`torchrun --nproc-per-node {mesh.world} -m octavo run ARTIFACT ...`"
        )


def _from_environment(mesh: Mesh) -> tuple[Any, int, int]:
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in names if name not in os.environ]:
        if mesh.world > 1:
            check_world(mesh, 1)
        raise ExecutionError(
            f"ranks: expected {', '.join(missing)} in the environment, as torchrun sets them"
        )
    check_world(mesh, int(os.environ["WORLD_SIZE"]))
    limit = timedelta(seconds=START_TIMEOUT_S)
    store, rank, world = next(dist.rendezvous("env://", timeout=limit))
    return store, rank, world


def _of_caller(group: distributed.ProcessGroup) -> tuple[Any, int, int]:
    return group.get_group_store(), group.rank(), group.size()


def _bytes(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return x.reshape(-1).view(torch.uint8)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
