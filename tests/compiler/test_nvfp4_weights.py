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
    round_magnitudes,
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


def scale_by_the_rule(block: book.Array, outer: np.float32, importance: book.Array) -> int:
    """Code of the first scale of least error, from two below to seven above that of the largest element, in fp32."""
    if not block.any():
        return 0
    wanted = min(max(np.abs(block).max() / np.float32(6) / outer, np.float32(2**-9)), np.float32(448))
    base = int(torch.tensor(float(wanted)).to(torch.float8_e4m3fn).view(torch.uint8))
    best, least = base, np.float32(np.inf)
    for offset in range(-2, 8):
        code = min(max(base + offset, 1), 126)
        step = np.float32(float(torch.tensor(code, dtype=torch.uint8).view(torch.float8_e4m3fn))) * outer
        values = book.E2M1[book.codes_of(block / step)].astype(np.float32)
        error = (values * step - block) ** 2 * importance
        folded = error[:8] + error[8:]
        total = folded[0]
        for one in folded[1:]:
            total = total + one
        if total < least:
            best, least = code, total
    return best


def test_search_is_the_rule_to_the_bit() -> None:
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(20, 64, generator=generator) ** 3
    weight[3, 16:32] = 0.0
    importance = torch.rand(20, 64, generator=generator)
    outer = weight_outer_scale("w", weight)
    for own in (torch.ones(20, 64), importance[0].expand(20, 64), importance):
        given = None if bool((own == 1).all()) else own[0] if bool((own == own[0]).all()) else own
        got = search_scales(weight, outer, given).view(torch.uint8)
        for row in range(20):
            for block in range(4):
                cut = slice(16 * block, 16 * block + 16)
                x, factors = weight[row, cut].numpy(), own[row, cut].numpy()
                assert int(got[row, block]) == scale_by_the_rule(x, np.float32(float(outer)), factors)


def test_magnitudes_round_to_the_even_code() -> None:
    generator = torch.Generator().manual_seed(5)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = [ties.nextafter(torch.tensor(end)) for end in (0.0, 9.0)]
    z = torch.cat(
        [ties, *near, torch.tensor([0.0, 1e-40, 6.0, 7.0, 1e30]), torch.rand(5000, generator=generator) * 8]
    )
    wanted = book.E2M1[book.codes_of(z.numpy())]
    assert np.array_equal(round_magnitudes(z.clone()).numpy(), wanted)


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
    monkeypatch.setattr("octavo.compiler.nvfp4_weights.CHUNK_BLOCKS", 7)
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
