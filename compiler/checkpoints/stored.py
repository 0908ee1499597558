"""A quantised weight as the files of a checkpoint have it: bytes that are kept, and their meaning in decode form."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from octavo.compiler import nvfp4
from octavo.compiler.precision import Format

# "octavo": quantised here, so no file has it yet.
Layout = Literal["modelopt", "compressed-tensors", "mxfp4", "octavo"]
# Elements that are decoded at a time: a few fp32 copies of them are in memory.
CHUNK_ELEMENTS = 2**16
_EXPERT = re.compile(r"experts?\.(\d+)(\.|$)")


@dataclass(frozen=True)
class StoredWeight:
    """value = code * block scale * outer.

    name         path of the module, or of the parameter where a file holds all experts in one
    format       "nvfp4" and "fp8" have quantised inputs, "nvfp4_weight_only" has not
    codes        u8 (N, K / 2), the first of a pair in the low nibble, or E4M3 (N, K); experts have an axis E before
    scales       E4M3 (N, K / 16), linear; None of fp8
    outer        fp32 () or (N,), of experts (E,); decode form
    input_scale  fp32 (), decode form; None where inputs stay as they are or each row has its own
    parts        the tensors of the files by the ends of their names ("weight_scale_2"), which are written back
    """

    name: str
    layout: Layout
    format: Format
    codes: Tensor
    scales: Tensor | None
    outer: Tensor
    input_scale: Tensor | None = None
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight's values: (N, K), or (E, N, K)."""
        *rows, length = self.codes.shape
        return (*rows, length if self.scales is None else 2 * length)

    def values(self) -> Iterator[Tensor]:
        """fp32 values, some rows at a time; rows of all experts one after another."""
        rows = self.codes.numel() // self.codes.shape[-1]
        codes = self.codes.reshape(rows, -1)
        scales = None if self.scales is None else self.scales.reshape(rows, -1)
        outer = self.outer_rows()
        count = max(1, CHUNK_ELEMENTS // self.shape[-1])
        for start in range(0, rows, count):
            part = slice(start, start + count)
            if scales is None:
                yield codes[part].float() * outer[part]
            else:
                yield nvfp4.dequantize(codes[part], scales[part], outer[part])

    def outer_rows(self) -> Tensor:
        """Outer scale of every row (of all experts one after another), (rows, 1)."""
        rows = self.codes.numel() // self.codes.shape[-1]
        return self.outer.reshape(-1, 1).repeat_interleave(rows // self.outer.numel(), 0)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All values, rounded once to dtype."""
        result = torch.empty(self.shape, dtype=dtype)
        rows = result.view(-1, self.shape[-1])
        start = 0
        for part in self.values():
            rows[start : start + len(part)] = part
            start += len(part)
        return result


def place(name: str) -> str:
    """The name, and whose expert it is."""
    found = _EXPERT.search(name)
    return name if found is None else f"{name} (expert {found[1]})"
