"""A CUDA driver without a GPU: memory is the host's, launches are noted down. See Driver in octavo.runtime.cuda.

What real memory may hold before it is written, this memory does hold: nan, or numbers of nothing.
"""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.runtime.cuda import TENSOR_MAP_BYTES, Device, Launch, Pieces, TensorMap
from octavo.runtime.cuda_runner import CudaRunner
from octavo.runtime.model_runner import ONE_PAGE, num_bytes

B200 = Device(
    ordinal=0, name="NVIDIA B200", arch=100, sm_count=148, memory_bytes=2**28, l2_bytes=2**27,
    shared_bytes=232_448, registers_per_sm=65_536, threads_per_sm=2048, clock_khz=1_850_000,
    memory_clock_khz=3_996_000, driver=13_000,
)  # fmt: skip
H100 = replace(B200, name="NVIDIA H100 80GB HBM3", arch=90, sm_count=132)
POISON, FREED = 0xFF, 0xFE
ALIGNMENT = 256


@dataclass(frozen=True)
class Launched:
    """A launch that took place. parameters: the bytes of each, in order."""

    function: str
    launch: Launch
    parameters: tuple[bytes, ...]


def caches_of(runner: CudaRunner, driver: "RecordingDriver") -> dict[str, NDArray[np.uint8]]:
    """Each cache buffer as (pages, bytes)."""
    sizes = {buffer.name: num_bytes(buffer, ONE_PAGE) for buffer in runner.program.of_kind("cache")}
    return {
        name: driver.at(runner.addresses[name], runner.num_pages * size).reshape(runner.num_pages, size)
        for name, size in sizes.items()
    }


