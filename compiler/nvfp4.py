"""NVFP4 in torch, to the bit of the recipe octavo-v1: codes, block scales, the outer scale and both layouts.

value = code * scale * outer: E2M1 codes, an E4M3 scale for 16 elements along the last axis, an fp32 outer scale (the
decode form) for the tensor. Sources: OCP Microscaling Formats 1.0 (E2M1), NVIDIA "Introducing NVFP4" (2025), cuBLAS'
128 x 4 layout of scales.
"""

import torch
from torch import Tensor

from octavo.compiler.errors import OptionError

RECIPE = "octavo-v1"
BLOCK_ELEMENTS = 16
E2M1_MAX = 6.0
E4M3_MAX = 448.0
# The largest block scale where a search may go above what the largest element asks for: 1.5 * 256 fits into E4M3.
E4M3_MAX_SEARCHED = 256.0
SMALLEST_SCALE = 2.0**-9
SMALLEST_OUTER = 2.0**-80  # of a row
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Halfway to the next magnitude; a tie goes to the even code, so every second bound belongs to the code above.
_ABOVE = (0.25, 1.25, 2.5, 5.0)
_FROM = (0.75, 1.75, 3.5)
# A tile of the tensor core's layout: 128 rows of 4 blocks, 512 bytes.
TILE_ROWS, TILE_BLOCKS = 128, 4


def outer_scale(amax: Tensor, e4m3_max: float = E4M3_MAX) -> Tensor:
    """Decode-form outer scale (fp32) of tensors whose largest magnitudes are `amax`; 1 where that is zero."""
    amax = amax.float()
    return torch.where(amax == 0, torch.ones_like(amax), amax / (E2M1_MAX * e4m3_max))


def outer_scales_of_rows(x: Tensor, largest: float = E2M1_MAX * E4M3_MAX) -> Tensor:
    """fp32 (..., 1): what makes the largest element of each row `largest`, at least 2^-80; 1 for a row of zeros.

    Below 2^-80 a quotient by it may overflow on the way.
    """
    amax = x.float().abs().amax(-1, keepdim=True)
    return torch.where(amax == 0, torch.ones_like(amax), (amax / largest).clamp_min(SMALLEST_OUTER))


def encode_e2m1(x: Tensor) -> Tensor:
    """E2M1 codes 0..15 (u8) of values: to nearest, ties to the even code, saturating, the sign of zero kept.

    nan becomes 6, as the hardware's conversion makes of it.
    """
    x = x.float()
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for bound in _ABOVE:
        code += magnitude > bound
    for bound in _FROM:
        code += magnitude >= bound
    code |= torch.signbit(x).to(torch.uint8) << 3
    return torch.where(x.isnan(), torch.full_like(code, 7), code)


def decode_e2m1(codes: Tensor) -> Tensor:
    """fp32 values of codes 0..15."""
    table = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)], device=codes.device)
    return table[codes.long()]


def pack(codes: Tensor) -> Tensor:
    """Codes (..., K) -> bytes (..., K / 2), the first of a pair in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: Tensor) -> Tensor:
    """Bytes (..., K / 2) -> codes (..., K)."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def block_scales(x: Tensor, outer: Tensor) -> Tensor:
    """E4M3 scales (..., K / 16) that carry each block's largest element; 0 for a block of zeros.

    Raises OptionError where K is no multiple of 16.
    """
    amax = _blocks(x).abs().amax(-1)
    wanted = ((amax / E2M1_MAX) / outer).clamp(SMALLEST_SCALE, E4M3_MAX)
    return torch.where(amax == 0, torch.zeros_like(amax), wanted).to(torch.float8_e4m3fn)


def quantize(x: Tensor, outer: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x (..., K) -> bytes (..., K / 2) and linear E4M3 scales (..., K / 16).

    outer   fp32, one element, or one a row as (..., 1)
    scales  None: those of block_scales. Codes are of the rounded scale: x / (scale * outer), rounded
    """
    if scales is None:
        scales = block_scales(x, outer)
    step = (scales.float() * outer).unsqueeze(-1)
    is_zero = step == 0
    z = torch.where(
        is_zero, torch.zeros_like(step), _blocks(x) / torch.where(is_zero, torch.ones_like(step), step)
    )
    return pack(encode_e2m1(z.flatten(-2))), scales


def dequantize(packed: Tensor, scales: Tensor, outer: Tensor) -> Tensor:
    """fp32 values (..., K) of bytes and linear scales: code * (scale * outer)."""
    step = (scales.float() * outer).unsqueeze(-1)
    return (_blocks(decode_e2m1(unpack(packed))) * step).flatten(-2)


def swizzle(scales: Tensor) -> Tensor:
    """Linear scales (rows, K / 16) -> flat, in tiles of 128 rows x 4 blocks; padding is zero."""
    rows, blocks = scales.shape
    tall, wide = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    padded = scales.new_zeros((tall * TILE_ROWS, wide * TILE_BLOCKS), dtype=torch.uint8)
    padded[:rows, :blocks] = scales.view(torch.uint8)
    tiles = padded.view(tall, 4, 32, wide, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(-1).view(torch.float8_e4m3fn)


def unswizzle(flat: Tensor, rows: int, blocks: int) -> Tensor:
    """The linear scales (rows, blocks) of a swizzled tensor."""
    tall, wide = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    tiles = flat.view(torch.uint8).view(tall, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    padded = tiles.reshape(tall * TILE_ROWS, wide * TILE_BLOCKS)
    return padded[:rows, :blocks].contiguous().view(torch.float8_e4m3fn)


def _blocks(x: Tensor) -> Tensor:
    """(..., K) -> (..., K / 16, 16) in fp32."""
    if x.shape[-1] % BLOCK_ELEMENTS:
        raise OptionError(
            f"nvfp4: expected a last axis of a multiple of {BLOCK_ELEMENTS} elements, got {tuple(x.shape)}"
        )
    blocks: Tensor = x.float().unflatten(-1, (-1, BLOCK_ELEMENTS))
    return blocks
