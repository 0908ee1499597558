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
