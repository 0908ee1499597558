"""The CUDA driver through ctypes: memory, streams, events, kernels, tensor maps and graphs of one device.

It needs libcuda and numpy, neither torch nor Triton. Addresses and handles are whole numbers.
"""

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError, MissingDependencyError
from octavo.runtime.cuda import TENSOR_MAP_BYTES, Device, Launch, Pieces, TensorMap

LIBRARY = "libcuda.so.1"
TENSOR_MAP_ALIGNMENT = 64
# A kernel that takes more dynamic shared memory must be allowed to.
SHARED_BYTES_WITHOUT_ASKING = 48 * 1024
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_L2_PROMOTION_128B = 2
_THREAD_LOCAL_CAPTURE = 1
_NON_BLOCKING_STREAM = 1
_UNIFIED_MEMORY = 4  # CU_MEMORYTYPE_UNIFIED: an address says itself whether it is the host's
# CUlaunchAttributeID
_COOPERATIVE, _CLUSTER_DIMENSION, _CLUSTER_SPREAD, _PROGRAMMATIC_SERIALIZATION = 2, 4, 5, 6

_ADVICE = {
    "CUDA_ERROR_OUT_OF_MEMORY": "free device memory, or ask for fewer pages (num_pages, num_host_pages)",
    "CUDA_ERROR_NO_DEVICE": "run it on a machine with an NVIDIA GPU, or compile with target='cpu'",
    "CUDA_ERROR_NO_BINARY_FOR_GPU": "compile the model for this device (target='auto')",
    "CUDA_ERROR_INVALID_IMAGE": "install a newer NVIDIA driver, or compile with an older Triton",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": "install a newer NVIDIA driver, or compile with an older Triton",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH": "restart the machine: its driver and libcuda are of two versions",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "a kernel is wrong; this process must be started again",
    "CUDA_ERROR_LAUNCH_FAILED": "a kernel is wrong; this process must be started again",
    "CUDA_ERROR_MISALIGNED_ADDRESS": "a kernel is wrong; this process must be started again",
}

_pointer, _uint, _int, _size, _address = (
    ctypes.c_void_p, ctypes.c_uint, ctypes.c_int, ctypes.c_size_t, ctypes.c_uint64,
)  # fmt: skip
_CALLS: dict[str, tuple[Any, ...]] = {
    "cuInit": (_uint,),
    "cuDriverGetVersion": (_pointer,),
    "cuDeviceGetCount": (_pointer,),
    "cuDeviceGet": (_pointer, _int),
    "cuDeviceGetName": (_pointer, _int, _int),
    "cuDeviceTotalMem_v2": (_pointer, _int),
    "cuDeviceGetAttribute": (_pointer, _int, _int),
    "cuDevicePrimaryCtxRetain": (_pointer, _int),
    "cuDevicePrimaryCtxRelease_v2": (_int,),
    "cuCtxSetCurrent": (_pointer,),
    "cuModuleLoadData": (_pointer, _pointer),
    "cuModuleUnload": (_pointer,),
    "cuModuleGetFunction": (_pointer, _pointer, ctypes.c_char_p),
    "cuFuncSetAttribute": (_pointer, _int, _int),
    "cuFuncLoad": (_pointer,),
    "cuMemGetInfo_v2": (_pointer, _pointer),
    "cuMemAlloc_v2": (_pointer, _size),
    "cuMemFree_v2": (_address,),
    "cuMemHostAlloc": (_pointer, _size, _uint),
    "cuMemFreeHost": (_pointer,),
    "cuMemcpyHtoDAsync_v2": (_address, _pointer, _size, _pointer),
    "cuMemcpyDtoHAsync_v2": (_pointer, _address, _size, _pointer),
    "cuMemcpy3DAsync_v2": (_pointer, _pointer),
    "cuMemsetD8Async": (_address, ctypes.c_ubyte, _size, _pointer),
    "cuStreamCreate": (_pointer, _uint),
    "cuStreamDestroy_v2": (_pointer,),
    "cuStreamSynchronize": (_pointer,),
    "cuEventCreate": (_pointer, _uint),
    "cuEventDestroy_v2": (_pointer,),
    "cuEventRecord": (_pointer, _pointer),
    "cuEventSynchronize": (_pointer,),
    "cuEventElapsedTime": (_pointer, _pointer, _pointer),
    "cuStreamBeginCapture_v2": (_pointer, _int),
    "cuStreamEndCapture": (_pointer, _pointer),
    "cuGraphInstantiateWithFlags": (_pointer, _pointer, _address),
    "cuGraphDestroy": (_pointer,),
    "cuGraphLaunch": (_pointer, _pointer),
    "cuGraphExecDestroy": (_pointer,),
    "cuTensorMapEncodeTiled": (
        _pointer, _int, _uint, _pointer, _pointer, _pointer, _pointer, _pointer, _int, _int, _int, _int,
    ),
    "cuLaunchKernelEx": (_pointer, _pointer, _pointer, _pointer),
}  # fmt: skip
_OPTIONAL = ("cuFuncLoad",)  # since CUDA 12.4

