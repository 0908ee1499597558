"""The ctypes binding against a libcuda without a GPU, which is built here from NVIDIA's own header."""

import ctypes
import re
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.kernel import Kernel as Built
from octavo.codegen.linear_triton import Product, linear_tma_spec
from octavo.compiler.errors import ExecutionError, MissingDependencyError
from octavo.compiler.target import load_target
from octavo.runtime.cuda import Driver, Launch, Pieces, TensorMap
from octavo.runtime.cuda_driver import CudaDriver
from octavo.runtime.cuda_launch import Kernel, Sizes, parse_record

TRITON = find_spec("triton")
BACKEND = Path(str(TRITON and TRITON.origin)).parent / "backends" / "nvidia"
SOURCE = Path(__file__).parents[1] / "support" / "stub_cuda.c"
STREAM = 0x40

pytestmark = pytest.mark.skipif(
    shutil.which("gcc") is None or not (BACKEND / "include" / "cuda.h").exists(),
    reason="the stand-in for libcuda needs gcc and Triton's copy of cuda.h",
)


class Maps(ctypes.Structure):
    """What the stand-in notes of a tensor map."""

    _fields_ = (
        ("numbers", ctypes.c_int * 6), ("address", ctypes.c_void_p), ("shape", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5), ("box", ctypes.c_uint32 * 5), ("element_strides", ctypes.c_uint32 * 5),
    )  # fmt: skip


class Stub:
    """The stand-in, and what it noted."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.library = ctypes.CDLL(self.path)

    def number(self, name: str) -> Any:
        return ctypes.c_int.in_dll(self.library, name)

    def text(self, name: str, size: int = 64) -> Any:
        return (ctypes.c_char * size).in_dll(self.library, name)

    @property
    def calls(self) -> list[str]:
        return list(self.text("stub_log", 1 << 16).value.decode().split())

    def expect(self, sizes: list[int]) -> None:
        """The sizes of a kernel's parameters: a launch copies so much of each."""
        array = (ctypes.c_int * 256).in_dll(self.library, "stub_sizes")
        for index, size in enumerate(sizes):
            array[index] = size
        self.number("stub_count").value = len(sizes)

    def parameters(self, sizes: list[int]) -> list[bytes]:
        whole = bytes((ctypes.c_ubyte * 8192).in_dll(self.library, "stub_parameters"))
        ends = np.cumsum(sizes).tolist()
        return [whole[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def maps(self) -> list[Any]:
        return list((Maps * 64).in_dll(self.library, "stub_maps"))[: self.number("stub_num_maps").value]

    def config(self) -> tuple[Any, ...]:
        """Grid, block and shared bytes; stream, attributes, number of attributes."""
        raw = bytes((ctypes.c_ubyte * 56).in_dll(self.library, "stub_config"))
        return struct.unpack("7I4xQQI4x", raw)

    def attributes(self, count: int) -> list[tuple[int, bytes]]:
        raw = bytes((ctypes.c_ubyte * (72 * 8)).in_dll(self.library, "stub_attributes"))
        return [
            (struct.unpack_from("i", raw, 72 * i)[0], raw[72 * i + 8 : 72 * i + 24]) for i in range(count)
        ]


@pytest.fixture(scope="session")
def build_stub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stub") / "libcuda.so"
    command = ["gcc", "-shared", "-fPIC", "-Wall", "-Wno-unused-parameter", "-Werror"]
    subprocess.run(
        [*command, f"-I{BACKEND / 'include'}", str(SOURCE), "-o", str(path)], check=True, timeout=60
    )
    return path


@pytest.fixture
def stub(build_stub: Path, tmp_path: Path) -> Stub:
    """A fresh copy: its variables are zero."""
    return Stub(Path(shutil.copy(build_stub, tmp_path / "libcuda.so")))


@pytest.fixture
def driver(stub: Stub) -> Iterator[CudaDriver]:
    driver = CudaDriver(library=stub.path)
    yield driver
    driver.close()


def test_structs_have_the_sizes_of_the_header(stub: Stub) -> None:
    sizes = [
        ctypes.c_uint64.in_dll(stub.library, f"stub_{name}_bytes").value for name in ("config", "attribute")
    ]
    assert sizes == [56, 72]  # what `config` and `attributes` above unpack


def test_a_device_is_described(driver: CudaDriver) -> None:
    as_driver: Driver = driver
    device = as_driver.device
    assert (device.name, device.arch, device.sm_count, device.driver) == ("NVIDIA Stub", 100, 148, 13010)
    assert (device.memory_bytes, device.shared_bytes) == (2**30, 232448)
    assert (device.clock_khz, device.memory_clock_khz) == (1850000, 3996000)
    assert (device.l2_bytes, device.registers_per_sm, device.threads_per_sm) == (132120576, 65536, 2048)


def test_memory_goes_there_and_back(driver: CudaDriver) -> None:
    address = driver.allocate(1000)
    assert address % 256 == 0
    source = driver.allocate_host(1000)
    source[:] = np.arange(1000) % 251
    target = np.zeros(1000, np.uint8)
    driver.upload(address, source, STREAM)
    driver.fill(address + 10, 7, 20, STREAM)
    driver.download(target, address, STREAM)
    source[10:30] = 7
    assert np.array_equal(source, target)
    driver.free_host(source)
    driver.free(address)
    assert driver.memory() == (2**29, 2**30)


def test_pieces_far_apart_come_to_pieces_side_by_side(driver: CudaDriver) -> None:
    """And back, to other places."""
    far, near = 5 * 12, 12
    address, host = driver.allocate(3 * far), driver.allocate_host(3 * near)
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * (3 * far)).from_address(address))
    memory[:] = np.arange(3 * far)
    driver.copy(Pieces(host.ctypes.data, near), Pieces(address + 2 * 12, far), 12, 3, STREAM)
    whole = np.arange(3 * far, dtype=np.uint8).reshape(3, 5, 12)
    assert np.array_equal(host.reshape(3, 12), whole[:, 2])
    driver.copy(Pieces(address + 4 * 12, far), Pieces(host.ctypes.data, near), 12, 3, STREAM)
    whole[:, 4] = whole[:, 2]
    assert np.array_equal(memory, whole.reshape(-1))
    driver.free_host(host)
    driver.free(address)


