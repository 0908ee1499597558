"""Codes and block scales of weights that lose least: a search over scales, and error feedback column by column."""

from collections.abc import Iterator

import torch
from torch import Tensor

from octavo.compiler.errors import OptionError
from octavo.compiler.nvfp4 import (
    BLOCK_ELEMENTS,
    E2M1_MAX,
    E4M3_MAX_SEARCHED,
    block_scales,
    encode_e2m1,
    outer_scale,
    pack,
    quantize,
)

# E4M3 codes that are tried, counted from the code of the scale that carries the block's largest element.
FIRST_CANDIDATE, LAST_CANDIDATE = -2, 7
SMALLEST_CODE, LARGEST_CODE = 0x01, 0x7E
# Blocks that are searched together: what the search holds of them (4 MB) stays in the cache.
CHUNK_BLOCKS = 3200
# Share of the mean of the diagonal that is added to it, so that the second moments can be inverted.
DAMPING = 0.01


def weight_outer_scale(name: str, weight: Tensor) -> Tensor:
    """Outer scale of a weight (or of several that share it, as one tensor), with room for the search.

    Raises OptionError naming the weight if an element is not finite.
    """
    low, high = weight.aminmax()  # no copy of the weight, and not finite where an element is not
    amax = torch.maximum(-low, high)
    if not bool(amax.isfinite()):
        count = int((~weight.isfinite()).sum())
        raise OptionError(
            f"nvfp4: {name} holds {count} elements that are not finite, of {tuple(weight.shape)}; "
            "mend the checkpoint or leave this weight in bf16"
        )
    return outer_scale(amax, E4M3_MAX_SEARCHED)


def search_scales(weight: Tensor, outer: Tensor, importance: Tensor | None = None) -> Tensor:
    """E4M3 scales (N, K / 16) of least squared error of a weight (N, K), each block by itself.

    importance  (K,) second moments of the input's columns, or (N, K); None: all alike
    Ten scales are tried for each block, two below to seven above the one that carries the largest element; of
    equal errors the lowest scale wins. Zero blocks keep 0.
    """
    return torch.cat(
        [_search_rows(part.float(), outer, factors) for part, factors in _chunks(weight, importance)]
    )


def _chunks(weight: Tensor, importance: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """A few rows at a time, with their importance."""
    count = max(1, CHUNK_BLOCKS * BLOCK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], count):
        rows = slice(start, start + count)
        yield (
            weight[rows],
            importance[rows] if importance is not None and importance.dim() == 2 else importance,
        )


def _search_rows(weight: Tensor, outer: Tensor, importance: Tensor | None) -> Tensor:
    """Axes: candidates, places in a block, blocks. The last is the long one, so that every loop is over neighbours."""
    scales = block_scales(weight, outer)
    base = scales.view(torch.uint8).flatten().int()
    magnitudes = _places_first(weight.abs())
    offsets = torch.arange(FIRST_CANDIDATE, LAST_CANDIDATE + 1, dtype=torch.int32)
    codes = (base + offsets[:, None]).clamp_(SMALLEST_CODE, LARGEST_CODE)
    step = (_scales(codes).float() * outer).unsqueeze(1)
    error = round_magnitudes(magnitudes / step).mul_(step).sub_(magnitudes).square_()
    if importance is not None:
        error.mul_(_places_first(importance.float().expand_as(weight)))
    least, index = _sum_of_places(error).min(0)
    best = codes.gather(0, index[None])[0]
    best = torch.where(least.isfinite(), best, base)  # all overflow
    return _scales(torch.where(base == 0, base, best)).view(scales.shape)


def _places_first(values: Tensor) -> Tensor:
    """(rows, K) -> (16, rows * K / 16)."""
    places: Tensor = values.unflatten(-1, (-1, BLOCK_ELEMENTS)).permute(2, 0, 1).flatten(1).contiguous()
    return places


def _sum_of_places(error: Tensor) -> Tensor:
    """(candidates, 16, n) -> (candidates, n). The order is said, so that every machine finds the same least error."""
    half = error[:, :8].add_(error[:, 8:])
    total = half[:, 0]
    for place in range(1, 8):
        total = total + half[:, place]
    return total