# CUdevice_attribute
_ATTRIBUTES = {
    "clock_khz": 13, "sm_count": 16, "memory_clock_khz": 36, "l2_bytes": 38, "threads_per_sm": 39,
    "major": 75, "minor": 76, "registers_per_sm": 82, "shared_bytes": 97,
}  # fmt: skip


class _Config(ctypes.Structure):
    """CUlaunchConfig"""

    _fields_ = (
        ("grid", _uint * 3), ("block", _uint * 3), ("shared_bytes", _uint), ("stream", _pointer),
        ("attributes", _pointer), ("num_attributes", _uint),
    )  # fmt: skip


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: the value is a union of 64 bytes."""

    _fields_ = (("id", _int), ("padding", ctypes.c_char * 4), ("value", ctypes.c_uint64 * 8))


class _Side(ctypes.Structure):
    """The source's or the target's half of CUDA_MEMCPY3D."""

    _fields_ = (
        ("x", _size), ("y", _size), ("z", _size), ("level", _size), ("memory", _int), ("host", _pointer),
        ("address", _address), ("array", _pointer), ("reserved", _pointer), ("pitch", _size), ("height", _size),
    )  # fmt: skip


class _Copy(ctypes.Structure):
    """CUDA_MEMCPY3D"""

    _fields_ = (("source", _Side), ("target", _Side), ("width", _size), ("height", _size), ("depth", _size))


@dataclass(frozen=True)
class _Prepared:
    """A launch in the driver's form. kept: memory that its pointers reach."""

    function: int
    config: _Config
    pointers: Any
    kept: tuple[Any, ...]