def test_streams_events_and_graphs(driver: CudaDriver, stub: Stub) -> None:
    stream, start, end = driver.create_stream(), driver.create_event(), driver.create_event()
    function = driver.load_function(b"\x7fELF", "kernel", 1000)
    driver.begin_capture(stream)
    driver.launch(driver.prepare(function, Launch((1, 1, 1), 32), []), stream)
    graph = driver.end_capture(stream)
    driver.record(start, stream)
    for _ in range(3):
        driver.launch_graph(graph, stream)
    driver.record(end, stream)
    driver.wait(end)
    assert driver.elapsed_ms(start, end) == 1.5
    driver.free_graph(graph)
    driver.free_event(start)
    driver.free_stream(stream)
    assert (stub.number("stub_captured").value, stub.number("stub_replayed").value) == (1, 3)
    assert stub.calls.count("cuGraphDestroy") == 1  # the graph itself, not what was made of it
    assert stub.number("stub_dynamic_shared").value == 0  # 1000 bytes need no leave


@pytest.mark.parametrize(
    ("launch", "expected"),
    [
        (Launch((3, 4, 5), 128), []),
        (Launch((3, 4, 5), 128, pdl=True), [(6, struct.pack("i", 1))]),
        (Launch((3, 4, 5), 128, cooperative=True), [(2, struct.pack("i", 1))]),
        (Launch((3, 4, 5), 128, cluster=2), [(4, struct.pack("III", 2, 1, 1)), (5, struct.pack("i", 1))]),
    ],
)
def test_attributes_of_a_launch(
    driver: CudaDriver, stub: Stub, launch: Launch, expected: list[tuple[int, bytes]]
) -> None:
    function = driver.load_function(b"\x7fELF", "kernel", 0)
    driver.launch(driver.prepare(function, launch, []), STREAM)
    *config, stream, _, count = stub.config()
    assert config == [3 * launch.cluster, 4, 5, 128, 1, 1, 0]
    assert stream == STREAM
    found = stub.attributes(count)
    assert [
        (number, value[: len(wanted)]) for (number, value), (_, wanted) in zip(found, expected, strict=True)
    ] == expected


def test_a_failure_names_the_call_and_the_remedy(driver: CudaDriver, stub: Stub) -> None:
    stub.text("stub_fail").value = b"cuMemAlloc_v2"
    stub.number("stub_fail_code").value = 2
    with pytest.raises(ExecutionError) as raised:
        driver.allocate(16)
    assert str(raised.value) == (
        "cuMemAlloc_v2: expected CUDA_SUCCESS, got CUDA_ERROR_OUT_OF_MEMORY (2: out of memory); "
        "free device memory, or ask for fewer pages (num_pages, num_host_pages)"
    )
    stub.number("stub_fail_code").value = 12345
    with pytest.raises(ExecutionError, match=r"cuMemAlloc_v2: .*unknown \(12345: unknown\); see the log"):
        driver.allocate(16)
    stub.text("stub_fail").value = b""


EVERY_CALL: list[Callable[[CudaDriver], object]] = [
    lambda d: d.load_function(b"\x7fELF", "kernel", 50_000), lambda d: d.allocate_host(8), lambda d: d.memory(),
    lambda d: d.copy(Pieces(16, 1), Pieces(16, 1), 1, 0, STREAM),
    lambda d: d.create_stream(), lambda d: d.create_event(), lambda d: d.synchronize(STREAM),
    lambda d: d.launch_graph(0x70, STREAM), lambda d: d.begin_capture(STREAM), lambda d: d.end_capture(STREAM),
    lambda d: d.encode_tensor_map(TensorMap(16, 0, (1,), (), (1,), 0)), lambda d: d.activate(),
    lambda d: d.launch(d.prepare(0x30, Launch((1, 1, 1), 32), []), STREAM),
]  # fmt: skip


