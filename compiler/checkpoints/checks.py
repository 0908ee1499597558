"""Whether a stored weight can be what its files say: shapes, scales, and sizes of values. Errors name the tensor."""

import torch
from torch import Tensor

from octavo.compiler.checkpoints.stored import StoredWeight, place
from octavo.compiler.errors import CheckpointError
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS, E2M1_MAX, E4M3_MAX

# Root mean squares of values that a weight has; a scale in the other form is off by its square, 1e4 and more.
SMALLEST_RMS, LARGEST_RMS = 1e-4, 10.0
NAN, SIGN = 0x7F, 0x80


def check_weight(weight: StoredWeight) -> list[str]:
    """Notes for the report. Raises CheckpointError for bytes that cannot be meant."""
    _check_shapes(weight)
    for end in weight.parts:
        if end.endswith(("scale", "scale_2")) and weight.parts[end] is not weight.scales:
            check_scale(f"{weight.name}.{end}", weight.parts[end])
    notes = [] if weight.scales is None else _check_block_scales(weight, weight.scales)
    _check_values(weight)
    return notes


def check_scale(name: str, scale: Tensor) -> None:
    """Every element is a number above zero: what an expert without tokens, or memory that nobody wrote, is not."""
    wide = scale.float()
    wrong = ~(wide.isfinite() & (wide > 0))
    if bool(wrong.any()):
        raise CheckpointError(
            f"{place(name)}: expected finite scales above 0, got {float(wide[wrong].reshape(-1)[0])} in "
            f"{int(wrong.sum())} of {wrong.numel()}; nothing was calibrated there, or the file is damaged"
        )


def _check_shapes(weight: StoredWeight) -> None:
    rows, length = weight.shape[:-1], weight.shape[-1]
    wanted = torch.float8_e4m3fn if weight.scales is None else torch.uint8
    if weight.codes.dtype != wanted or weight.codes.dim() not in (2, 3):
        raise CheckpointError(
            f"{place(weight.name)}: expected codes of {wanted} in two axes, got {weight.codes.dtype} "
            f"{tuple(weight.codes.shape)}"
        )
    if weight.scales is not None:
        expected = (*rows, length // BLOCK_ELEMENTS)
        got = tuple(weight.scales.shape), weight.scales.dtype
        if length % BLOCK_ELEMENTS or got != (expected, torch.float8_e4m3fn):
            raise CheckpointError(
                f"{place(weight.name)}: expected block scales {expected} of {torch.float8_e4m3fn} beside codes "
                f"{tuple(weight.codes.shape)}, got {got[0]} of {got[1]}"
            )
    # A weight of eight bits may have a scale for each row; of four bits, experts one for each.
    sizes = {1, rows[0]} if weight.scales is None or len(rows) == 2 else {1}
    if weight.outer.numel() not in sizes or (weight.input_scale is not None and weight.input_scale.dim()):
        raise CheckpointError(
            f"{place(weight.name)}: expected an outer scale of {' or '.join(map(str, sorted(sizes)))} elements, got "
            f"{weight.outer.numel()}"
        )


def _check_block_scales(weight: StoredWeight, scales: Tensor) -> list[str]:
    name = place(f"{weight.name}.weight_scale")
    raw = scales.view(torch.uint8)
    if nans := int(((raw & NAN) == NAN).sum()):
        raise CheckpointError(f"{name}: {nans} of {raw.numel()} block scales are nan (0x7F)")
    if negative := int((raw >= SIGN).sum()):
        raise CheckpointError(f"{name}: {negative} of {raw.numel()} block scales are negative")
    if not bool(raw.any()) and bool((weight.codes & 0x77).any()):
        raise CheckpointError(
            f"{name}: all block scales are 0 and the codes are not; nobody wrote the scales"
        )
    largest = float(raw.max().view(torch.float8_e4m3fn))
    if largest <= E4M3_MAX / E2M1_MAX:
        return [
            f"{name}: the largest is {largest:g}, as if the outer scale were for codes of FP8 (amax / 448)"
        ]
    return []


def _check_values(weight: StoredWeight) -> None:
    """Per matrix: an outer scale in the wrong form shows in the size of values."""
    matrices = weight.shape[0] if len(weight.shape) == 3 else 1
    total = torch.zeros(matrices, dtype=torch.float64)
    rows_of_each = weight.codes.numel() // weight.codes.shape[-1] // matrices
    row = 0
    for values in weight.values():
        owner = torch.arange(row, row + len(values)) // rows_of_each
        total.index_add_(0, owner, values.double().square().sum(-1))
        row += len(values)
    sizes = (total / (rows_of_each * weight.shape[-1])).sqrt()
    for expert, size in enumerate(sizes.tolist()):
        if size != 0 and not SMALLEST_RMS <= size <= LARGEST_RMS:
            raise CheckpointError(_implausible(weight, expert if matrices > 1 else None, size))


def _implausible(weight: StoredWeight, expert: int | None, size: float) -> str:
    outer = float(weight.outer.reshape(-1)[expert or 0])
    turned = size / outer**2
    is_turned = SMALLEST_RMS <= turned <= LARGEST_RMS
    name = place(weight.name) + ("" if expert is None else f" (expert {expert})")
    advice = (
        f"with the scale turned over it would be {turned:.3g}: it was written in the other form, or turned over twice"
        if is_turned
        else "it is damaged, or of another layout"
    )
    return (
        f"{name}: the root mean square of its values is {size:.3g} with an outer scale of {outer:.3g}, expected "
        f"{SMALLEST_RMS:g} to {LARGEST_RMS:g}; {advice}"
    )
