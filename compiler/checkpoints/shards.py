"""Tensors of a Hugging Face directory, one at a time: sharded safetensors, mapped and written in bounded memory."""

import json
import mmap
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from octavo.compiler.errors import ArtifactError, CheckpointError
from octavo.compiler.weights import DTYPES, Span, tensor_spans

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_SHARD_BYTES = 2 * 2**30
ALIGNMENT = 8
TORCH_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64,
    "i64": torch.int64, "i32": torch.int32, "i16": torch.int16, "i8": torch.int8, "u8": torch.uint8,
    "b8": torch.bool, "fp8": torch.float8_e4m3fn, "f8e5m2": torch.float8_e5m2,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


class Shards(Mapping[str, Tensor]):
    """The tensors of a directory (or of one file in it) by name. Each is a mapping of its own part, gone with its last
    view.

    Raises CheckpointError for files that are missing, unsound, or hold other names than the index says.
    """

    def __init__(self, directory: Path, only: str | None = None) -> None:
        self.directory = directory
        self.spans: dict[str, tuple[Path, Span]] = {}
        for file in _files(directory) if only is None else [directory / only]:
            for name, span in _spans(file).items():
                if name in self.spans:
                    raise CheckpointError(f"{file}: {name} is in {self.spans[name][0].name} too")
                self.spans[name] = (file, span)
        if only is None:
            _check_index(directory, self.spans)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor that may be written to; the file stays as it is."""
        file, span = self.spans[name]
        dtype = TORCH_DTYPES[span.dtype]
        if span.end == span.start:
            return torch.empty(span.shape, dtype=dtype)
        first = span.start // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        with file.open("rb") as handle:
            mapped = mmap.mmap(handle.fileno(), span.end - first, access=mmap.ACCESS_COPY, offset=first)
        raw = torch.frombuffer(mapped, dtype=torch.uint8, offset=span.start - first)
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).reshape(span.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.spans)

    def __len__(self) -> int:
        return len(self.spans)

    def __contains__(self, name: object) -> bool:
        return name in self.spans

    def shape(self, name: str) -> tuple[int, ...]:
        return self.spans[name][1].shape

    def dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPES[self.spans[name][1].dtype]

    def num_bytes(self, name: str) -> int:
        span = self.spans[name][1]
        return span.end - span.start


def read_json(path: Path) -> dict[str, Any]:
    """A file's JSON object; CheckpointError if it holds none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: expected a JSON object, got {type(error).__name__}: {error}"
        ) from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def _files(directory: Path) -> list[Path]:
    if (directory / INDEX).is_file():
        names = set(_weight_map(directory).values())
        if foreign := sorted(name for name in names if Path(name).name != name):
            raise CheckpointError(
                f"{directory / INDEX}: expected names of files beside it, got {foreign[0]!r}"
            )
        return [directory / name for name in sorted(names)]
    if (directory / SINGLE).is_file():
        return [directory / SINGLE]
    raise CheckpointError(f"{directory}: expected {INDEX} or {SINGLE}, got neither")


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise CheckpointError(f"{path}: expected weight_map, the file of every tensor, got {str(names)[:80]}")
    return names


def _spans(file: Path) -> dict[str, Span]:
    if not file.is_file() or file.stat().st_size == 0:
        raise CheckpointError(f"{file}: expected a safetensors file, got none; download or copy it again")
    with file.open("rb") as handle, mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        try:
            return tensor_spans(file, mapped)
        except ArtifactError as error:
            raise CheckpointError(str(error)) from None


def _check_index(directory: Path, spans: Mapping[str, tuple[Path, Span]]) -> None:
    if not (directory / INDEX).is_file():
        return
    for name, file in _weight_map(directory).items():
        if name not in spans or spans[name][0].name != file:
            raise CheckpointError(f"{directory / INDEX}: expected {name} in {file}, which does not hold it")


class ShardWriter:
    """Writes tensors into shards of at most max_bytes (or of one tensor that is larger), then the index.

    The directory exists. Tensors wait in one buffer until their shard is full: many of their own, between what else is
    allocated and freed, would leave holes that the process never gives back.
    """

    def __init__(self, directory: Path, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self.directory = directory
        self.max_bytes = max_bytes
        self.shards: list[list[str]] = []
        self.num_bytes = 0
        self._waiting: dict[str, Tensor] = {}
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._end = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._waiting and self._end + size > self.max_bytes:
            self._write()
        self.num_bytes += size
        if size > self.max_bytes:
            self._waiting[name] = tensor
            self._write()
            return
        if not self._waiting:
            self._buffer = torch.frombuffer(mmap.mmap(-1, self.max_bytes + ALIGNMENT), dtype=torch.uint8)
        view = self._buffer[self._end : self._end + size].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        self._waiting[name] = view
        self._end += -(-size // ALIGNMENT) * ALIGNMENT

    def finish(self) -> None:
        """Write what waits, give the files their names and write the index (of several files)."""
        self._write()
        count = len(self.shards)
        if count == 1:
            os.rename(self._part(0), self.directory / SINGLE)
            return
        weight_map = {}
        for number, names in enumerate(self.shards):
            file = f"model-{number + 1:05}-of-{count:05}.safetensors"
            os.rename(self._part(number), self.directory / file)
            weight_map.update(dict.fromkeys(names, file))
        index = {"metadata": {"total_size": self.num_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self) -> None:
        with self._part(len(self.shards)).open("wb") as file:
            write_file(file, self._waiting)
        self.shards.append(list(self._waiting))
        self._waiting, self._buffer, self._end = {}, self._buffer[:0].clone(), 0

    def _part(self, number: int) -> Path:
        return self.directory / f"part-{number:05}.safetensors"


def write_file(file: BinaryIO, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file without padding, which other readers would take for weights.

    Large elements come first, then names in order: so every tensor is aligned to its elements, and equal tensors
    give equal bytes.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in names:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        dtype = DTYPES[NAMES[tensor.dtype]][0]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        file.write(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
