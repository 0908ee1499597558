"""MXFP4 -> NVFP4 without loss: blocks of 32 with a power of two become two blocks of 16 with an E4M3 scale each.

With k the exponent of a block and kmax the largest of its matrix: outer = 2^(kmax - 8), block scale = 2^(k - kmax + 8),
from 2^8 down to E4M3's smallest, 2^-9: exact while kmax - k <= 17. Blocks of zeros ask for no scale.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from octavo.compiler.checkpoints.stored import StoredWeight, place
from octavo.compiler.errors import CheckpointError

BIAS, NAN = 127, 0xFF
LARGEST_EXPONENT, SPREAD = 8, 17
ENDS = ("_blocks", "_scales")
MX_ELEMENTS = 32


def read(name: str, tensors: Mapping[str, Tensor]) -> StoredWeight:
    """tensors: "_blocks" u8 (..., N, G, 16), the first of a pair in the low nibble; "_scales" E8M0 (..., N, G) as u8.

    A leading axis is that of experts, each a matrix of its own. The result quantises the weight only.
    """
    blocks, scales = tensors["_blocks"], tensors["_scales"]
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8 or blocks.shape != (*scales.shape, 16):
        raise CheckpointError(
            f"{name}_blocks: expected u8 (..., N, G, 16) beside u8 scales (..., N, G), got {blocks.dtype} "
            f"{tuple(blocks.shape)} and {scales.dtype} {tuple(scales.shape)}"
        )
    codes = blocks.flatten(-2)
    matrices = [
        _matrix(f"{name}_scales" + (f", expert {index}" if scales.dim() == 3 else ""), part, scale)
        for index, (part, scale) in enumerate(zip(_matrices(blocks, 3), _matrices(scales, 2), strict=True))
    ]
    block_scales = torch.stack([one for one, _ in matrices]).reshape(*scales.shape[:-1], -1)
    outer = torch.stack([one for _, one in matrices])
    return StoredWeight(
        name, "mxfp4", "nvfp4_weight_only", codes, block_scales, outer if scales.dim() == 3 else outer[0],
        parts=dict(tensors),
    )  # fmt: skip


def _matrices(tensor: Tensor, rank: int) -> Tensor:
    return tensor if tensor.dim() == rank + 1 else tensor[None]


def _matrix(name: str, blocks: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 scales (N, 2 G) and the outer scale () of one matrix."""
    is_used = (blocks & 0x77 != 0).any(-1)
    if bool((is_used & (scales == NAN)).any()):
        raise CheckpointError(
            f"{place(name)}: expected exponents, got {int((scales == NAN).sum())} nan (0xFF)"
        )
    exponents = scales.int() - BIAS
    if not bool(is_used.any()):
        return torch.zeros(*scales.shape[:-1], 2 * scales.shape[-1]).to(torch.float8_e4m3fn), torch.ones(())
    largest, smallest = int(exponents[is_used].max()), int(exponents[is_used].min())
    if largest - smallest > SPREAD:
        raise CheckpointError(
            f"{place(name)}: exponents from {smallest} to {largest} differ by more than {SPREAD}, so NVFP4 cannot hold "
            "the blocks exactly; quantise the model's bf16 weights instead"
        )
    wanted = torch.ldexp(torch.ones(exponents.shape), exponents - largest + LARGEST_EXPONENT)
    block_scales = torch.where(is_used, wanted, torch.zeros(())).to(torch.float8_e4m3fn)
    outer = torch.ldexp(torch.ones(()), torch.tensor(largest - LARGEST_EXPONENT))
    return block_scales.view(torch.uint8).repeat_interleave(2, -1).view(torch.float8_e4m3fn), outer
