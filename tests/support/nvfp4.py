"""NVFP4 by the book in NumPy and ml_dtypes (recipe octavo-v1), for tests. Shares no code with the kernels."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def codes_of(x: Array) -> Array:
    """E2M1 codes 0..15 of fp32 values, one a byte."""
    clipped = np.clip(np.asarray(x, np.float32), -6.0, 6.0)
    return clipped.astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def quantize(x: Tensor, outer: float) -> tuple[Tensor, Tensor]:
    """(rows, K) -> bytes (rows, K / 2) and E4M3 scales (rows, K / 16), both linear."""
    rows, k = x.shape
    blocks = x.float().numpy().reshape(rows, k // 16, 16)
    amax = np.abs(blocks).max(-1).astype(np.float32)
    wanted = np.clip(amax / np.float32(6) / np.float32(outer), np.float32(2.0**-9), np.float32(448))
    scale = np.where(amax == 0, np.float32(0), wanted).astype(ml_dtypes.float8_e4m3fn)
    step = scale.astype(np.float32) * np.float32(outer)
    safe = np.where(step == 0, np.float32(1), step)[..., None]
    codes = codes_of(np.where(amax[..., None] == 0, np.float32(0), blocks / safe)).reshape(rows, k)
    packed = (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8)
    return torch.from_numpy(packed), torch.from_numpy(scale.view(np.uint8)).view(torch.float8_e4m3fn)


def dequantize(packed: Tensor, scale: Tensor, outer: float) -> Tensor:
    """fp64 values (rows, K) of linear codes and scales."""
    raw = packed.numpy()
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(raw.shape[0], -1)
    steps = scale.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64) * outer
    return torch.from_numpy(E2M1[codes] * np.repeat(steps, 16, axis=1))


def swizzle(scale: Tensor, padding: int = 0x7F) -> Tensor:
    """Linear (rows, K / 16) scales -> flat bytes of the 128 x 4 layout; rows and blocks of padding are nan."""
    linear = scale.view(torch.uint8).numpy()
    rows, blocks = linear.shape
    wide = -(-blocks // 4)
    flat = np.full(-(-rows // 128) * wide * 512, padding, np.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * wide + block // 4
            flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4] = linear[row, block]
    return torch.from_numpy(flat).view(torch.float8_e4m3fn)


def unswizzle(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """The linear scales of a swizzled tensor."""
    raw, wide = flat.view(torch.uint8).numpy(), -(-blocks // 4)
    out = np.empty((rows, blocks), np.uint8)
    for row in range(rows):
        for block in range(blocks):
            tile = row // 128 * wide + block // 4
            out[row, block] = raw[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
    return torch.from_numpy(out).view(torch.float8_e4m3fn)


def any_codes(rows: int, k: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Codes and linear scales drawn from everything that is finite: scales from 2^-9 to 448 and zero."""
    packed = torch.randint(0, 256, (rows, k // 2), generator=generator, dtype=torch.uint8)
    scale = torch.randint(0, 0x7F, (rows, k // 16), generator=generator, dtype=torch.uint8)
    return packed, scale.view(torch.float8_e4m3fn)


E4M3 = np.array([(c & 7) * 2.0**-9 if c < 8 else (8 + (c & 7)) * 2.0 ** ((c >> 3) - 10) for c in range(0x7F)])


def nearest(x: Array, numbers: Array) -> Array:
    """Index of the number next to |x|, of two in a tie the even index; x in fp32, all else exact in fp64."""
    wide = np.abs(np.asarray(x, np.float32).astype(np.float64))
    middles = (numbers[1:] + numbers[:-1]) / 2
    below, above = np.searchsorted(middles, wide, "left"), np.searchsorted(middles, wide, "right")
    index: Array = np.where((below == above) | (below % 2 == 0), below, above)
    return index


def codes_by_distance(x: Array) -> Array:
    """E2M1 codes, from nothing but the numbers that they stand for."""
    codes: Array = nearest(x, E2M1[:8]) | (np.signbit(np.asarray(x)).astype(np.int64) << 3)
    return codes.astype(np.uint8)


def scales_by_distance(x: Array) -> Array:
    """Bytes of E4M3 for values from 2^-9 to 448."""
    return nearest(x, E4M3).astype(np.uint8)


def quantize_rows(x: Tensor, outer: Array) -> tuple[Array, Array]:
    """As `quantize`, with an outer scale a row, and from nothing but the rules: bytes of codes and of linear scales."""
    rows, k = x.shape
    step = np.asarray(outer, np.float32).reshape(-1, 1)
    blocks = x.float().numpy().reshape(rows, k // 16, 16)
    amax = np.abs(blocks).max(-1)
    wanted = np.clip(amax / np.float32(6) / step, np.float32(2.0**-9), np.float32(448))
    scale = np.where(amax == 0, 0, scales_by_distance(wanted)).astype(np.uint8)
    unit = (E4M3[scale].astype(np.float32) * step)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(amax[..., None] == 0, 0, codes_by_distance(blocks / unit)).reshape(rows, k)
    return (codes[:, 0::2] | (codes[:, 1::2] << 4)).astype(np.uint8), scale


def fp8_bytes(x: Tensor, outer: Array) -> Array:
    """Bytes of E4M3 of x / outer, saturating."""
    z = x.float().numpy() / np.asarray(outer, np.float32)
    codes: Array = nearest(np.clip(z, -448, 448), E4M3) | (np.signbit(z).astype(np.int64) << 7)
    return codes.astype(np.uint8)
