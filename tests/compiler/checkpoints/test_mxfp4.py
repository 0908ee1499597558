"""MXFP4 becomes NVFP4 without loss where it can, by values computed from OCP's rules."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from nvfp4 import E2M1
from safetensors.torch import save_file
from torch import Tensor

from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.errors import CheckpointError

NAME = "model.layers.0.mlp.experts.gate_up_proj"


def directory(path: Path, blocks: Tensor, scales: Tensor) -> Checkpoint:
    save_file({f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    return Checkpoint(path)


def values(blocks: Tensor, scales: Tensor) -> Tensor:
    """fp64 by the book: E2M1 * 2^(byte - 127), the first of a pair in the low nibble."""
    raw = blocks.numpy()
    codes = np.stack([raw & 15, raw >> 4], -1).reshape(*raw.shape[:-1], 32)
    decoded = E2M1[codes] * np.exp2(scales.numpy().astype(np.float64) - 127)[..., None]
    return torch.from_numpy(decoded.reshape(*raw.shape[:-2], -1))


def drawn(*shape: int, low: int = 108, high: int = 126) -> tuple[Tensor, Tensor]:
    """low..high exclusive: exponents whose differences are at most 17."""
    generator = torch.Generator().manual_seed(2)
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


@pytest.mark.parametrize("shape", [(6, 3), (2, 6, 3)])
def test_values_are_the_same(tmp_path: Path, shape: tuple[int, ...]) -> None:
    blocks, scales = drawn(*shape)
    scales.view(-1)[0], scales.view(-1)[1] = 125, 108  # the whole spread is there
    weight = directory(tmp_path, blocks, scales).read(NAME)
    assert (weight.format, weight.shape) == ("nvfp4_weight_only", (*shape[:-1], 96))
    assert weight.outer.shape == shape[:-2]
    assert torch.equal(weight.dequantize(torch.float64), values(blocks, scales))


def test_a_spread_that_is_too_wide_is_refused_with_the_expert(tmp_path: Path) -> None:
    blocks, scales = drawn(2, 4, 3, high=120)
    blocks[1, 0, 0], scales[1, 0, 0] = 0x22, 126
    blocks[1, 0, 1], scales[1, 0, 1] = 0x22, 108
    with pytest.raises(
        CheckpointError, match=r"gate_up_proj_scales, expert 1: exponents from -19 to -1 differ by mo"
    ):
        directory(tmp_path, blocks, scales).read(NAME)


def test_blocks_of_zeros_ask_for_nothing(tmp_path: Path) -> None:
    blocks, scales = drawn(4, 3)
    blocks[0, 0], scales[0, 0] = 0x80, 255
    blocks[1, 0], scales[1, 0] = 0x08, 0
    weight = directory(tmp_path, blocks, scales).read(NAME)
    expected = values(blocks, torch.where(scales == 255, torch.zeros_like(scales), scales))
    assert torch.equal(weight.dequantize(torch.float64), expected)


def test_a_nan_and_shapes_that_do_not_fit(tmp_path: Path) -> None:
    blocks, scales = drawn(4, 3)
    blocks[2, 1], scales[2, 1] = 0x77, 255
    with pytest.raises(CheckpointError, match=r"_scales: expected exponents, got 1 nan \(0xFF\)"):
        directory(tmp_path, blocks, scales).read(NAME)
    with pytest.raises(CheckpointError, match=r"_blocks: expected u8 .* got torch.uint8 \(4, 3, 8\)"):
        directory(tmp_path, blocks[..., :8].contiguous(), scales).read(NAME)
