"""A built kernel's record, addresses and the sizes of a step -> a launch that the driver can repeat.

The record is what `octavo compile` leaves in kernels/NAME.json. A Triton cubin takes the record's parameters in
order, a tensor map followed by its shape (i32) and strides (i64), and then two pointers to scratch memory.
"""

import functools
import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.compiler.errors import ArtifactError, ExecutionError
from octavo.compiler.expression import evaluate
from octavo.runtime.cuda import Device, Driver, Launch, TensorMap

# Types of scalars as Triton names them -> struct's.
SCALARS = {"i1": "b", "i8": "b", "u8": "B", "i16": "h", "u16": "H", "i32": "i", "u32": "I", "i64": "q",
           "u64": "Q", "fp32": "f", "fp64": "d"}  # fmt: skip
THREADS_PER_WARP = 32
NO_SCRATCH = struct.pack("QQ", 0, 0)
MAX_TENSOR_MAPS = 16_384

Dim = int | str


@dataclass(frozen=True)
class Parameter:
    """One argument of a kernel, in call order.

    kind   "pointer", "scalar" or "descriptor", a tensor map over a row-major tensor of `shape`
    type   as Triton writes it: "*bf16", "i32", "tensordesc<u8[128, 64]>"
    shape  expressions in the step's sizes; the other fields of a descriptor are those of cuTensorMapEncodeTiled
    """

    name: str
    kind: str
    type: str = ""
    divisible_by_16: bool = False
    shape: tuple[Dim, ...] = ()
    block: tuple[int, ...] = ()
    box: tuple[int, ...] = ()
    dtype: int = 0
    element_bytes: int = 0
    swizzle: int = 0
    fp4_padded: bool = False


@dataclass(frozen=True)
class Record:
    """How a cubin is launched. arch: "sm_100a"; num_warps with those that warp specialisation adds."""

    function: str
    arch: str
    num_warps: int
    num_ctas: int
    shared_bytes: int
    launch_pdl: bool
    cooperative: bool
    grid: tuple[Dim, Dim, Dim]
    parameters: tuple[Parameter, ...]
    cubin_sha256: str


class Sizes:
    """Values of expressions at the sizes of one step. Layers repeat expressions, so they are kept."""

    def __init__(self, dims: Mapping[str, int]) -> None:
        self.dims = dims
        self._known: dict[Dim, int] = {}

    def __call__(self, expression: Dim) -> int:
        if expression not in self._known:
            self._known[expression] = evaluate(expression, self.dims)
        return self._known[expression]


def parse_record(launch: Mapping[str, Any], where: str) -> Record:
    """The "launch" part of a kernel's record. Raises ArtifactError for one that says too little."""
    try:
        parameters = tuple(_parameter(entry) for entry in launch["parameters"])
        x, y, z = launch["grid"]
        record = Record(
            function=launch["function"], arch=launch["arch"], num_warps=launch["num_warps"],
            num_ctas=launch["num_ctas"], shared_bytes=launch["shared_bytes"],
            launch_pdl=launch["launch_pdl"], cooperative=launch["cooperative"], grid=(x, y, z),
            parameters=parameters, cubin_sha256=launch["cubin_sha256"],
        )  # fmt: skip
        scratch = (launch["global_scratch"][0], launch["profile_scratch"][0])
    except (KeyError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"{where}: expected a launch record, got one without {error}; compile the model again"
        ) from None
    if scratch != (0, 0):
        raise ArtifactError(
            f"{where}: expected a kernel without scratch memory of its own, got one that takes {scratch} bytes; "
            "compile the model again"
        )
    return record


def _parameter(entry: Mapping[str, Any]) -> Parameter:
    if entry["kind"] not in ("pointer", "scalar", "descriptor"):
        raise ValueError(f"a kind that is known ({entry['kind']})")
    fields: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in entry.items()}
    return Parameter(**fields)


def check_arch(record: Record, device: Device, where: str) -> None:
    """ArtifactError unless the device runs the kernel: code of sm_100a runs on compute capability 10.0 alone."""
    number = re.fullmatch(r"sm_(\d+)a?", record.arch)
    if number is None or int(number[1]) != device.arch:
        raise ArtifactError(
            f"{where}: expected a GPU of {record.arch}, got {device.name} (sm_{device.arch}); compile the model "
            "for this GPU (target='auto' on it, or its name from `octavo targets`)"
        )