class CudaDriver:
    """The driver of this machine, with the context that other libraries of the process use too.

    ordinal  which device
    library  its libcuda
    Raises MissingDependencyError without libcuda or a device.
    """

    def __init__(self, ordinal: int = 0, library: str = LIBRARY) -> None:
        self._library = _open(library)
        self._call("cuInit", 0)
        count = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(count))
        if not 0 <= ordinal < count.value:
            raise MissingDependencyError(
                f"GPU: expected NVIDIA device {ordinal}, got {count.value} devices; see nvidia-smi and "
                "CUDA_VISIBLE_DEVICES, or compile with target='cpu'"
            )
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ordinal)
        self.device = self._describe(ordinal, handle.value)
        self._handle = handle.value
        self._context = self._get("cuDevicePrimaryCtxRetain", handle.value)
        self._modules: list[int] = []
        self.activate()

    def close(self) -> None:
        self.activate()
        for module in self._modules:
            self._call("cuModuleUnload", module)
        self._modules.clear()
        self._call("cuDevicePrimaryCtxRelease_v2", self._handle)

    def activate(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def load_function(self, cubin: bytes, name: str, shared_bytes: int) -> int:
        module = self._get("cuModuleLoadData", cubin)
        self._modules.append(module)
        function = self._get("cuModuleGetFunction", module, name.encode())
        if shared_bytes > SHARED_BYTES_WITHOUT_ASKING:
            self._call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED, shared_bytes)
        if hasattr(self._library, "cuFuncLoad"):  # else at the first launch, which a capture forbids
            self._call("cuFuncLoad", function)
        return function

    def allocate(self, num_bytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), max(num_bytes, 1))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", address)

    def allocate_host(self, num_bytes: int) -> NDArray[np.uint8]:
        address = self._get("cuMemHostAlloc", max(num_bytes, 1), 0)
        memory = (ctypes.c_uint8 * max(num_bytes, 1)).from_address(address)
        return np.ctypeslib.as_array(memory)

    def free_host(self, array: NDArray[np.uint8]) -> None:
        self._call("cuMemFreeHost", array.ctypes.data)

    def memory(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def upload(self, address: int, source: NDArray[Any], stream: int) -> None:
        self._call("cuMemcpyHtoDAsync_v2", address, source.ctypes.data, source.nbytes, stream)

    def download(self, target: NDArray[Any], address: int, stream: int) -> None:
        self._call("cuMemcpyDtoHAsync_v2", target.ctypes.data, address, target.nbytes, stream)

    def copy(self, target: Pieces, source: Pieces, piece_bytes: int, count: int, stream: int) -> None:
        """The pieces as planes of one row, as a plane may be any size and the distance of rows may not."""
        sides = [
            _Side(
                memory=_UNIFIED_MEMORY,
                address=pieces.address,
                pitch=piece_bytes,
                height=pieces.stride // piece_bytes,
            )
            for pieces in (source, target)
        ]
        self._call("cuMemcpy3DAsync_v2", ctypes.byref(_Copy(*sides, piece_bytes, 1, count)), stream)

    def fill(self, address: int, byte: int, num_bytes: int, stream: int) -> None:
        self._call("cuMemsetD8Async", address, byte, num_bytes, stream)

    def create_stream(self) -> int:
        return self._get("cuStreamCreate", _NON_BLOCKING_STREAM)

    def free_stream(self, stream: int) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", stream)

    def create_event(self) -> int:
        return self._get("cuEventCreate", 0)

    def free_event(self, event: int) -> None:
        self._call("cuEventDestroy_v2", event)

    def record(self, event: int, stream: int) -> None:
        self._call("cuEventRecord", event, stream)

    def wait(self, event: int) -> None:
        self._call("cuEventSynchronize", event)

    def elapsed_ms(self, start: int, end: int) -> float:
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value

    def encode_tensor_map(self, tensor_map: TensorMap) -> bytes:
        rank = len(tensor_map.shape)
        memory = _aligned(TENSOR_MAP_BYTES, TENSOR_MAP_ALIGNMENT)
        self._call(
            "cuTensorMapEncodeTiled", memory.ctypes.data, tensor_map.dtype, rank, tensor_map.address,
            (ctypes.c_uint64 * rank)(*tensor_map.shape), (ctypes.c_uint64 * rank)(*tensor_map.strides),
            (ctypes.c_uint32 * rank)(*tensor_map.box), (ctypes.c_uint32 * rank)(*[1] * rank),
            0, tensor_map.swizzle, _L2_PROMOTION_128B, 0,
        )  # fmt: skip
        return memory.tobytes()

    def prepare(self, function: int, launch: Launch, parameters: Sequence[bytes]) -> _Prepared:
        starts, end = [], 0
        for value in parameters:
            alignment = TENSOR_MAP_ALIGNMENT if len(value) == TENSOR_MAP_BYTES else 8
            starts.append(-(-end // alignment) * alignment)
            end = starts[-1] + len(value)
        memory = _aligned(end, TENSOR_MAP_ALIGNMENT)
        for start, value in zip(starts, parameters, strict=True):
            memory[start : start + len(value)] = np.frombuffer(value, np.uint8)
        first = memory.ctypes.data
        pointers = (ctypes.c_void_p * len(starts))(*[first + start for start in starts])
        attributes = _attributes(launch)
        x, y, z = launch.grid
        config = _Config(
            (x * launch.cluster, y, z), (launch.threads, 1, 1), launch.shared_bytes, None,
            ctypes.addressof(attributes), len(attributes),
        )  # fmt: skip
        return _Prepared(function, config, pointers, (memory, attributes))

    def launch(self, prepared: _Prepared, stream: int) -> None:
        prepared.config.stream = stream
        self._call(
            "cuLaunchKernelEx", ctypes.byref(prepared.config), prepared.function, prepared.pointers, None
        )

    def begin_capture(self, stream: int) -> None:
        self._call("cuStreamBeginCapture_v2", stream, _THREAD_LOCAL_CAPTURE)

    def end_capture(self, stream: int) -> int:
        graph = ctypes.c_void_p()
        self._call("cuStreamEndCapture", stream, ctypes.byref(graph))
        try:
            return self._get("cuGraphInstantiateWithFlags", graph, 0)
        finally:
            self._call("cuGraphDestroy", graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        self._call("cuGraphLaunch", graph, stream)

    def free_graph(self, graph: int) -> None:
        self._call("cuGraphExecDestroy", graph)

    def _get(self, name: str, *arguments: Any) -> int:
        """A call whose result is a handle that it writes through its first argument."""
        handle = ctypes.c_void_p()
        self._call(name, ctypes.byref(handle), *arguments)
        return handle.value or 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise self._failure(name, code)

    def _failure(self, name: str, code: int) -> ExecutionError:
        texts = []
        for describe in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            getattr(self._library, describe)(code, ctypes.byref(text))
            texts.append((text.value or b"unknown").decode(errors="replace"))
        advice = _ADVICE.get(texts[0], "see the log of the driver (dmesg), and nvidia-smi")
        return ExecutionError(f"{name}: expected CUDA_SUCCESS, got {texts[0]} ({code}: {texts[1]}); {advice}")

    def _describe(self, ordinal: int, handle: int) -> Device:
        name = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", name, len(name), handle)
        memory, version = ctypes.c_size_t(), ctypes.c_int()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(memory), handle)
        self._call("cuDriverGetVersion", ctypes.byref(version))
        found = {}
        for attribute, number in _ATTRIBUTES.items():
            value = ctypes.c_int()
            self._call("cuDeviceGetAttribute", ctypes.byref(value), number, handle)
            found[attribute] = value.value
        arch = 10 * found.pop("major") + found.pop("minor")
        return Device(ordinal, name.value.decode(errors="replace"), arch, memory_bytes=memory.value,
                      driver=version.value, **found)  # fmt: skip


def _open(path: str) -> ctypes.CDLL:
    """libcuda with the types of what is called here."""
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise MissingDependencyError(
            f"GPU: expected NVIDIA's driver library {path}, got none ({error}); run it on a machine with an "
            "NVIDIA GPU and its driver, or compile with target='cpu'"
        ) from None
    for name, types in _CALLS.items():
        if not hasattr(library, name):
            if name in _OPTIONAL:
                continue
            raise MissingDependencyError(
                f"GPU: expected a driver for CUDA 12 or newer, got {path} without {name}; "
                "install a newer NVIDIA driver"
            )
        getattr(library, name).argtypes = types
    return library


def _attributes(launch: Launch) -> Any:
    """CUlaunchAttributes of a launch, none for a plain one."""
    wanted: list[tuple[int, bytes]] = []
    if launch.pdl:
        wanted.append((_PROGRAMMATIC_SERIALIZATION, struct.pack("i", 1)))
    if launch.cooperative:
        wanted.append((_COOPERATIVE, struct.pack("i", 1)))
    if launch.cluster > 1:
        wanted.append((_CLUSTER_DIMENSION, struct.pack("III", launch.cluster, 1, 1)))
        wanted.append((_CLUSTER_SPREAD, struct.pack("i", 1)))
    attributes = (_Attribute * len(wanted))()
    for attribute, (number, value) in zip(attributes, wanted, strict=True):
        attribute.id = number
        ctypes.memmove(attribute.value, value, len(value))
    return attributes


def _aligned(num_bytes: int, alignment: int) -> NDArray[np.uint8]:
    memory = np.zeros(num_bytes + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + num_bytes]
