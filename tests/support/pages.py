"""Quantised pages by the book, in NumPy and ml_dtypes: what is written of keys and values, what is read."""

import ml_dtypes
import numpy as np
import torch
from nvfp4 import dequantize, quantize
from torch import Tensor

LARGEST = {"fp8": 448.0, "nvfp4": 2688.0}


def encode(rows: Tensor, format: str, multiplier: float) -> tuple[Tensor, Tensor | None]:
    """Rows (..., D), nan where nothing is -> codes and, of NVFP4, scales: nan of nan."""
    flat = rows.float().flatten(0, -2)
    if format == "nvfp4":
        codes, scales = quantize(flat, multiplier)
        return codes.unflatten(0, rows.shape[:-1]), scales.unflatten(0, rows.shape[:-1])
    scaled = np.clip(flat.numpy() / np.float32(multiplier), np.float32(-448), np.float32(448))
    raw = torch.from_numpy(scaled.astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
    return raw.view(torch.float8_e4m3fn).unflatten(0, rows.shape[:-1]), None


def decode(codes: Tensor, scales: Tensor | None, multiplier: float) -> Tensor:
    """fp64 values (..., D)."""
    if scales is not None:
        flat = dequantize(codes.flatten(0, -2), scales.flatten(0, -2), multiplier)
        values: Tensor = flat.unflatten(0, codes.shape[:-1])
        return values
    raw = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    return torch.from_numpy(raw.astype(np.float64) * multiplier)


def multiplier_of(rows: Tensor, format: str) -> float:
    """What makes the largest element the format's largest, as fp32 holds it."""
    return float(torch.tensor(float(rows.float().nan_to_num().abs().max()) / LARGEST[format]))