class Kernel:
    """A kernel that was loaded into a device."""

    def __init__(self, driver: Driver, record: Record, cubin: bytes, where: str) -> None:
        check_arch(record, driver.device, where)
        digest = hashlib.sha256(cubin).hexdigest()
        if digest != record.cubin_sha256:
            raise ArtifactError(
                f"{where}: expected a cubin of sha256 {record.cubin_sha256}, got {digest}; "
                "the artifact is damaged, compile it again"
            )
        if record.shared_bytes > driver.device.shared_bytes:
            raise ExecutionError(
                f"{where}: expected at most {driver.device.shared_bytes} bytes of shared memory on "
                f"{driver.device.name}, got {record.shared_bytes}; compile the model for this GPU"
            )
        self.record = record
        self._driver = driver
        self._function = driver.load_function(cubin, record.function, record.shared_bytes)
        self._encode = functools.lru_cache(MAX_TENSOR_MAPS)(driver.encode_tensor_map)

    def prepare(
        self, arguments: Sequence[int | float], sizes: Sizes, grid: Sequence[Dim] | None = None
    ) -> Any:
        """A launch for Driver.launch, or None where the grid is empty.

        arguments  an address for each pointer and descriptor, a number for each scalar, in the record's order
        grid       programs along each axis, instead of the record's
        Raises ExecutionError for an argument that breaks what the kernel was compiled for.
        """
        record = self.record
        x, y, z = (sizes(size) for size in (record.grid if grid is None else grid))
        if len(arguments) != len(record.parameters):
            raise ExecutionError(
                f"{record.function}: expected {len(record.parameters)} arguments, got {len(arguments)}"
            )
        if x * y * z == 0:
            return None
        packed: list[bytes] = []
        for parameter, value in zip(record.parameters, arguments, strict=True):
            packed += self._pack(parameter, value, sizes)
        packed += [NO_SCRATCH[:8], NO_SCRATCH[8:]]
        launch = Launch(
            (x, y, z), THREADS_PER_WARP * record.num_warps, record.shared_bytes, record.num_ctas,
            record.launch_pdl, record.cooperative,
        )  # fmt: skip
        return self._driver.prepare(self._function, launch, packed)

    def _pack(self, parameter: Parameter, value: int | float, sizes: Sizes) -> list[bytes]:
        where = f"{self.record.function}, argument {parameter.name}"
        if parameter.divisible_by_16 and value % 16:
            raise ExecutionError(f"{where}: expected a multiple of 16, as the kernel relies on, got {value}")
        if parameter.kind == "scalar":
            return [_scalar(parameter.type, value, where)]
        assert isinstance(value, int), f"{where}: an address is a whole number, got {value}"
        if parameter.kind == "pointer":
            return [struct.pack("Q", value)]
        shape = tuple(sizes(size) for size in parameter.shape)
        strides = row_major(shape)
        encoded = self._encode(tensor_map(parameter, value, shape, where))
        return [
            encoded,
            *(struct.pack("i", size) for size in shape),
            *(struct.pack("q", stride) for stride in strides),
        ]


def tensor_map(parameter: Parameter, address: int, shape: tuple[int, ...], where: str) -> TensorMap:
    """The driver's arguments for a descriptor of a row-major tensor, whose last axis is the driver's first."""
    strides = tuple(stride * parameter.element_bytes for stride in row_major(shape)[:-1])
    if address % 16 or any(stride % 16 for stride in strides) or 0 in shape:
        raise ExecutionError(
            f"{where}: expected a tensor that TMA reads, with sizes above 0 and an address and row strides that "
            f"are multiples of 16 bytes, got {list(shape)} at {address:#x} with strides of {list(strides)} bytes"
        )
    if len(parameter.box) != len(shape):
        raise ExecutionError(f"{where}: expected {len(parameter.box)} sizes, got {list(shape)}")
    # two codes lie in a byte, and a padded tensor map counts codes
    extent = (*shape[:-1], 2 * shape[-1]) if parameter.fp4_padded else shape
    return TensorMap(
        address, parameter.dtype, extent[::-1], strides[::-1], parameter.box[::-1], parameter.swizzle
    )


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements between neighbours along each axis."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return tuple(strides[: len(shape)])


def _scalar(kind: str, value: int | float, where: str) -> bytes:
    try:
        return struct.pack(SCALARS[kind], value)
    except (struct.error, OverflowError, KeyError) as error:
        raise ExecutionError(f"{where}: expected a value of {kind}, got {value} ({error})") from None