@pytest.mark.parametrize("call", EVERY_CALL)
def test_no_failure_is_overlooked(
    driver: CudaDriver, stub: Stub, call: Callable[[CudaDriver], object]
) -> None:
    before = len(stub.calls)
    call(driver)
    names = stub.calls[before:]
    assert names
    stub.number("stub_fail_code").value = 1
    for name in set(names):
        stub.text("stub_fail").value = name.encode()
        with pytest.raises(
            ExecutionError, match=f"^{name}: expected CUDA_SUCCESS, got CUDA_ERROR_INVALID_VALUE"
        ):
            call(driver)
    stub.text("stub_fail").value = b""


def test_no_library_and_no_device(stub: Stub, tmp_path: Path) -> None:
    with pytest.raises(
        MissingDependencyError, match=r"expected NVIDIA's driver library .*none\.so, got none"
    ):
        CudaDriver(library=str(tmp_path / "none.so"))
    with pytest.raises(
        MissingDependencyError, match="expected NVIDIA device 1, got 1 devices; see nvidia-smi"
    ):
        CudaDriver(1, library=stub.path)
    empty = tmp_path / "old.so"
    subprocess.run(["gcc", "-shared", "-x", "c", "-", "-o", str(empty)], input=b"", check=True, timeout=60)
    with pytest.raises(MissingDependencyError, match=r"CUDA 12 or newer, got .*old\.so without cuInit"):
        CudaDriver(library=str(empty))


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> list[Built]:
    """Real cubins of a product: for few rows, and the persistent one with three tensor maps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(tmp_path_factory.mktemp("cache")))
        spec = linear_tma_spec(Product("T", 512, 256, "bf16", "bf16", bias=False), load_target("b200"))
        one_form = [replace(launch, candidates=()) for launch in (spec, spec.launches[-1])]
        return build_kernels(one_form, load_target("b200"))


def parameter_sizes(cubin: bytes, folder: Path) -> list[int]:
    """Bytes of each parameter, as the cubin's own table lists them."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = str(BACKEND / "bin" / "cuobjdump")
    elf = subprocess.run([tool, "--dump-elf", str(path)], capture_output=True, text=True, check=True).stdout
    rows = re.findall(r"Ordinal : (0x\w+)\s+Offset  : 0x\w+\s+Size    : (0x\w+)", elf)
    found = {int(ordinal, 16): int(size, 16) for ordinal, size in rows}
    return [found[ordinal] for ordinal in sorted(found)]


@pytest.mark.parametrize("index", [0, 1])
def test_what_is_pushed_is_what_the_cubin_lists(
    driver: CudaDriver, stub: Stub, products: list[Built], tmp_path: Path, index: int
) -> None:
    built = products[index]
    assert built.binary is not None
    sizes = parameter_sizes(built.binary, tmp_path)
    record = parse_record(built.metadata["launch"], "kernel.json")
    kernel = Kernel(driver, record, built.binary, "kernel.cubin")
    assert stub.number("stub_dynamic_shared").value == record.shared_bytes > 48 * 1024
    rows = (5, 300)[index]
    addresses = [0x10000, 0x20000, 0x30000]
    prepared = kernel.prepare([*addresses, rows], Sizes({"T": rows}))
    stub.expect(sizes)
    driver.launch(prepared, STREAM)
    pushed = stub.parameters(sizes)
    # a tensor map, its shape and its strides for each tensor that TMA moves
    assert pushed[0][0] == 0xA0 and pushed[5][0] == 0xA1 and sizes[0] == sizes[5] == 128
    assert [struct.unpack("i", value)[0] for value in pushed[1:3]] == [rows, 256]
    assert [struct.unpack("q", value)[0] for value in pushed[3:5]] == [256, 1]
    assert struct.unpack("i", pushed[-3])[0] == rows
    assert pushed[-2] + pushed[-1] == bytes(16)  # scratch
    assert len(sizes) == len(prepared.pointers)
    x, weight = stub.maps()[:2]
    assert (x.address, weight.address) == (addresses[0], addresses[1])
    assert list(x.shape)[:2] == [256, rows] and list(weight.shape)[:2] == [256, 512]
    assert x.strides[0] == weight.strides[0] == 512
    interleave, swizzle, promotion, fill = x.numbers[2:]
    assert (x.numbers[0], x.numbers[1], interleave, swizzle, promotion, fill) == (9, 2, 0, 3, 2, 0)
    assert list(x.element_strides)[:2] == [1, 1]
    config = stub.config()
    assert config[3] == 32 * record.num_warps and config[6] == record.shared_bytes