class RecordingDriver:
    """Implements Driver. Work is done at once, or noted while a graph is captured and done when it is launched.

    launches  every kernel that ran, those of graphs at each of their launches
    queued    (call, stream) of all that was put on a stream, in order
    fail      set to an error, the next launch raises it
    """

    def __init__(self, device: Device = B200) -> None:
        self.device = device
        self.allocated: dict[int, NDArray[np.uint8]] = {}
        self.pinned: list[NDArray[np.uint8]] = []
        self.functions: list[tuple[str, bytes, int]] = []
        self.maps: list[TensorMap] = []
        self.launches: list[Launched] = []
        self.queued: list[tuple[str, int]] = []
        self.graphs: dict[int, list[Callable[[], None]]] = {}
        self.num_graph_launches = 0
        self.uploads = self.waits = 0
        self.is_closed = False
        self.fail: ExecutionError | None = None
        self._capturing: list[Callable[[], None]] | None = None
        self._next_handle = 0

    def close(self) -> None:
        self.is_closed = True

    def activate(self) -> None:
        pass

    def load_function(self, cubin: bytes, name: str, shared_bytes: int) -> int:
        self.functions.append((name, cubin, shared_bytes))
        return len(self.functions) - 1

    def allocate(self, num_bytes: int) -> int:
        self._forbid_in_capture("allocate")
        if num_bytes > self.memory()[0]:
            raise ExecutionError(f"allocate: expected room for {num_bytes} bytes, got less")
        whole = np.full(num_bytes + ALIGNMENT, POISON, np.uint8)
        start = -whole.ctypes.data % ALIGNMENT
        array = whole[start : start + num_bytes]
        self.allocated[array.ctypes.data] = array
        return array.ctypes.data

    def free(self, address: int) -> None:
        self._forbid_in_capture("free")
        self.allocated.pop(address).fill(FREED)

    def allocate_host(self, num_bytes: int) -> NDArray[np.uint8]:
        self.pinned.append(np.full(num_bytes, POISON, np.uint8))
        return self.pinned[-1]

    def free_host(self, array: NDArray[np.uint8]) -> None:
        array.fill(FREED)
        self.pinned = [other for other in self.pinned if other is not array]

    def memory(self) -> tuple[int, int]:
        used = sum(array.nbytes for array in self.allocated.values())
        return self.device.memory_bytes - used, self.device.memory_bytes

    def at(self, address: int, num_bytes: int | None = None) -> NDArray[np.uint8]:
        """Device memory from an address on: so many bytes, or all of its allocation that follows."""
        for start, array in self.allocated.items():
            end = start + array.nbytes
            if start <= address < end and (num_bytes is None or address + num_bytes <= end):
                return array[address - start :][:num_bytes]
        raise IndexError(f"{num_bytes} bytes at {address:#x} lie in no allocation")

    def upload(self, address: int, source: NDArray[Any], stream: int) -> None:
        self.uploads += 1
        self.queued.append(("upload", stream))
        self._do(lambda: self._write(address, source.reshape(-1).view(np.uint8)))

    def download(self, target: NDArray[Any], address: int, stream: int) -> None:
        self.queued.append(("download", stream))

        def copy() -> None:
            target.reshape(-1).view(np.uint8)[:] = self.at(address, target.nbytes)

        self._do(copy)

    def copy(self, target: Pieces, source: Pieces, piece_bytes: int, count: int, stream: int) -> None:
        assert target.stride % piece_bytes == source.stride % piece_bytes == 0, "no driver copies that"
        self.queued.append(("copy", stream))

        def copy() -> None:
            for i in range(count):
                content = self._anywhere(source.address + i * source.stride, piece_bytes)
                self._anywhere(target.address + i * target.stride, piece_bytes)[:] = content

        self._do(copy)

    def _anywhere(self, address: int, num_bytes: int) -> NDArray[np.uint8]:
        """Device memory or page-locked host memory."""
        for array in self.pinned:
            start = address - array.ctypes.data
            if 0 <= start and start + num_bytes <= array.nbytes:
                return array[start : start + num_bytes]
        return self.at(address, num_bytes)

    def fill(self, address: int, byte: int, num_bytes: int, stream: int) -> None:
        self._do(lambda: self._write(address, np.full(num_bytes, byte, np.uint8)))

    def _write(self, address: int, content: NDArray[np.uint8]) -> None:
        self.at(address, content.nbytes)[:] = content

    def create_stream(self) -> int:
        return self._handle()

    def free_stream(self, stream: int) -> None:
        pass

    def synchronize(self, stream: int) -> None:
        self._forbid_in_capture("synchronize")

    def create_event(self) -> int:
        return self._handle()

    def free_event(self, event: int) -> None:
        pass

    def record(self, event: int, stream: int) -> None:
        pass

    def wait(self, event: int) -> None:
        self._forbid_in_capture("wait")
        self.waits += 1

    def elapsed_ms(self, start: int, end: int) -> float:
        return 1.0

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """The place of the map in `maps`."""
        self.maps.append(tensor_map)
        return struct.pack("Q", len(self.maps) - 1).ljust(TENSOR_MAP_BYTES, b"\0")

    def tensor_map(self, encoded: bytes) -> TensorMap:
        assert len(encoded) == TENSOR_MAP_BYTES
        (place,) = struct.unpack_from("Q", encoded)
        return self.maps[int(place)]

    def prepare(self, function: int, launch: Launch, parameters: Sequence[bytes]) -> Launched:
        return Launched(self.functions[function][0], launch, tuple(parameters))

    def launch(self, prepared: Launched, stream: int) -> None:
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        self.queued.append(("launch", stream))
        self._do(lambda: self._run(prepared))

    def _run(self, launched: Launched) -> None:
        self.launches.append(launched)
        self.execute(launched)

    def execute(self, launched: Launched) -> None:
        """What the kernel does to memory; nothing here."""

    def begin_capture(self, stream: int) -> None:
        assert self._capturing is None
        self._capturing = []

    def end_capture(self, stream: int) -> int:
        assert self._capturing is not None
        graph = self._handle()
        self.graphs[graph], self._capturing = self._capturing, None
        return graph

    def launch_graph(self, graph: int, stream: int) -> None:
        self._forbid_in_capture("launch_graph")
        self.num_graph_launches += 1
        self.queued.append(("launch_graph", stream))
        for work in self.graphs[graph]:
            work()

    def free_graph(self, graph: int) -> None:
        del self.graphs[graph]

    def _do(self, work: Callable[[], None]) -> None:
        if self._capturing is None:
            work()
        else:
            self._capturing.append(work)

    def _forbid_in_capture(self, call: str) -> None:
        if self._capturing is not None:
            raise ExecutionError(f"{call}: a capture of the stream forbids it")

    def _handle(self) -> int:
        self._next_handle += 1
        return self._next_handle
