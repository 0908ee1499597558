"""The rules of the quantised formats, said a second time and in fp64: what codes stand for, and which are allowed.

Shares no code with what quantises (compiler/nvfp4.py): values come from the definitions of E2M1 and E4M3, layouts from
their formula, and codes are judged by the interval that rounds to them. `Deviation` says where a rule is broken.
Sources: OCP Microscaling Formats 1.0; NVIDIA "Introducing NVFP4" (2025); cuBLAS' layout of scales.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.compiler.precision import WeightRule

BLOCK = 16
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Codes are computed in fp32 as x / (scale * outer), two roundings; a value this near a tie may go either way.
SLACK = 2.0**-21
# GPTQ carries what is left of a column through as many fp32 sums as there are columns; in units of a block's step.
FEEDBACK_SLACK = 2.0**-9
CHUNK = 1 << 16  # elements at a time: the temporaries stay in the cache
# A search tries the E4M3 codes from two below to seven above that of the scale that carries the largest element.
BELOW, ABOVE = 2, 7


class Deviation(Exception):
    """Carries the sentence that says which rule is broken, and where."""


def _e4m3() -> list[float]:
    """Values of the codes 0x00..0x7E."""
    values = []
    for code in range(0x7F):
        exponent, mantissa = code >> 3, code & 7
        values.append(math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10))
    return values


ROUNDS_TO_LARGEST = 464.0  # halfway between 448 and what would be the next number
E4M3 = torch.tensor(_e4m3(), dtype=torch.float64)
_DECODED = torch.tensor([*E2M1, *(-m for m in E2M1)], dtype=torch.float64)
# Both numbers of a byte, that of the low nibble first.
_PAIRS = torch.stack((_DECODED.repeat(16), _DECODED.repeat_interleave(16)), -1)


def _bounds() -> tuple[Tensor, Tensor]:
    """The interval of values that round to each E2M1 code; the outermost have none on one side."""
    middles = [(a + b) / 2 for a, b in itertools.pairwise(E2M1)]
    low, high = [-middles[0], *middles], [*middles, math.inf]
    signed = ([*low, *(-h for h in high)], [*high, *(-value for value in low)])
    return torch.tensor(signed[0], dtype=torch.float64), torch.tensor(signed[1], dtype=torch.float64)


_LOW, _HIGH = _bounds()


@dataclass(frozen=True)
class Blocks:
    """A value of NVFP4: codes (R, K / 2) u8, bytes of its linear scales (R, K / 16), outer fp64 (R, 1) or (1, 1)."""

    codes: Tensor
    scales: Tensor
    outer: Tensor

    def rows(self, part: slice) -> "Blocks":
        outer = self.outer if len(self.outer) == 1 else self.outer[part]
        return Blocks(self.codes[part], self.scales[part], outer)

    def steps(self) -> Tensor:
        """scale * outer (R, K / 16, 1)."""
        return (_values(self.scales) * self.outer).unsqueeze(-1)

    def units(self, dtype: torch.dtype = torch.float64) -> Tensor:
        """Codes as numbers (R, K / 16, 16)."""
        pairs = _PAIRS.to(dtype).index_select(0, self.codes.reshape(-1).int())
        return pairs.reshape(len(self.codes), -1, BLOCK)

    def decoded(self) -> Tensor:
        return (self.units() * self.steps()).flatten(-2)


def _values(scales: Tensor) -> Tensor:
    if bool((scales > 0x7E).any()):
        count = int((scales > 0x7E).sum())
        raise Deviation(f"{count} block scales are no positive numbers (codes above 0x7E)")
    return E4M3[scales.long()]


def blocks(codes: Tensor, scales: Tensor, layout: str, outer: Tensor) -> Blocks:
    """codes (..., K / 2); scales in `layout`; outer: one, or one a row, of any shape."""
    codes = codes.reshape(-1, codes.shape[-1])
    rows, count = codes.shape[0], codes.shape[1] * 2 // BLOCK
    raw = scales.reshape(-1).view(torch.uint8) if layout == "linear" else scales.view(torch.uint8)
    if layout == "linear":
        if raw.numel() != rows * count:
            raise Deviation(f"{raw.numel()} block scales for {rows} rows of {count} blocks")
        linear = raw.reshape(rows, count)
    else:
        linear = raw[_offsets(rows, count, raw.numel())]
    return Blocks(codes, linear, outer.double().reshape(-1, 1))


def _offsets(rows: int, count: int, size: int) -> Tensor:
    """Where the scale of row m and block k lies: tiles of 128 x 4, in each m % 32, then m % 128 / 32, then k % 4."""
    m, k = torch.arange(rows)[:, None], torch.arange(count)[None]
    wide = -(-count // 4)
    expected = -(-rows // 128) * wide * 512
    if size != expected:
        raise Deviation(
            f"{size} bytes of swizzled scales, expected {expected} for {rows} rows of {count} blocks"
        )
    return ((m // 128 * wide + k // 4) * 32 + m % 32) * 16 + m % 128 // 32 * 4 + k % 4


def check_nvfp4(values: Tensor, quantized: Blocks, rule: WeightRule, seen: Tensor | None = None) -> None:
    """Raise Deviation unless `quantized` is what its rule makes of values (R, K).

    "nearest"  scales are the E4M3 numbers next to largest / 6 / outer, codes next to value / (scale * outer)
    "search"   scales lie -2..+7 codes from those, codes are next to the quotient, and a block's squared error, weighed
               by `seen` (K,), is no larger than with the nearest scale
    "feedback" the same of the values that GPTQ has left of a column when its turn comes, which `seen` (K, K) gives back
    "given"    nothing: the bytes are somebody else's
    """
    if rule == "given":
        return
    if rule == "feedback":
        assert seen is not None, "feedback was given no moments"
        _check_feedback(values, quantized, seen)
        return
    weights = torch.ones(1) if seen is None else seen.float().unflatten(-1, (-1, BLOCK))
    for part in _chunks(values):
        x, block = values[part].float().unflatten(-1, (-1, BLOCK)), quantized.rows(part)
        wanted = _wanted(x, block.outer)
        _check_scales(wanted, block, rule == "search", SLACK)
        lost = _check_codes(x, block, SLACK)
        if rule == "search":
            _check_search(x, block, wanted, (lost.square() * weights).sum(-1), weights)


def _chunks(values: Tensor) -> Iterator[slice]:
    count = max(1, CHUNK // max(1, values.shape[-1]))
    for start in range(0, len(values), count):
        yield slice(start, start + count)


def _wanted(x: Tensor, outer: Tensor) -> Tensor:
    """Block scales in fp64 before they are rounded; 0 for a block of zeros."""
    amax = x.abs().amax(-1).double()
    scale = (amax / E2M1[-1] / outer).clamp(E4M3[1], E4M3[-1])
    return torch.where(amax == 0, amax, scale)


def _check_scales(wanted: Tensor, block: Blocks, searched: bool, slack: float) -> None:
    lowest, highest = _nearest(wanted * (1 - slack)), _nearest(wanted * (1 + slack))
    if searched:
        lowest, highest = (lowest - BELOW).clamp_min(1), (highest + ABOVE).clamp_max(0x7E)
    code = block.scales.long()
    right = torch.where(wanted == 0, code == 0, (code >= lowest) & (code <= highest))
    if not bool(right.all()):
        row, k = (int(i) for i in (~right).nonzero()[0])
        expected = f"{E4M3[lowest[row, k]]:g} to {E4M3[highest[row, k]]:g}"
        raise Deviation(
            f"{int((~right).sum())} block scales are not those of their blocks: row {row}, block {k} has "
            f"{E4M3[code[row, k]]:g}, expected {expected if bool(wanted[row, k] > 0) else 0}"
        )


def _nearest(values: Tensor) -> Tensor:
    """Codes of E4M3 numbers next to values within its range; which of two in a tie is not said."""
    middles = (E4M3[1:] + E4M3[:-1]) / 2
    return torch.bucketize(values, middles.to(values.dtype))


def _check_codes(x: Tensor, block: Blocks, slack: float, absolute: float = 0.0) -> Tensor:
    """Each code must round value / step, or lie next to it in a tie. Returns code * step - value.

    A block whose scale is 0 holds zeros. Where fp32 does not round to the code, fp64 decides.
    """
    steps = block.steps()
    units, quotient = block.units(torch.float32), x / torch.where(steps == 0, math.inf, steps).float()
    doubtful = round_e2m1(quotient) != units
    if bool(doubtful.any()):
        at = doubtful.nonzero(as_tuple=True)
        exact = x[at].double() / torch.where(steps == 0, math.inf, steps)[at[0], at[1], 0]
        code = _DECODED.tolist().index
        codes = torch.tensor([code(unit) for unit in units[at].tolist()])
        room = exact.abs() * slack + absolute
        wrong = (exact < _LOW[codes] - room) | (exact > _HIGH[codes] + room)
        if bool(wrong.any()):
            first = int(wrong.nonzero()[0])
            row, k, i = (int(index[first]) for index in at)
            raise Deviation(
                f"{int(wrong.sum())} codes of {units.numel()} are not next to their values: row {row}, element "
                f"{k * BLOCK + i} is {float(exact[first]):g} steps and has the code of {float(units[row, k, i]):g}"
            )
    return units * steps.float() - x


def _check_search(x: Tensor, block: Blocks, wanted: Tensor, error: Tensor, weights: Tensor) -> None:
    near = (
        (E4M3[_nearest(wanted)] * block.outer)
        .unsqueeze(-1)
        .float()
        .clamp_min(torch.finfo(torch.float32).tiny)
    )
    nearest = ((round_e2m1(x / near) * near - x).square() * weights).sum(-1)
    worse = error > nearest * (1 + 1e-4) + torch.finfo(torch.float32).tiny
    if bool(worse.any()):
        row, k = (int(i) for i in worse.nonzero()[0])
        raise Deviation(
            f"{int(worse.sum())} blocks lose more than with the scale that carries their largest element: row "
            f"{row}, block {k} has {float(error[row, k]):.3e}, that one {float(nearest[row, k]):.3e}"
        )


def round_e2m1(x: Tensor) -> Tensor:
    """The E2M1 number next to x, saturating; of two in a tie the one whose code is even.

    Its numbers are multiples of 1/2 up to 2, of 1 up to 4, of 2 up to 6, and an even multiple has an even code.
    """
    magnitude = x.abs()
    grid = 2.0 - (magnitude < 4.0).to(x.dtype) - (magnitude < 2.0).to(x.dtype) * 0.5
    return ((x / grid).round() * grid).clamp(-E2M1[-1], E2M1[-1])


def _check_feedback(values: Tensor, quantized: Blocks, moments: Tensor) -> None:
    """Of the columns' errors, W - W', GPTQ's own follow by the factor of the inverse moments; with them, what was left.

    GPTQ takes e_c = (left_c - code_c) / F_cc and subtracts e_c F_c from all columns behind: so W - W' = e F. With e,
    left_c = W'_c + e_c F_cc, and what a block's scale was searched on is W'_b + e_b F_bb. Frantar et al. 2022.
    """
    factor = _factor(moments)
    for part in _chunks(values):
        block = quantized.rows(part)
        decoded = block.decoded()
        errors = torch.linalg.solve_triangular(
            factor, values[part].double() - decoded, upper=True, left=False
        )
        left = decoded + errors * factor.diagonal()
        blocks_of = factor.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK)).diagonal(dim1=0, dim2=2)
        searched = decoded.unflatten(-1, (-1, BLOCK)) + torch.einsum(
            "rbi,ijb->rbj", errors.unflatten(-1, (-1, BLOCK)), blocks_of
        )
        _check_scales(_wanted(searched, block.outer), block, True, FEEDBACK_SLACK)
        _check_codes(left.float().unflatten(-1, (-1, BLOCK)), block, SLACK, FEEDBACK_SLACK)


def _factor(moments: Tensor) -> Tensor:
    """Upper triangular F with F^T F the inverse of the moments, 1 % of their mean diagonal added."""
    damped = moments.double().clone()
    diagonal = damped.diagonal()
    mean = diagonal.mean()
    if not bool(mean > 0):
        return torch.eye(len(moments), dtype=torch.float64)
    diagonal[diagonal == 0] = mean
    diagonal += 0.01 * mean
    factor: Tensor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
    return factor


def fp8_values(codes: Tensor) -> Tensor:
    """fp64 numbers of E4M3 codes."""
    raw = codes.contiguous().view(torch.uint8).long()
    if bool(((raw & 0x7F) == 0x7F).any()):
        raise Deviation("an E4M3 code is no number")
    numbers: Tensor = E4M3[raw & 0x7F] * (1 - 2 * (raw >> 7))
    return numbers


def check_fp8(values: Tensor, codes: Tensor, outer: Tensor, saturates: bool) -> None:
    """Raise Deviation unless E4M3 codes (R, K) are next to values / outer.

    saturates  whether values may lie beyond the largest number, and are cut off
    """
    scale = outer.double().reshape(-1, 1)
    for part in _chunks(values):
        quotient = values[part].double() / (scale if len(scale) == 1 else scale[part])
        largest = float(quotient.abs().max()) if quotient.numel() else 0.0
        if not saturates and largest > ROUNDS_TO_LARGEST:
            raise Deviation(f"values up to {largest:g} times their outer scale, which E4M3 holds to 448")
        number = fp8_values(codes[part])
        distance = (number - quotient).abs()
        best = (E4M3[_nearest(quotient.abs())] - quotient.abs()).abs()
        wrong = distance > best + quotient.abs() * SLACK
        if bool(wrong.any()):
            row, k = (int(i) for i in wrong.nonzero()[0])
            raise Deviation(
                f"{int(wrong.sum())} E4M3 codes of {wrong.numel()} are not next to their values: row {row}, element "
                f"{k} is {float(quotient[row, k]):g} and has the code of {float(number[row, k]):g}"
            )


def quantize_wide(x: Tensor, like: Tensor, outer: Tensor | None, format: str) -> Tensor:
    """What the codes of x (R, K) fp64 stand for, with the scales of `like`; outer None: each row's own."""
    largest = like.abs().amax(-1, keepdim=True)
    limit = float(E4M3[-1]) * (E2M1[-1] if format == "nvfp4" else 1.0)
    own = torch.where(largest == 0, torch.ones_like(largest), largest / limit)
    scale = own if outer is None else outer.double().reshape(1, 1)
    if format == "fp8":
        number: Tensor = E4M3[_nearest((x / scale).abs())]
        return number * x.sign() * scale
    inside = x.unflatten(-1, (-1, BLOCK))
    wanted = _wanted(like.unflatten(-1, (-1, BLOCK)), scale)
    step = (torch.where(wanted == 0, wanted, E4M3[_nearest(wanted)]) * scale).unsqueeze(-1)
    return (round_e2m1(inside / torch.where(step == 0, math.inf, step)) * step).flatten(-2)
