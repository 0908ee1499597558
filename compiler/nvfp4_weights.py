"""Codes and block scales of weights that lose least: a search over scales, and error feedback column by column."""

import torch
from torch import Tensor

from octavo.compiler.errors import OptionError
from octavo.compiler.nvfp4 import (
    BLOCK_ELEMENTS,
    E4M3_MAX_SEARCHED,
    block_scales,
    decode_e2m1,
    encode_e2m1,
    outer_scale,
    pack,
    quantize,
)

# E4M3 codes that are tried, counted from the code of the scale that carries the block's largest element.
FIRST_CANDIDATE, LAST_CANDIDATE = -2, 7
SMALLEST_CODE, LARGEST_CODE = 0x01, 0x7E
# Rows at a time: the search holds a few fp32 copies of them.
CHUNK_ROWS = 1024
# Share of the mean of the diagonal that is added to it, so that the second moments can be inverted.
DAMPING = 0.01


def weight_outer_scale(name: str, weight: Tensor) -> Tensor:
    """Outer scale of a weight (or of several that share it, as one tensor), with room for the search.

    Raises OptionError naming the weight if an element is not finite.
    """
    if not bool(weight.isfinite().all()):
        count = int((~weight.isfinite()).sum())
        raise OptionError(
            f"nvfp4: {name} holds {count} elements that are not finite, of {tuple(weight.shape)}; "
            "mend the checkpoint or leave this weight in bf16"
        )
    return outer_scale(weight.abs().amax(), E4M3_MAX_SEARCHED)


def search_scales(weight: Tensor, outer: Tensor, importance: Tensor | None = None) -> Tensor:
    """E4M3 scales (N, K / 16) of least squared error of a weight (N, K), each block by itself.

    importance  (K,) second moments of the input's columns, or (N, K); None: all alike
    Ten scales are tried for each block, two below to seven above the one that carries the largest element; of
    equal errors the lowest scale wins. Zero blocks keep 0.
    """
    chunks = []
    for start in range(0, weight.shape[0], CHUNK_ROWS):
        rows = slice(start, start + CHUNK_ROWS)
        chosen = importance[rows] if importance is not None and importance.dim() == 2 else importance
        chunks.append(_search_rows(weight[rows].float(), outer, chosen))
    return torch.cat(chunks)


def _search_rows(weight: Tensor, outer: Tensor, importance: Tensor | None) -> Tensor:
    blocks = weight.unflatten(-1, (-1, BLOCK_ELEMENTS))
    factors = None if importance is None else importance.float().unflatten(-1, (-1, BLOCK_ELEMENTS))
    base = block_scales(weight, outer).view(torch.uint8).to(torch.int16)
    best_error = torch.full(base.shape, float("inf"))
    best_code = base.clone()
    for offset in range(FIRST_CANDIDATE, LAST_CANDIDATE + 1):
        code = (base + offset).clamp(SMALLEST_CODE, LARGEST_CODE)
        step = (_scales(code).float() * outer).unsqueeze(-1)
        error = (decode_e2m1(encode_e2m1(blocks / step)) * step - blocks).square()
        total = (error if factors is None else error * factors).sum(-1)
        is_better = total < best_error
        best_error = torch.where(is_better, total, best_error)
        best_code = torch.where(is_better, code, best_code)
    return _scales(torch.where(base == 0, base, best_code))


def _scales(code: Tensor) -> Tensor:
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


def quantize_weight(weight: Tensor, outer: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bytes (N, K / 2) and linear scales (N, K / 16) of a weight (N, K), scales by search, codes to nearest."""
    return quantize(weight, outer, search_scales(weight, outer, importance))


def quantize_weight_with_feedback(weight: Tensor, outer: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """As quantize_weight, with each column's error made up for by the columns behind it (GPTQ).

    moments  (K, K) second moments of the input, x^T x over calibration tokens; a column that the input never
             used counts as of the mean
    A block's scales are searched when its turn comes, on what the columns before it left.
    Source: Frantar et al. 2022, Algorithm 1.
    """
    columns = weight.shape[1]
    factor = _inverse_factor(moments)
    remaining = weight.float().clone()
    codes = torch.empty(weight.shape, dtype=torch.uint8)
    scales = torch.empty(weight.shape[0], columns // BLOCK_ELEMENTS, dtype=torch.float8_e4m3fn)
    for start in range(0, columns, BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        importance = factor.diagonal()[block].square().reciprocal()
        found = search_scales(remaining[:, block], outer, importance)
        scales[:, start // BLOCK_ELEMENTS] = found[:, 0]
        codes[:, block] = _feed_back(remaining, factor, found[:, 0].float() * outer, start)
    return pack(codes), scales


def _feed_back(remaining: Tensor, factor: Tensor, step: Tensor, start: int) -> Tensor:
    """Codes of one block of columns; every column's error is taken out of those behind it, in and past the block."""
    end = start + BLOCK_ELEMENTS
    codes = torch.empty(remaining.shape[0], BLOCK_ELEMENTS, dtype=torch.uint8)
    errors = torch.empty(remaining.shape[0], BLOCK_ELEMENTS)
    safe = torch.where(step == 0, torch.ones_like(step), step)
    for column in range(start, end):
        wanted = remaining[:, column]
        code = torch.where(step == 0, torch.zeros_like(codes[:, 0]), encode_e2m1(wanted / safe))
        codes[:, column - start] = code
        error = (wanted - decode_e2m1(code) * step) / factor[column, column]
        errors[:, column - start] = error
        remaining[:, column:end] -= error[:, None] * factor[None, column, column:end]
    remaining[:, end:] -= errors @ factor[start:end, end:]
    return codes


def _inverse_factor(moments: Tensor) -> Tensor:
    """Upper Cholesky factor (K, K) of the inverse of the damped moments, in fp32 from fp64."""
    damped = moments.double().clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    if not bool(mean > 0):
        return torch.eye(moments.shape[0])
    diagonal[diagonal == 0] = mean
    diagonal += DAMPING * mean
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    factor: Tensor = torch.linalg.cholesky(inverse, upper=True)
    return factor.float()
