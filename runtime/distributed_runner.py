"""One step on many ranks: leaders say what is run, followers run it too.

Ranks along ep and tp see the same batch: the first of them, the leader, has the engine, and the others follow. Along dp
every leader has requests of its own. Before each step these agree on how many tokens each has; a rank without any takes
part with none, as long as one has some. So all ranks enter the same collectives.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.expert_placement import ExpertPlacement
from octavo.compiler.mesh import Mesh
from octavo.compiler.program import TREE
from octavo.runtime.batch import Batch
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.page_moves import Move

KINDS: tuple[Literal["copy", "out", "in"], ...] = ("copy", "out", "in")


class Command(IntEnum):
    """What a leader tells its followers. AWAIT: that it is there, and nothing to do yet."""

    END, AWAIT, RUN, MOVE = range(4)


class State(IntEnum):
    """Of a leader, before a step. PAUSED: someone reads its tokens; IDLE: it has no requests left."""

    PAUSED, IDLE, BUSY = range(3)


class Group(Protocol):
    """Some ranks: process_group.AxisGroup."""

    @property
    def size(self) -> int: ...

    @property
    def coordinate(self) -> int: ...

    def broadcast(self, array: NDArray[np.uint8]) -> None: ...

    def gather_numbers(self, values: Sequence[int]) -> list[list[int]]: ...


class World(Protocol):
    """All ranks: process_group.Ranks."""

    mesh: Mesh
    rank: int
    timeout_s: float

    @property
    def dp(self) -> Group: ...

    @property
    def replica(self) -> Group: ...


class RankRunner(ModelRunner, Protocol):
    """The runner of a rank: model_runner.NativeRunner."""

    def count_experts(self, is_on: bool = True) -> None: ...

    def expert_loads(self) -> NDArray[np.int64]: ...

    def place_experts(
        self, placements: Sequence[ExpertPlacement], loads: NDArray[Any] | None = None
    ) -> None: ...


class LeaderRunner:
    """The runner of a leader's engine: what it runs, its followers run.

    local  this rank's
    """

    def __init__(self, local: ModelRunner, ranks: World) -> None:
        self._local = local
        self._ranks = ranks
        self._lock = threading.Lock()
        self._spoke = time.monotonic()
        self._error: Exception | None = None
        self.num_pages = local.num_pages
        self.page_size = local.page_size
        self.num_host_pages = local.num_host_pages
        self.page_windows = local.page_windows
        self.page_bytes = local.page_bytes

    def move_pages(self, moves: Sequence[Move]) -> None:
        if not moves:
            return
        with self._speaking():
            rows = np.array([[KINDS.index(m.kind), m.source, m.target] for m in moves], np.int64)
            self._tell(Command.MOVE, [len(moves)], rows)
            self._local.move_pages(moves)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """A step of this leader's tokens, when all leaders have come; logits of its own rows."""
        with self._speaking():
            counts = self._agree(State.BUSY, len(batch.input_ids))
            return self._run(batch, counts)

    @property
    def features(self) -> NDArray[np.generic] | None:
        return self._local.features

    def take_part(self) -> bool:
        """A step without tokens, for leaders that have some; False: none has, and followers were told to end."""
        with self._speaking():
            counts = self._agree(State.IDLE, 0)
            if sum(counts):
                self._run(no_tokens(len(self.page_windows)), counts)
                return True
            self._tell(Command.END)
            return False

    def finish(self) -> None:
        """Take part until no leader has tokens."""
        while self.take_part():
            pass

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While tokens are read: the others wait for a reader, however long it takes for one."""
        done = threading.Event()
        thread = threading.Thread(target=self._keep_waiting, args=(done,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    def _keep_waiting(self, done: threading.Event) -> None:
        """Let the others know that this rank lives, where it has not spoken for a while."""
        interval = self._ranks.timeout_s / 4
        while not done.wait(interval / 4):
            if time.monotonic() - self._spoke < interval or not self._lock.acquire(blocking=False):
                continue
            try:
                if self._ranks.dp.size > 1:
                    self._ranks.dp.gather_numbers([State.PAUSED, 0])
                self._tell(Command.AWAIT)
            except Exception as error:  # the next one who speaks raises it
                self._error = error
                return
            finally:
                self._spoke = time.monotonic()
                self._lock.release()

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        with self._lock:
            if self._error is not None:
                raise self._error
            try:
                yield
            finally:
                self._spoke = time.monotonic()

    def _agree(self, state: State, num_tokens: int) -> list[int]:
        """Tokens of every rank along dp. Waits while one of them is read from."""
        while self._ranks.dp.size > 1:
            said = self._ranks.dp.gather_numbers([state, num_tokens])
            if all(other != State.PAUSED for other, _ in said):
                return [count for _, count in said]
            self._tell(Command.AWAIT)
        return [num_tokens]

    def _run(self, batch: Batch, counts: Sequence[int]) -> NDArray[np.float32]:
        rows = np.repeat(np.arange(len(counts)), counts) if self._ranks.mesh.dp > 1 else np.zeros(0, np.int64)
        batch = replace(batch, row_ranks=rows)
        dims = batch.dims
        self._tell(Command.RUN, [dims[name] for name in "TRLPN"], *arrays_of(batch))
        return self._local.run(batch)

    def _tell(
        self, command: Command, sizes: Sequence[int] = (), *arrays: NDArray[np.int64 | np.int32]
    ) -> None:
        group = self._ranks.replica
        if group.size > 1:
            header = np.array([command, *sizes, *[0] * (5 - len(sizes))], np.int64)
            group.broadcast(header.view(np.uint8))
            if arrays:
                group.broadcast(np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays]))


def follow(local: ModelRunner, ranks: World) -> None:
    """Run what the leader runs, until it says that this is the end."""
    header = np.zeros(6, np.int64)
    while True:
        ranks.replica.broadcast(header.view(np.uint8))
        command = Command(header[0])
        if command is Command.END:
            return
        if command is Command.MOVE:
            rows = np.zeros((int(header[1]), 3), np.int64)
            ranks.replica.broadcast(rows.reshape(-1).view(np.uint8))
            local.move_pages([Move(KINDS[kind], source, target) for kind, source, target in rows.tolist()])
        if command is Command.RUN:
            batch = empty_batch(header[1:].tolist(), len(local.page_windows))
            arrays = arrays_of(batch)
            memory = np.zeros(sum(array.nbytes for array in arrays), np.uint8)
            ranks.replica.broadcast(memory)
            start = 0
            for array in arrays:
                array.reshape(-1).view(np.uint8)[:] = memory[start : start + array.nbytes]
                start += array.nbytes
            local.run(batch)


def arrays_of(batch: Batch) -> list[NDArray[np.int64 | np.int32]]:
    """All arrays of a batch, in the order in which they travel. There are no trees over ranks."""
    return [array for name, array in batch.inputs.items() if name != TREE]


def empty_batch(sizes: Sequence[int], num_groups: int) -> Batch:
    """Zeros of the sizes T, R, L, P, N."""
    num_tokens, num_requests, num_rows, num_columns, num_all = sizes
    tables = [
        (np.zeros((num_requests, num_columns), np.int32), np.zeros(num_tokens, np.int64))
        for _ in range(num_groups)
    ]
    return Batch(
        input_ids=np.zeros(num_tokens, np.int64),
        positions=np.zeros(num_tokens, np.int64),
        slot_mapping=tables[0][1],
        page_table=tables[0][0],
        seq_lens=np.zeros(num_requests, np.int32),
        cu_seqlens_q=np.zeros(num_requests + 1, np.int32),
        logit_rows=np.zeros(num_rows, np.int64),
        windowed=tuple(tables[1:]),
        row_ranks=np.zeros(num_all, np.int64),
    )


def no_tokens(num_groups: int) -> Batch:
    """The step of a rank that has nothing to compute."""
    return empty_batch((0, 0, 0, 1, 0), num_groups)
