"""Runs a step: Batch in, logits out. NativeRunner calls the host program of a cpu artifact."""

import ctypes
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import ArtifactError, ExecutionError, ToolchainError
from octavo.compiler.expert_placement import ExpertPlacement
from octavo.compiler.expression import evaluate
from octavo.compiler.host import available_memory, build_shared_library, can_run, host_features, usable_cores
from octavo.compiler.program import DIMS, ITEM_BYTES, Buffer, Program, Step
from octavo.runtime.batch import Batch
from octavo.runtime.expert_layers import CountsExperts, placed_weights
from octavo.runtime.features import HOLDERS, check_features, joined
from octavo.runtime.meetings import Meetings
from octavo.runtime.page_moves import HostPages, Move
from octavo.runtime.regions import Collectives, Region, array_of, read_and_filled

SOURCE, LIBRARY, FEATURES = "kernels/program.cpp", "kernels/program.so", "kernels/features"
ALIGNMENT = 64
SPINS = 1000
Scalar = TypeVar("Scalar", bound=np.generic)

# The default pool holds this many sequences of full length, if that takes no more than this share of free
# memory.
DEFAULT_FULL_SEQUENCES = 8
DEFAULT_MEMORY_SHARE = 0.25

# Sizes at which a cache buffer is one page.
ONE_PAGE = {name: 0 for name in DIMS} | {"num_pages": 1}


class ModelRunner(Protocol):
    """What the engine needs: pages of its own, and one step at a time."""

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def num_host_pages(self) -> int:
        """Slots that pages move out to; 0: there is no host tier."""
        ...

    @property
    def page_windows(self) -> tuple[int | None, ...]:
        """Of each page group, how many tokens back its layers look; None: all."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        ...

    def move_pages(self, moves: Sequence[Move]) -> None:
        """Make the moves, in order, before the next run reads or writes a page. ExecutionError for a bad one."""
        ...

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits (L, vocab) of the wanted rows, valid until the next run; fills the batch's slots."""
        ...

    @property
    def features(self) -> NDArray[np.generic] | None:
        """Of all T tokens of the last run, (T, F) in the model's dtype, bf16 as uint16, valid until the next; None: the
        program makes none."""
        ...


