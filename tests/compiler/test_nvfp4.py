"""The recipe against NVFP4 by the book (tests/support/nvfp4.py), byte for byte."""

import nvfp4 as book
import pytest
import torch

from octavo.compiler.errors import OptionError
from octavo.compiler.nvfp4 import (
    E4M3_MAX_SEARCHED,
    decode_e2m1,
    dequantize,
    encode_e2m1,
    outer_scale,
    pack,
    quantize,
    swizzle,
    unpack,
    unswizzle,
)

ROWS = (1, 5, 31, 32, 33, 127, 128, 129)


def as_bytes(scales: torch.Tensor) -> torch.Tensor:
    return scales.view(torch.uint8)


def test_every_value_around_every_midpoint_gets_the_code_of_the_book() -> None:
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 1e-30, 0.0, 1e30])
    up, down = torch.tensor(float("inf")), torch.tensor(0.0)
    around = torch.cat(
        [middles, torch.nextafter(middles, up), torch.nextafter(middles, down), torch.rand(4096) * 8]
    )
    values = torch.cat([around, -around])
    assert torch.equal(encode_e2m1(values), torch.from_numpy(book.codes_of(values.numpy())))


def test_specials_are_what_the_hardware_makes_of_them() -> None:
    specials = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0])
    assert encode_e2m1(specials).tolist() == [7, 7, 15, 8, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("blocks", [1, 3, 4, 5])
def test_codes_and_scales_are_those_of_the_book(blocks: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(blocks)
    x = torch.randn(67, 16 * blocks, generator=generator) * torch.logspace(-7, 3, 67)[:, None]
    x[3, :16], x[4] = 0.0, 0.0
    x = x.to(dtype)
    outer = outer_scale(x.abs().amax())
    packed, scales = quantize(x, outer)
    wanted_packed, wanted_scales = book.quantize(x, float(outer))
    assert torch.equal(packed, wanted_packed)
    assert torch.equal(as_bytes(scales), as_bytes(wanted_scales))
    decoded = dequantize(packed, scales, outer)
    torch.testing.assert_close(
        decoded.double(), book.dequantize(packed, scales, float(outer)), rtol=2e-7, atol=0.0
    )
    assert decoded[4].eq(0).all()


def test_a_scale_for_each_row_quantises_each_row_by_itself() -> None:
    x = torch.randn(6, 64) * torch.logspace(-3, 3, 6)[:, None]
    outer = outer_scale(x.abs().amax(-1, keepdim=True))
    packed, scales = quantize(x, outer)
    for row in range(6):
        alone = quantize(x[row : row + 1], outer[row])
        assert torch.equal(packed[row], alone[0][0]) and torch.equal(
            as_bytes(scales[row]), as_bytes(alone[1][0])
        )


def test_codes_follow_the_scale_that_is_given() -> None:
    x = torch.full((1, 16), 3.0)
    scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    packed, _ = quantize(x, torch.tensor(1.0), scale)
    assert decode_e2m1(unpack(packed)).unique().tolist() == [1.5]


def test_outer_scales_of_zero_tensors_are_one_and_the_bound_is_a_choice() -> None:
    scales = outer_scale(torch.tensor([0.0, 2688.0, 1536.0]))
    assert scales.tolist()[:2] == [1.0, 1.0]
    assert float(outer_scale(torch.tensor(1536.0), E4M3_MAX_SEARCHED)) == 1.0


@pytest.mark.parametrize("blocks", [1, 3, 4, 5])
@pytest.mark.parametrize("rows", ROWS)
def test_layout_of_the_tensor_core(rows: int, blocks: int) -> None:
    linear = (torch.arange(rows * blocks) % 127).to(torch.uint8).view(rows, blocks).view(torch.float8_e4m3fn)
    flat = swizzle(linear)
    assert torch.equal(as_bytes(flat), as_bytes(book.swizzle(linear, padding=0)))
    assert torch.equal(as_bytes(unswizzle(flat, rows, blocks)), as_bytes(linear))


def test_packing_is_low_nibble_first_and_loses_nothing() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert pack(codes).tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert torch.equal(unpack(pack(codes)), codes)


def test_rows_that_are_no_whole_blocks_are_refused() -> None:
    with pytest.raises(OptionError, match=r"multiple of 16 elements, got \(3, 40\)"):
        quantize(torch.ones(3, 40), torch.tensor(1.0))
