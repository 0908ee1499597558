"""What a GPU is to the runtime: its figures, launches and tensor maps as plain data, and what a driver does.

cuda_driver has the driver of this machine; tests put others in its place.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

TENSOR_MAP_BYTES = 128


@dataclass(frozen=True)
class Device:
    """A GPU. arch is its compute capability times ten (100 is sm_100); shared_bytes the most that a program takes.

    driver  the newest CUDA version that its driver serves: 13000 is 13.0
    """

    ordinal: int
    name: str
    arch: int
    sm_count: int
    memory_bytes: int
    l2_bytes: int
    shared_bytes: int
    registers_per_sm: int
    threads_per_sm: int
    clock_khz: int
    memory_clock_khz: int
    driver: int


@dataclass(frozen=True)
class TensorMap:
    """What cuTensorMapEncodeTiled takes, the innermost axis first.

    dtype    CUtensorMapDataType
    strides  bytes between neighbours along every axis but the innermost
    swizzle  CUtensorMapSwizzle
    """

    address: int
    dtype: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched. grid counts programs, a cluster of `cluster` blocks each.

    pdl  may begin while the kernel before it ends (programmatic dependent launch)
    """

    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int = 0
    cluster: int = 1
    pdl: bool = False
    cooperative: bool = False


@dataclass(frozen=True)
class Pieces:
    """Equal pieces of device memory or of page-locked host memory. stride: bytes from each to the next."""

    address: int
    stride: int


class Driver(Protocol):
    """A device and what is done with it. Every call may raise ExecutionError."""

    device: Device

    def close(self) -> None:
        """Unload kernels and let go of the device. Memory is its owners' to free, before."""

    def activate(self) -> None:
        """Make the device that of the calling thread; before anything else in a thread."""

    def load_function(self, cubin: bytes, name: str, shared_bytes: int) -> int:
        """A kernel that may take so much dynamic shared memory."""
        ...

    def allocate(self, num_bytes: int) -> int:
        """Address of device memory, whose content is anything; 256-byte aligned."""
        ...

    def free(self, address: int) -> None: ...

    def allocate_host(self, num_bytes: int) -> NDArray[np.uint8]:
        """Page-locked host memory, which copies at full speed and asynchronously."""
        ...

    def free_host(self, array: NDArray[np.uint8]) -> None: ...

    def memory(self) -> tuple[int, int]:
        """(free, all) bytes of the device."""
        ...

    def upload(self, address: int, source: NDArray[Any], stream: int) -> None: ...

    def download(self, target: NDArray[Any], address: int, stream: int) -> None: ...

    def copy(self, target: Pieces, source: Pieces, piece_bytes: int, count: int, stream: int) -> None:
        """`count` pieces of `piece_bytes`, of which both strides are multiples. No piece overlaps another."""

    def fill(self, address: int, byte: int, num_bytes: int, stream: int) -> None: ...

    def create_stream(self) -> int: ...

    def free_stream(self, stream: int) -> None: ...

    def synchronize(self, stream: int) -> None:
        """Wait until all work of the stream is done. Errors of kernels show here."""

    def create_event(self) -> int: ...

    def free_event(self, event: int) -> None: ...

    def record(self, event: int, stream: int) -> None: ...

    def wait(self, event: int) -> None:
        """Until the work before the event is done."""

    def elapsed_ms(self, start: int, end: int) -> float: ...

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        """Its 128 bytes, a parameter of a kernel."""
        ...

    def prepare(self, function: int, launch: Launch, parameters: Sequence[bytes]) -> Any:
        """A launch that `launch` can repeat. parameters in the order of the kernel's own table."""
        ...

    def launch(self, prepared: Any, stream: int) -> None: ...

    def begin_capture(self, stream: int) -> None:
        """What follows on the stream is noted down, not done."""

    def end_capture(self, stream: int) -> int:
        """The noted work as a graph."""
        ...

    def launch_graph(self, graph: int, stream: int) -> None: ...

    def free_graph(self, graph: int) -> None: ...
