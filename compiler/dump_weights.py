"""The weights beside a dump, so that compiling can go on from any of its graphs without the model."""

import functools
import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from octavo.compiler.errors import ArtifactError
from octavo.compiler.weights import Weight, write_weights

WEIGHTS = "weights.safetensors"
_open: Any = safe_open  # it is typed in part only
NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8",
    torch.bool: "b8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "f8e5m2",
}  # fmt: skip


def save_weights(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write WEIGHTS; returns what `DumpedWeights` checks. A tensor under two names is written once.

    Raises ArtifactError for what no file can hold: a tensor of the meta device, or of a rare dtype.
    """
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    weights: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        if tensor.is_meta or tensor.dtype not in NAMES:
            what = "is on the meta device" if tensor.is_meta else f"has dtype {tensor.dtype}"
            raise ArtifactError(f"dump: weight {name} {what}, so the weights are not written")
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        original = first.setdefault(place, name) if tensor.numel() else name
        if original != name:
            aliases[name] = original
        else:
            weights[name] = Weight(NAMES[tensor.dtype], tuple(tensor.shape), functools.partial(_raw, tensor))
    path = directory / WEIGHTS
    with path.open("wb") as file:
        write_weights(file, weights)
    return {"file": WEIGHTS, "bytes": path.stat().st_size, "sha256": _digest(path), "aliases": aliases}


def _raw(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class DumpedWeights(Mapping[str, Tensor]):
    """The tensors of a dump by name, read when they are asked for. facts: what `save_weights` returned."""

    def __init__(self, directory: Path, facts: Mapping[str, Any]) -> None:
        path = directory / str(facts["file"])
        if not path.is_file() or path.stat().st_size != facts["bytes"] or _digest(path) != facts["sha256"]:
            got = "other bytes" if path.is_file() else "no such file"
            raise ArtifactError(
                f"{path}: expected the {facts['bytes']} bytes that were written with the dump, got {got}; "
                "dump the model again"
            )
        self._file = _open(path, "pt")
        self._aliases: Mapping[str, str] = facts["aliases"]
        names: list[str] = list(self._file.offset_keys())
        self._names = {name for name in names if not name.startswith(".padding.")}
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        original = self._aliases.get(name, name)
        if original not in self._names:
            raise KeyError(name)
        if original not in self._read:
            self._read[original] = self._file.get_tensor(original)
        return self._read[original]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._names, *self._aliases))

    def __len__(self) -> int:
        return len(self._names) + len(self._aliases)