def round_magnitudes(z: Tensor) -> Tensor:
    """The E2M1 magnitudes nearest to fp32 values of 0 or more, in place: ties to the even code, at most 6.

    Values from 2^e on lie 2^(e - 1) apart (below 1: 0.5 apart), and adding 2^(e + 22) rounds to just that.
    """
    z.clamp_(max=E2M1_MAX)
    magic = z.clamp(min=1.0)
    magic.view(torch.int32).bitwise_and_(0x7F800000)
    magic.mul_(2.0**22)
    return z.add_(magic).sub_(magic)


def _scales(code: Tensor) -> Tensor:
    return code.to(torch.uint8).view(torch.float8_e4m3fn)


def quantize_weight(weight: Tensor, outer: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Bytes (N, K / 2) and linear scales (N, K / 16) of a weight (N, K), scales by search, codes to nearest."""
    parts = [
        quantize(part, outer, _search_rows(part.float(), outer, factors))
        for part, factors in _chunks(weight, importance)
    ]
    return torch.cat([codes for codes, _ in parts]), torch.cat([scales for _, scales in parts])


def quantize_weight_with_feedback(weight: Tensor, outer: Tensor, moments: Tensor) -> tuple[Tensor, Tensor]:
    """As quantize_weight, with each column's error made up for by the columns behind it (GPTQ).

    moments  (K, K) second moments of the input, x^T x over calibration tokens; a column that the input never
             used counts as of the mean
    A block's scales are searched when its turn comes, on what the columns before it left.
    Source: Frantar et al. 2022, Algorithm 1.
    """
    rows, columns = weight.shape
    factor = _inverse_factor(moments)
    remaining = weight.float().T.contiguous()  # (K, N): a column of the weight is a row here
    codes = torch.empty(rows, columns // 2, dtype=torch.uint8)
    scales = torch.empty(rows, columns // BLOCK_ELEMENTS, dtype=torch.float8_e4m3fn)
    for start in range(0, columns, BLOCK_ELEMENTS):
        end = start + BLOCK_ELEMENTS
        importance = factor.diagonal()[start:end].square().reciprocal()
        found = search_scales(remaining[start:end].T, outer, importance)[:, 0]
        scales[:, start // BLOCK_ELEMENTS] = found
        own, errors = _feed_back(remaining[start:end], factor[start:end, start:end], found.float() * outer)
        codes[:, start // 2 : end // 2] = pack(own.T)
        remaining[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1.0)
    return codes, scales


def _feed_back(block: Tensor, factor: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and errors (16, N) of a block's columns; each one's error is taken out of those behind it in the block.

    block (16, N), changed in place; factor (16, 16); step (N,) the scales, of which 0 makes codes of 0
    """
    is_zero = step == 0
    safe = torch.where(is_zero, torch.ones_like(step), step)
    scaled, errors = torch.empty_like(block), torch.empty_like(block)
    for column, wanted in enumerate(block):
        torch.div(wanted, safe, out=scaled[column])
        nearest = round_magnitudes(scaled[column].abs()).copysign_(wanted).mul_(step)
        error = torch.sub(wanted, nearest, out=errors[column]).div_(factor[column, column])
        block[column + 1 :] -= factor[column, column + 1 :, None] * error
    return encode_e2m1(scaled).masked_fill_(is_zero, 0), errors


def _inverse_factor(moments: Tensor) -> Tensor:
    """Upper Cholesky factor (K, K) of the inverse of the damped moments, in fp32 from fp64."""
    damped = moments.double().clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    if not bool(mean > 0):
        return torch.eye(moments.shape[0])
    diagonal[diagonal == 0] = mean
    diagonal += DAMPING * mean
    # Read backwards, L L^T becomes R R^T with an upper R, and the inverse is R^-T R^-1: one factor, not two.
    upper = torch.linalg.cholesky(damped.flip(0, 1)).flip(0, 1)
    identity = torch.eye(moments.shape[0], dtype=torch.float64)
    factor: Tensor = torch.linalg.solve_triangular(upper, identity, upper=True)
    return factor.float()
