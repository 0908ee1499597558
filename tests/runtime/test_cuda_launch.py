"""Records, addresses and sizes -> what a kernel is given."""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_cuda import B200, H100, RecordingDriver

from octavo.compiler.errors import ArtifactError, ExecutionError
from octavo.runtime.cuda import Launch, TensorMap
from octavo.runtime.cuda_launch import Kernel, Sizes, parse_record, row_major

CUBIN = b"\x7fELF of a kernel"
TILES = {
    "name": "x", "kind": "descriptor", "swizzle": 3, "element_bytes": 2, "dtype": 9, "box": [64, 32],
    "fp4_padded": False, "shape": ["T", 96], "block": [64, 64],
}  # fmt: skip
POINTER = {"name": "out", "kind": "pointer", "type": "*bf16", "divisible_by_16": True}
ROWS = {"name": "num_rows", "kind": "scalar", "type": "i32", "divisible_by_16": False}
LAUNCH: dict[str, Any] = {
    "function": "linear", "arch": "sm_100a", "num_warps": 12, "num_ctas": 1, "shared_bytes": 50_000,
    "tmem_columns": 512, "launch_pdl": True, "cooperative": False, "global_scratch": [0, 1],
    "profile_scratch": [0, 1], "parameters": [TILES, POINTER, ROWS], "constexprs": {},
    "grid": ["(T + 63) // 64", "2", "1"], "source_sha256": "", "cubin_sha256": hashlib.sha256(CUBIN).hexdigest(),
}  # fmt: skip


def make(driver: RecordingDriver, **changes: Any) -> Kernel:
    return Kernel(driver, parse_record({**LAUNCH, **changes}, "kernel.json"), CUBIN, "kernel.cubin")


def test_a_launch() -> None:
    driver = RecordingDriver()
    kernel = make(driver)
    assert driver.functions == [("linear", CUBIN, 50_000)]
    prepared = kernel.prepare([0x1000, 0x2000, 70], Sizes({"T": 70}))
    assert prepared.launch == Launch((2, 2, 1), 384, 50_000, 1, True, False)
    assert driver.maps == [TensorMap(0x1000, 9, (96, 70), (192,), (32, 64), 3)]
    assert [struct.unpack(f, p)[0] for f, p in zip("iiqqQiQQ", prepared.parameters[1:], strict=True)] == [
        70, 96, 96, 1, 0x2000, 70, 0, 0,
    ]  # fmt: skip
    assert kernel.prepare([0x1000, 0x2000, 70], Sizes({"T": 70}), (1, "T * 2", 1)).launch.grid == (1, 140, 1)


def test_scales_and_codes_of_4_bits() -> None:
    """Scales lie in atoms of 512 bytes, a tensor of 5 axes; a padded tensor map counts codes, of which 2 are a byte."""
    driver = RecordingDriver()
    scales = {
        **TILES,
        "element_bytes": 1,
        "dtype": 0,
        "swizzle": 0,
        "box": [1, 1, 4, 2, 256],
        "block": [1, 1, 4, 2, 256],
    }
    scales["shape"] = [1, "(T + 127) // 128", 6, 2, 256]
    codes = {
        **TILES,
        "element_bytes": 1,
        "dtype": 14,
        "box": [128, 128],
        "fp4_padded": True,
        "shape": ["T", 192],
    }
    kernel = make(driver, parameters=[scales, codes])
    prepared = kernel.prepare([512, 1024], Sizes({"T": 200}))
    assert driver.maps == [
        TensorMap(512, 0, (256, 2, 6, 2, 1), (256, 512, 3072, 6144), (256, 2, 4, 1, 1), 0),
        TensorMap(1024, 14, (384, 200), (192,), (128, 128), 3),
    ]
    assert [struct.unpack("i", p)[0] for p in prepared.parameters[1:6]] == [1, 2, 6, 2, 256]
    assert [struct.unpack("q", p)[0] for p in prepared.parameters[6:11]] == [6144, 3072, 512, 256, 1]
    assert [struct.unpack("i", p)[0] for p in prepared.parameters[12:14]] == [
        200,
        192,
    ]  # the kernel counts bytes


def test_tensor_maps_are_encoded_once() -> None:
    driver = RecordingDriver()
    kernel = make(driver)
    for tokens, count in ((70, 1), (70, 1), (71, 2), (70, 2)):
        kernel.prepare([0x1000, 0x2000, tokens], Sizes({"T": tokens}))
        assert len(driver.maps) == count


def test_an_empty_grid_is_no_launch() -> None:
    assert make(RecordingDriver()).prepare([0x1000, 0x2000, 0], Sizes({"T": 0})) is None


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_row_major(shape: tuple[int, ...]) -> None:
    assert row_major(shape) == {0: (), 1: (1,), 3: (12, 4, 1)}[len(shape)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([0x1000, 0x2008, 5], r"linear, argument out: expected a multiple of 16, .* got 8200"),
        ([0x1008, 0x2000, 5], r"linear, argument x: expected a tensor that TMA reads, .*\[5, 96\] at 0x1008"),
        ([0x1000, 0x2000, 2**31], r"argument num_rows: expected a value of i32, got 2147483648"),
        ([0x1000, 0x2000, 1.5], r"argument num_rows: expected a value of i32, got 1\.5"),
        ([0x1000, 0x2000], "expected 3 arguments, got 2"),
    ],
)
def test_arguments_that_break_a_promise(arguments: list[int], said: str) -> None:
    with pytest.raises(ExecutionError, match=said):
        make(RecordingDriver()).prepare(arguments, Sizes({"T": 5}))


def test_rows_that_tma_cannot_read() -> None:
    narrow = make(RecordingDriver(), parameters=[{**TILES, "shape": ["T", 9]}], grid=["1", "1", "1"])
    with pytest.raises(ExecutionError, match=r"strides of \[18\] bytes"):
        narrow.prepare([0x1000], Sizes({"T": 5}))
    with pytest.raises(ExecutionError, match=r"sizes above 0 .*got \[0, 9\]"):
        narrow.prepare([0x1000], Sizes({"T": 0}))


@pytest.mark.parametrize(
    ("make_kernel", "error", "said"),
    [
        (lambda: make(RecordingDriver(H100)), ArtifactError,
         r"kernel\.cubin: expected a GPU of sm_100a, got NVIDIA H100 80GB HBM3 \(sm_90\); compile the model for"),
        (lambda: make(RecordingDriver(), arch="gfx90"), ArtifactError, "expected a GPU of gfx90"),
        (lambda: make(RecordingDriver(), cubin_sha256="0"), ArtifactError, "expected a cubin of sha256 0, got"),
        (lambda: make(RecordingDriver(replace(B200, shared_bytes=49_999))), ExecutionError,
         "expected at most 49999 bytes of shared memory on NVIDIA B200, got 50000"),
        (lambda: make(RecordingDriver(), global_scratch=[64, 16]), ArtifactError, r"got one that takes \(64, 0\)"),
        (lambda: make(RecordingDriver(), parameters=[{**POINTER, "kind": "texture"}]), ArtifactError, "texture"),
        (lambda: make(RecordingDriver(), parameters=[{"kind": "pointer"}]), ArtifactError, r"kernel\.json: expected"),
        (lambda: parse_record({}, "kernel.json"), ArtifactError, r"kernel\.json: expected a launch record, got one"),
    ],
)  # fmt: skip
def test_kernels_that_do_not_fit(
    make_kernel: Callable[[], object], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        make_kernel()
