"""Weights on disk: the safetensors format, written so that huge tensors stream, mapped back without copying.

Tensors are sorted by name and start on 64-byte boundaries. The format allows no holes, so small U8 tensors
named `.padding.<i>`, which the reader here skips, fill the gaps. Equal weights give equal bytes.
"""

import json
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ArtifactError

ALIGNMENT = 64
MAX_HEADER_BYTES = 64 * 2**20
MAX_RANK = 8
PADDING_PREFIX = ".padding."

# Our name -> (safetensors' name, numpy type of a view). numpy has no bfloat16, so its bits travel as uint16.
DTYPES: dict[str, tuple[str, Any]] = {
    "fp32": ("F32", np.dtype("<f4")),
    "bf16": ("BF16", np.dtype("<u2")),
    "i32": ("I32", np.dtype("<i4")),
    "i64": ("I64", np.dtype("<i8")),
    "u8": ("U8", np.dtype("u1")),
    "fp8": ("F8_E4M3", np.dtype("u1")),
    # In the dumps of graphs as they were captured, not in artifacts.
    "fp64": ("F64", np.dtype("<f8")),
    "fp16": ("F16", np.dtype("<f2")),
    "i16": ("I16", np.dtype("<i2")),
    "i8": ("I8", np.dtype("i1")),
    "b8": ("BOOL", np.dtype("u1")),
    "f8e5m2": ("F8_E5M2", np.dtype("u1")),
}
_FROM_FILE = {file_name: (name, view) for name, (file_name, view) in DTYPES.items()}

Raw = bytes | bytearray | memoryview | NDArray[Any]


@dataclass(frozen=True)
class Weight:
    """A tensor to write.

    dtype  a name of DTYPES; shape in elements
    data   its bytes, row-major and little-endian: bytes-like, a numpy array of the right size, or a function
           that gives either when the tensor's turn comes, so that not all weights need be in memory at once
    """

    dtype: str
    shape: tuple[int, ...]
    data: Raw | Callable[[], Raw]

    @property
    def num_bytes(self) -> int:
        return _count(self.shape) * int(DTYPES[self.dtype][1].itemsize)


