"""Quantisation of activations, by itself and fused into what makes them.

The results are parts of one quantised value, in this order: codes; the block scales, of "nvfp4" only; the outer scales
of the rows, where `outer` is not given. Formats:

"nvfp4"  codes (..., K / 2) u8, the first of a pair in the low nibble; block scales E4M3, one for 16 elements along K,
         in `layout` "linear" (..., K / 16) or "swizzled_128x4" (flat: tiles of 128 rows x 4 blocks)
"fp8"    codes (..., K) E4M3

value = code * block scale * outer scale. outer: fp32, one element, calibrated; None: each row's own, largest / 2688
(largest / 448 of "fp8"), so that a row depends on no other. Fused producers round to x's dtype first.
"""

import math
from typing import Any

import torch
from torch import Tensor

from octavo.compiler import nvfp4
from octavo.compiler.ops.mlp import act_mul
from octavo.compiler.ops.norm import add_rms_norm, rms_norm
from octavo.compiler.ops.op import Op

FORMATS = ("nvfp4", "fp8")
LAYOUTS = ("linear", "swizzled_128x4")
LIMITS = {"nvfp4": nvfp4.E2M1_MAX * nvfp4.E4M3_MAX, "fp8": nvfp4.E4M3_MAX}


def quantize(x: Tensor, outer: Tensor | None, format: str, layout: str = "linear") -> list[Tensor]:
    """x (..., K) -> the parts of a quantised value (see the module)."""
    wide = x.float()
    step = outer_scales(wide, format) if outer is None else outer.float().reshape(())
    rows = [] if outer is not None else [step]
    if format == "fp8":
        codes = (wide / step).clamp(-nvfp4.E4M3_MAX, nvfp4.E4M3_MAX).to(torch.float8_e4m3fn)
        return [codes, *rows]
    codes, scales = nvfp4.quantize(wide, step)
    if layout == "swizzled_128x4":
        scales = nvfp4.swizzle(scales.flatten(0, -2))
    return [codes, scales, *rows]


def outer_scales(x: Tensor, format: str) -> Tensor:
    """fp32 (..., 1): what makes the largest element of each row the format's largest."""
    return nvfp4.outer_scales_of_rows(x, LIMITS[format])


def quantize_fake(x: Tensor, outer: Tensor | None, format: str, layout: str = "linear") -> list[Tensor]:
    if format not in FORMATS or layout not in LAYOUTS:
        raise ValueError(
            f"expected a format of {FORMATS} and a layout of {LAYOUTS}, got {format!r}, {layout!r}"
        )
    rows, length = x.shape[:-1], x.shape[-1]
    outers = [] if outer is not None else [x.new_empty((*rows, 1), dtype=torch.float32)]
    if format == "fp8":
        return [x.new_empty(x.shape, dtype=torch.float8_e4m3fn), *outers]
    if length % nvfp4.BLOCK_ELEMENTS:
        raise ValueError(f"nvfp4: expected rows of a multiple of 16 elements, got {tuple(x.shape)}")
    codes = x.new_empty((*rows, length // 2), dtype=torch.uint8)
    shape: Any = (*rows, length // nvfp4.BLOCK_ELEMENTS)
    if layout == "swizzled_128x4":
        shape = (swizzled_size(math.prod(rows), length // nvfp4.BLOCK_ELEMENTS),)
    return [codes, x.new_empty(shape, dtype=torch.float8_e4m3fn), *outers]


def swizzled_size(rows: Any, blocks: int) -> Any:
    """Bytes of the scales of `rows` rows in tiles of 128 rows x 4 blocks."""
    return (rows + nvfp4.TILE_ROWS - 1) // nvfp4.TILE_ROWS * (-(-blocks // nvfp4.TILE_BLOCKS) * 512)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, offset: float, outer: Tensor | None, format: str, layout: str = "linear"
) -> list[Tensor]:  # fmt: skip
    """The parts of rms_norm(x)."""
    return quantize(rms_norm(x, weight, eps, offset), outer, format, layout)


def add_rms_norm_quantize(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float, outer: Tensor | None, format: str,
    layout: str = "linear",
) -> list[Tensor]:  # fmt: skip
    """The parts of rms_norm(x + residual), then the sum in x's dtype."""
    norm, total = add_rms_norm(x, residual, weight, eps, offset)
    return [*quantize(norm, outer, format, layout), total]


def act_mul_quantize(
    gate_up: Tensor, activation: str, outer: Tensor | None, format: str, layout: str = "linear"
) -> list[Tensor]:
    """The parts of act_mul(gate_up)."""
    return quantize(act_mul(gate_up, activation), outer, format, layout)


QUANTIZE = Op(
    "quantize(Tensor x, Tensor? outer, str format, str layout='linear') -> Tensor[]",
    quantize,
    quantize_fake,
    "code = round(x / (scale * outer))",
)
RMS_NORM_QUANTIZE = Op(
    "rms_norm_quantize(Tensor x, Tensor weight, float eps, float offset, Tensor? outer, str format, "
    "str layout='linear') -> Tensor[]",
    rms_norm_quantize,
    lambda x, weight, eps, offset, outer, format, layout="linear": quantize_fake(x, outer, format, layout),
    "quantize(rms_norm(x))",
)
ADD_RMS_NORM_QUANTIZE = Op(
    "add_rms_norm_quantize(Tensor x, Tensor residual, Tensor weight, float eps, float offset, Tensor? outer, "
    "str format, str layout='linear') -> Tensor[]",
    add_rms_norm_quantize,
    lambda x, residual, weight, eps, offset, outer, format, layout="linear": [
        *quantize_fake(x, outer, format, layout), torch.empty_like(x),
    ],
    "s = x + residual; quantize(rms_norm(s)), s",
)  # fmt: skip
ACT_MUL_QUANTIZE = Op(
    "act_mul_quantize(Tensor gate_up, str activation, Tensor? outer, str format, str layout='linear') -> Tensor[]",
    act_mul_quantize,
    lambda gate_up, activation, outer, format, layout="linear": quantize_fake(
        gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)), outer, format, layout
    ),
    "quantize(activation(gate) * up)",
)
