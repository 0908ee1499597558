"""Rows of activations as bytes on the wire, and back.

"model"  the elements as they are
"fp8"    E4M3 codes, with an fp32 outer scale a token
"nvfp4"  E2M1 codes, two a byte, then E4M3 block scales of 16 elements; with an outer scale that both sides know, or an
         fp32 one a token

Codes, block scales and outer scales are those of octavo::quantize, bit for bit.
"""

import torch
from torch import Tensor

from octavo.compiler import nvfp4
from octavo.compiler.errors import ExecutionError

WIRES = ("model", "fp8", "nvfp4")


def row_bytes(wire: str, hidden: int, dtype: torch.dtype) -> int:
    """Bytes of a token of `hidden` elements, without its outer scale. ExecutionError if the wire cannot carry it."""
    if wire not in WIRES:
        raise ExecutionError(f"wire: expected one of {', '.join(WIRES)}, got {wire!r}")
    if wire == "model":
        return hidden * dtype.itemsize
    if wire == "fp8":
        return hidden
    if hidden % nvfp4.BLOCK_ELEMENTS:
        raise ExecutionError(
            f"wire nvfp4: expected rows of a multiple of {nvfp4.BLOCK_ELEMENTS} elements, got {hidden}; "
            "compile with wire='fp8' or 'model'"
        )
    return hidden // 2 + hidden // nvfp4.BLOCK_ELEMENTS


def pack_rows(x: Tensor, wire: str, outer: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Rows (T, H) -> bytes (T, row_bytes) and outer scales (T, 1) fp32 if they travel with the rows, else None.

    outer  fp32, one element, of all rows; None: a scale of each
    """
    width = row_bytes(wire, x.shape[-1], x.dtype)
    if wire == "model":
        return x.contiguous().view(torch.uint8).reshape(len(x), width), None
    wide = x.float()
    largest = nvfp4.E4M3_MAX if wire == "fp8" else nvfp4.E2M1_MAX * nvfp4.E4M3_MAX
    step = nvfp4.outer_scales_of_rows(wide, largest) if outer is None else outer.float().reshape(())
    own = step if outer is None else None
    if wire == "fp8":
        codes = (wide / step).clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX).to(torch.float8_e4m3fn)
        return codes.view(torch.uint8), own
    packed, scales = nvfp4.quantize(wide, step)
    return torch.cat((packed, scales.view(torch.uint8)), -1), own


def unpack_rows(payload: Tensor, outer: Tensor | None, wire: str, hidden: int, dtype: torch.dtype) -> Tensor:
    """What pack_rows packed, (T, H) of dtype. outer: (T, 1), or the one element of all rows."""
    payload = payload.contiguous()
    if wire == "model":
        return payload.view(dtype).reshape(len(payload), hidden)
    assert outer is not None, f"wire {wire}: rows without an outer scale"
    step = outer.float() if outer.numel() > 1 or outer.dim() > 1 else outer.float().reshape(())
    if wire == "fp8":
        return (payload.view(torch.float8_e4m3fn).float() * step).to(dtype)
    packed, scales = payload[:, : hidden // 2], payload[:, hidden // 2 :].contiguous()
    return nvfp4.dequantize(packed, scales.view(torch.float8_e4m3fn), step).to(dtype)