class NativeRunner(CountsExperts):
    """A cpu artifact's program on this machine's cores.

    num_pages       KV pages with the null page; None: see `default_num_pages`
    num_threads     None: every usable core
    num_host_pages  slots that pages move out to, in the same memory
    rank            of the program's mesh: which pieces of the weights this runner holds
    collectives     how it meets the other ranks; needed where the program has collectives
    caches          by the names of the program's cache buffers, memory of another runner's that is to be these; None:
                    of its own
    origin          where the code came from: "artifact", or why it was built again
    """

    def __init__(
        self,
        artifact: Artifact,
        num_pages: int | None = None,
        num_threads: int | None = None,
        num_host_pages: int = 0,
        rank: int = 0,
        collectives: Collectives | None = None,
        caches: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        self.program = artifact.program
        self.rank = rank
        self._collectives = artifact.program.collectives
        self._meetings = None if collectives is None else Meetings(artifact.program, collectives)
        check_rank(artifact, rank)
        self.page_size = artifact.program.page_size
        self.page_windows = artifact.program.page_windows
        self.page_bytes = page_bytes(artifact.program)
        self.num_pages = default_num_pages(artifact) if num_pages is None else num_pages
        self.num_threads = usable_cores() if num_threads is None else num_threads
        self.num_host_pages = num_host_pages
        check_page_counts(self.num_pages, num_host_pages)
        if self.num_threads < 1:
            raise ExecutionError(f"runner: expected at least 1 thread, got {self.num_threads}")
        self.vocab_size = artifact.model.vocab_size
        library, self.origin = load_library(artifact)
        self._step = library.octavo_step
        self._step.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
        self._step.restype = ctypes.c_int
        self._library = library
        buffers = [buffer for buffer in self.program.buffers if buffer.kind != "workspace"]
        self._place = {buffer.name: place for place, buffer in enumerate(buffers)}
        self._buffers = {buffer.name: buffer for buffer in self.program.buffers}
        self._memory = self._allocate(artifact, buffers, caches or {})
        self._pointers = np.zeros(len(buffers) + 1, np.uintp)
        for name, array in self._memory.items():
            self._pointers[self._place[name]] = array.ctypes.data
        pages = [
            self._memory[buffer.name].reshape(self.num_pages, -1) for buffer in self.program.of_kind("cache")
        ]
        self._pages = HostPages(pages, num_host_pages)
        self._outputs = {buffer.name: aligned_zeros(ALIGNMENT) for buffer in self.program.of_kind("output")}
        self._workspace = aligned_zeros(ALIGNMENT)
        self._artifact = artifact

    def _allocate(
        self, artifact: Artifact, buffers: list[Buffer], caches: Mapping[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """Weights as they are mapped, and zeroed pages, but for those that are another's."""
        dims = {name: 0 for name in DIMS} | {"num_pages": self.num_pages}
        memory: dict[str, NDArray[Any]] = {}
        for buffer in buffers:
            if buffer.kind == "weight":
                memory[buffer.name] = weight_piece(artifact, buffer.name, self.rank)
            elif buffer.name in caches:
                memory[buffer.name] = caches[buffer.name]
            elif buffer.kind == "cache":
                memory[buffer.name] = aligned_zeros(num_bytes(buffer, dims))
        return memory

    @property
    def caches(self) -> Mapping[str, NDArray[Any]]:
        """The memory of the pages, by cache buffer."""
        return {buffer.name: self._memory[buffer.name] for buffer in self.program.of_kind("cache")}

    def move_pages(self, moves: Sequence[Move]) -> None:
        """Make the moves, in order. ExecutionError for one that cannot be, and then none is made."""
        self._pages.move(moves)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        """Logits (L, vocab), valid until the next run. Other Python threads go on meanwhile."""
        if self._collectives and self._meetings is None:
            raise ExecutionError(
                f"runner: the program is rank {self.rank} of {self.program.mesh.world} ({self.program.mesh}); start "
                f"all of them: torchrun --nproc-per-node {self.program.mesh.world} -m octavo run ..."
            )
        self.begin(batch)
        self.run_segment(0)
        for segment, step in enumerate(self._collectives, 1):
            assert self._meetings is not None
            if self._loads is not None:
                self._loads.see(segment - 1, lambda name: array_of(self._region(name)))
            self._meetings.meet(step, self.regions(step))
            self.run_segment(segment)
        return self.logits()

    def place_experts(self, placements: Sequence[ExpertPlacement], loads: NDArray[Any] | None = None) -> None:
        """Hold other experts from the next step on, by layer; every rank is given the same. Outputs stay as they are,
        within what another order of the sum over ranks makes of them. ExecutionError if there is no room for one.
        """
        for name, piece in placed_weights(self._artifact, self.rank, placements, loads).items():
            memory = aligned_zeros(piece.nbytes)
            memory[: piece.nbytes] = piece.reshape(-1).view(np.uint8)
            self._memory[name] = memory
            self._pointers[self._place[name]] = memory.ctypes.data

    def begin(self, batch: Batch) -> None:
        """Take a step's inputs and make room for it; its segments may then run."""
        if self._meetings is not None:
            self._meetings.forget()
        self._batch = batch  # its arrays are read until the last segment
        self._dims = dims = {**batch.dims, "num_pages": self.num_pages}
        self._sizes = np.array([dims[name] for name in DIMS], np.int64)
        inputs = batch.inputs
        check_features(self.program, batch)
        for buffer in self.program.of_kind("input"):
            self._pointers[self._place[buffer.name]] = inputs[buffer.name].ctypes.data
        for name, memory in self._outputs.items():
            self._outputs[name] = grown(memory, num_bytes(self._buffers[name], dims))
            self._pointers[self._place[name]] = self._outputs[name].ctypes.data
        self._workspace = grown(self._workspace, evaluate(self.program.workspace, dims))
        self._pointers[-1] = self._workspace.ctypes.data

    def run_segment(self, segment: int) -> None:
        """The kernels between two collectives."""
        code = self._step(self._sizes.ctypes.data, self._pointers.ctypes.data, self.num_threads, segment)
        if code != 0:
            shown = ", ".join(f"{name}={value}" for name, value in self._dims.items())
            raise ExecutionError(f"{LIBRARY}: expected octavo_step to return 0, got {code} at {shown}")

    def regions(self, step: Step) -> tuple[list[Region | None], list[Region]]:
        """What a collective reads and fills, in this step's sizes."""
        return read_and_filled(step, [self._region(str(name)) if name else None for name in step.args])

    def _region(self, name: str) -> Region:
        buffer = self._buffers[name]
        shape = tuple(evaluate(size, self._dims) for size in buffer.shape)
        if buffer.kind == "workspace":
            address = int(self._pointers[-1]) + evaluate(buffer.offset or 0, self._dims)
        else:
            address = int(self._pointers[self._place[name]])
        return Region(buffer.dtype, shape, address)

    def logits(self) -> NDArray[np.float32]:
        """Of the step that ended, (L, vocab)."""
        return self._output(self.program.logits, np.float32)

    @property
    def features(self) -> NDArray[np.generic] | None:
        """Of the step that ended, (T, F); valid until the next."""
        return joined([self._output(one, HOLDERS[one.dtype]) for one in self.program.hidden_states])

    def _output(self, buffer: Buffer, dtype: type[Scalar]) -> NDArray[Scalar]:
        memory = self._outputs[buffer.name][: num_bytes(buffer, self._dims)]
        return memory.view(dtype).reshape([evaluate(size, self._dims) for size in buffer.shape])


def check_rank(artifact: Artifact, rank: int) -> None:
    mesh = artifact.program.mesh
    if not 0 <= rank < mesh.world:
        raise ExecutionError(f"runner: expected a rank below {mesh.world} ({mesh}), got {rank}")


def weight_piece(artifact: Artifact, name: str, rank: int) -> NDArray[Any]:
    """What a rank holds of a weight: a view of the file where that is one range of its first axis."""
    whole, shard = artifact.weights[name].array, artifact.program.shards.get(name)
    if shard is None:
        return whole
    index = (slice(None),) * shard.dim
    parts = [whole[(*index, slice(start, stop))] for start, stop in shard.pieces[rank]]
    return np.ascontiguousarray(parts[0] if len(parts) == 1 else np.concatenate(parts, shard.dim))


def load_library(artifact: Artifact) -> tuple[ctypes.CDLL, str]:
    """The host program, and where it came from: "artifact", or why it was built from its source again.

    Raises ToolchainError if it has to be built and no compiler is here, ArtifactError if the artifact is for
    a GPU.
    """
    if SOURCE not in artifact.files:
        raise ArtifactError(
            f"{artifact.path}: expected {SOURCE} of a cpu artifact, got target "
            f"{artifact.manifest['target']}; compile with target='cpu' to run on this machine's processor"
        )
    unusable = _why_not_as_is(artifact)
    if not unusable:
        try:
            return _checked(_open(artifact.path / LIBRARY)), "artifact"
        except OSError as error:
            unusable = f"it does not load here: {error}"
    try:
        built = build_shared_library(artifact.read(SOURCE).decode(), host_features())
    except ToolchainError as error:
        raise ToolchainError(
            f"{LIBRARY} cannot be used ({unusable}) and has to be built again; {error}"
        ) from None
    return _checked(_open(built)), f"built for {host_features()}, as {unusable}"


def _open(path: Path) -> ctypes.CDLL:
    """Load a host program. Its threads, if these are the process's first OpenMP threads, give way soon.

    A thread that waits at a barrier spins before it sleeps. By default it spins for about a millisecond, and a
    program has hundreds of barriers: on a machine with other work that made a step six times slower.
    """
    unset = not {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)
    if unset:
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)
    try:
        return ctypes.CDLL(str(path))
    finally:
        if unset:
            del os.environ["GOMP_SPINCOUNT"]


def _why_not_as_is(artifact: Artifact) -> str:
    if LIBRARY not in artifact.files or FEATURES not in artifact.files:
        return "the artifact holds no built library"
    features = artifact.read(FEATURES).decode(errors="replace").strip()
    return "" if can_run(features) else f"it was built for {features}, this CPU has {host_features()}"


def _checked(library: ctypes.CDLL) -> ctypes.CDLL:
    for symbol in ("octavo_step", "octavo_features"):
        if not hasattr(library, symbol):
            raise ArtifactError(
                f"{LIBRARY}: expected the function {symbol}, got none; compile the model again"
            )
    library.octavo_features.restype = ctypes.c_char_p
    features = (library.octavo_features() or b"").decode(errors="replace")
    if not can_run(features):
        raise ArtifactError(
            f"{LIBRARY}: expected code for {host_features()} or less, got '{features}'; "
            "compile the model again"
        )
    return library


def default_num_pages(artifact: Artifact, num_ranks: int = 1) -> int:
    """Pages for 8 sequences of the model's full length, or what a quarter of free memory holds if less.

    One more is the null page. num_ranks: that share this machine's memory. Raises ExecutionError if not even one page
    besides it fits.
    """
    program = artifact.program
    wanted = DEFAULT_FULL_SEQUENCES * -(-artifact.model.max_model_len // program.page_size) + 1
    budget = int(available_memory() * DEFAULT_MEMORY_SHARE) // num_ranks
    affordable = budget // max(page_bytes(program), 1)
    if affordable < 2:
        raise ExecutionError(
            f"page pool: expected room for 2 pages of {page_bytes(program)} bytes in {budget} bytes "
            f"({DEFAULT_MEMORY_SHARE:.0%} of free memory), got {affordable}; free memory or give num_pages"
        )
    return min(wanted, affordable)


def page_bytes(program: Program) -> int:
    """Bytes of one page in all layers."""
    return sum(num_bytes(buffer, ONE_PAGE) for buffer in program.of_kind("cache"))


def check_page_counts(num_pages: int, num_host_pages: int) -> None:
    if num_pages < 2 or num_host_pages < 0:
        raise ExecutionError(
            "runner: expected at least 2 pages (one is the null page) and 0 or more host slots, "
            f"got {num_pages} and {num_host_pages}"
        )


def num_bytes(buffer: Buffer, dims: Mapping[str, int]) -> int:
    """Bytes of a buffer at the given sizes."""
    return math.prod(evaluate(size, dims) for size in buffer.shape) * ITEM_BYTES[buffer.dtype]


def grown(memory: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    """The same memory if it is large enough, else new memory."""
    return memory if memory.nbytes >= size else aligned_zeros(size)


def aligned_zeros(size: int) -> NDArray[np.uint8]:
    """`size` > 0 zero bytes starting on a 64-byte boundary. Physical memory is taken once written."""
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + size]
