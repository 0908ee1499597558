"""Searched scales against trying every scale there is, and error feedback against what it is for."""

import numpy as np
import nvfp4 as book
import pytest
import torch

from octavo.compiler.errors import OptionError
from octavo.compiler.nvfp4 import dequantize, quantize
from octavo.compiler.nvfp4_weights import (
    quantize_weight,
    quantize_weight_with_feedback,
    search_scales,
    weight_outer_scale,
)


def errors_of_every_scale(block: torch.Tensor, outer: float, importance: book.Array) -> book.Array:
    """Weighted squared error of one block of 16 for each of the 126 positive finite scales."""
    steps = np.arange(1, 0x7F, dtype=np.uint8).view("uint8")
    scales = torch.from_numpy(steps).view(torch.float8_e4m3fn).float().numpy() * np.float32(outer)
    x = block.numpy().astype(np.float32)
    codes = book.codes_of(x[None] / scales[:, None])
    errors: book.Array = ((book.E2M1[codes] * scales[:, None].astype(np.float64) - x) ** 2 * importance).sum(
        -1
    )
    return errors


@pytest.mark.parametrize("heavy_tails", [False, True])
def test_search_is_about_as_good_as_trying_every_scale(heavy_tails: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    weight = torch.randn(24, 64, generator=generator)
    if heavy_tails:
        weight = weight**3
    importance = torch.rand(64, generator=generator) + 0.1
    outer = weight_outer_scale("w", weight)
    scales = search_scales(weight, outer, importance).float()
    found = best = plain = 0.0
    for row in range(24):
        for block in range(4):
            cut = slice(16 * block, 16 * block + 16)
            errors = errors_of_every_scale(weight[row, cut], float(outer), importance[cut].double().numpy())
            code = int(scales[row, block].to(torch.float8_e4m3fn).view(torch.uint8))
            found, best = found + errors[code - 1], best + errors.min()
            absmax = quantize(weight[row : row + 1, cut], outer)[1].view(torch.uint8)
            plain += errors[int(absmax) - 1]
    assert best <= found <= 1.01 * best
    assert found < 0.9 * plain


def test_zero_blocks_keep_a_scale_of_zero() -> None:
    weight = torch.randn(2, 32)
    weight[1, 16:] = 0.0
    packed, scales = quantize_weight(weight, weight_outer_scale("w", weight))
    assert float(scales[1, 1].float()) == 0.0 and packed[1, 8:].eq(0).all()
    zeros = torch.zeros(3, 16)
    outer = weight_outer_scale("z", zeros)
    assert float(outer) == 1.0
    assert dequantize(*quantize_weight(zeros, outer), outer).eq(0).all()


def test_rows_are_searched_alike_in_every_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(50, 32)
    outer = weight_outer_scale("w", weight)
    whole = search_scales(weight, outer)
    monkeypatch.setattr("octavo.compiler.nvfp4_weights.CHUNK_ROWS", 7)
    assert torch.equal(search_scales(weight, outer).view(torch.uint8), whole.view(torch.uint8))


def test_feedback_lowers_the_error_of_what_the_layer_computes() -> None:
    generator = torch.Generator().manual_seed(3)
    mixing = torch.randn(96, 96, generator=generator)
    x = torch.randn(512, 96, generator=generator) @ mixing
    weight = torch.randn(40, 96, generator=generator)
    outer = weight_outer_scale("w", weight)
    moments = x.T @ x

    def loss(packed: torch.Tensor, scales: torch.Tensor) -> float:
        return float(((dequantize(packed, scales, outer) - weight) @ x.T).square().mean())

    nearest = loss(*quantize_weight(weight, outer, moments.diagonal()))
    assert loss(*quantize_weight_with_feedback(weight, outer, moments)) < 0.5 * nearest


def test_feedback_without_correlations_is_the_nearest_code() -> None:
    weight = torch.randn(8, 48)
    outer = weight_outer_scale("w", weight)
    packed, scales = quantize_weight_with_feedback(weight, outer, torch.eye(48))
    wanted_packed, wanted_scales = quantize_weight(weight, outer)
    assert torch.equal(scales.view(torch.uint8), wanted_scales.view(torch.uint8))
    assert torch.equal(packed, wanted_packed)


@pytest.mark.parametrize("moments", [torch.zeros(32, 32), torch.diag((torch.arange(32) % 3).float())])
def test_inputs_that_calibration_never_used_do_no_harm(moments: torch.Tensor) -> None:
    weight = torch.randn(4, 32)
    outer = weight_outer_scale("w", weight)
    packed, scales = quantize_weight_with_feedback(weight, outer, moments)
    error = (dequantize(packed, scales, outer) - weight).abs().amax()
    assert error < 0.2 * weight.abs().amax()


def test_weights_that_are_not_finite_are_refused_by_name() -> None:
    weight = torch.ones(2, 16)
    weight[1, 3] = float("nan")
    with pytest.raises(OptionError, match=r"nvfp4: layers\.0\.w holds 1 elements that are not finite"):
        weight_outer_scale("layers.0.w", weight)