@dataclass(frozen=True)
class Span:
    """Where a tensor lies in its file: from byte `start` to `end`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class MappedWeight:
    """A tensor read back: `array` is a read-only view of the file (bf16 as uint16)."""

    dtype: str
    shape: tuple[int, ...]
    array: NDArray[Any]


def write_weights(file: BinaryIO, weights: Mapping[str, Weight]) -> None:
    """Write a safetensors file; ArtifactError where a tensor's data is not as large as its shape says."""
    entries: dict[str, dict[str, Any]] = {}
    end = 0
    for name in sorted(weights):
        weight = weights[name]
        if weight.dtype not in DTYPES or not name or name.startswith((PADDING_PREFIX, "__")):
            raise ArtifactError(
                f"weights: expected a plain name and a dtype of {', '.join(DTYPES)}, "
                f"got '{name}' as {weight.dtype}"
            )
        start = -(-end // ALIGNMENT) * ALIGNMENT
        if start > end:
            entries[f"{PADDING_PREFIX}{len(entries)}"] = _entry("U8", (start - end,), end, start)
        end = start + weight.num_bytes
        entries[name] = _entry(DTYPES[weight.dtype][0], weight.shape, start, end)
    header = json.dumps(entries, separators=(",", ":"), ensure_ascii=True).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    file.write(len(header).to_bytes(8, "little") + header)
    position = 0
    for name in sorted(weights):
        start = entries[name]["data_offsets"][0]
        file.write(bytes(start - position))
        position = start + _write_data(file, name, weights[name])


def _entry(dtype: str, shape: tuple[int, ...], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _write_data(file: BinaryIO, name: str, weight: Weight) -> int:
    data = weight.data() if callable(weight.data) else weight.data
    if isinstance(data, np.ndarray):
        data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    view = data.data if isinstance(data, np.ndarray) else memoryview(data).cast("B")
    if view.nbytes != weight.num_bytes:
        raise ArtifactError(
            f"weights: '{name}' expected {weight.num_bytes} bytes for {weight.dtype} {list(weight.shape)}, "
            f"got {view.nbytes}"
        )
    file.write(view)
    return view.nbytes


def map_weights(path: Path, mapped: mmap.mmap) -> dict[str, MappedWeight]:
    """Views of every tensor of a mapped safetensors file, by name; ArtifactError if its header is unsound."""
    weights = {}
    for name, span in tensor_spans(path, mapped).items():
        array = np.frombuffer(mapped, DTYPES[span.dtype][1], _count(span.shape), span.start)
        weights[name] = MappedWeight(span.dtype, span.shape, array.reshape(span.shape))
    return weights


def tensor_spans(path: Path, mapped: mmap.mmap) -> dict[str, Span]:
    """Where every tensor of a mapped safetensors file lies, by name; ArtifactError if its header is unsound.

    The tensors must cover the data exactly, without overlap: nothing outside a tensor is ever read.
    """
    entries, data_start = _read_header(path, mapped)
    spans: list[tuple[int, int, str]] = []
    found: dict[str, Span] = {}
    for name, entry in entries.items():
        dtype, shape, start, end = _check_entry(path, name, entry)
        if end > len(mapped) - data_start:
            raise _bad(path, f"tensor '{name}' ends within the file's {len(mapped)} bytes", data_start + end)
        spans.append((start, end, name))
        if not name.startswith(PADDING_PREFIX):
            found[name] = Span(dtype, shape, data_start + start, data_start + end)
    position = 0
    for start, end, name in sorted(spans):
        if start != position:
            raise _bad(path, f"tensor '{name}' starts at {position}, where the one before it ends", start)
        position = end
    if data_start + position != len(mapped):
        raise _bad(
            path, f"tensors fill the file's {len(mapped)} bytes", f"{data_start + position} bytes used"
        )
    return found


def _read_header(path: Path, mapped: mmap.mmap) -> tuple[dict[str, Any], int]:
    length = int.from_bytes(mapped[:8], "little") if len(mapped) >= 8 else -1
    if not 2 <= length <= min(MAX_HEADER_BYTES, len(mapped) - 8):
        raise _bad(path, f"a header within the file's {len(mapped)} bytes", f"{length} bytes of header")
    try:
        entries = json.loads(mapped[8 : 8 + length], object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise _bad(path, "a JSON header", error) from None
    if not isinstance(entries, dict):
        raise _bad(path, "a JSON object as header", type(entries).__name__)
    entries.pop("__metadata__", None)
    return entries, 8 + length


def _check_entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    match entry:
        case {"dtype": str(file_dtype), "shape": list(shape), "data_offsets": [int(start), int(end)]}:
            pass
        case _:
            raise _bad(path, f"dtype, shape and data_offsets of '{name}'", str(entry)[:100])
    if file_dtype not in _FROM_FILE:
        raise _bad(path, f"a dtype of {', '.join(_FROM_FILE)} for '{name}'", file_dtype)
    if len(shape) > MAX_RANK or any(type(size) is not int or not 0 <= size < 2**48 for size in shape):
        raise _bad(path, f"at most {MAX_RANK} sizes of 0 or more as shape of '{name}'", str(shape)[:100])
    dtype, view = _FROM_FILE[file_dtype]
    if not 0 <= start <= end or end - start != _count(shape) * view.itemsize:
        raise _bad(path, f"{_count(shape) * view.itemsize} bytes for '{name}'", f"offsets {start}..{end}")
    return dtype, tuple(shape), start, end


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice in one object")
    return result


def _count(shape: tuple[int, ...] | list[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def _bad(path: Path, expected: str, got: object) -> ArtifactError:
    return ArtifactError(
        f"{path}: expected {expected}, got {got}; the file is damaged, write or copy it again"
    )
