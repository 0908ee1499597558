"""Against ModelOpt itself: models that it calibrated and exported, its packer, its decoder, its configurations."""

import json
from pathlib import Path

import pytest
import torch
from foreign import float_weights, quiet
from foreign_modelopt import modelopt_llama
from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
from modelopt.torch.export.shard_cast_utils import quantize_mxfp4_to_nvfp4_lossless
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from torch import Tensor

from octavo.compiler.checkpoints import compressed, modelopt, mxfp4
from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.checkpoints.scheme import Group
from octavo.compiler.errors import CheckpointError

ATTENTION = "model.layers.0.self_attn"


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize(
    ("name", "format"),
    [
        ("NVFP4_DEFAULT_CFG", "nvfp4"),
        ("W4A16_NVFP4_CFG", "nvfp4_weight_only"),
        ("FP8_DEFAULT_CFG", "fp8"),
        ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "fp8"),
    ],
)
def test_a_model_is_read_to_its_values_and_written_to_its_bytes(
    tmp_path: Path, name: str, format: str
) -> None:
    checkpoint = Checkpoint(modelopt_llama(tmp_path, name))
    files, originals = load_file(tmp_path / "model.safetensors"), float_weights()
    assert set(checkpoint) == set(originals)
    written: dict[str, Tensor] = {}
    for module in checkpoint:
        weight = checkpoint.read(module)
        assert weight.format == format
        assert (weight.input_scale is not None) == (name in ("NVFP4_DEFAULT_CFG", "FP8_DEFAULT_CFG"))
        parts = {end: files[f"{module}.{end}"] for end in weight.parts}
        assert torch.equal(weight.dequantize(torch.float32), theirs(parts, weight.shape))
        error = weight.dequantize(torch.float32) - originals[module]
        assert error.norm() < 0.11 * originals[module].norm()
        written |= {f"{module}.{end}": part for end, part in modelopt.parts_of(weight).items()}
    assert set(checkpoint.plain()) | set(written) == set(files)
    assert all(torch.equal(bytes_of(part), bytes_of(files[name])) for name, part in written.items())
    # In the other layout and back: outer scales may move by a rounding, codes and scales do not.
    for module in checkpoint:
        weight = checkpoint.read(module)
        other = compressed.read(module, compressed.parts_of(weight), checkpoint.groups[module])
        assert torch.equal(bytes_of(other.codes), bytes_of(weight.codes))
        assert torch.allclose(other.outer, weight.outer, rtol=2**-23, atol=0)


def theirs(parts: dict[str, Tensor], shape: tuple[int, ...]) -> Tensor:
    """fp32 values as ModelOpt decodes them."""
    if "weight_scale_2" not in parts:
        return parts["weight"].float() * parts["weight_scale"].reshape(-1, 1)
    packed = NVFP4QTensor(torch.Size(shape), torch.float32, parts["weight"])
    scales = {"scale": parts["weight_scale"], "double_scale": parts["weight_scale_2"]}
    return packed.dequantize(torch.float32, **scales, block_sizes={-1: 16})  # type: ignore[no-any-return]


@pytest.mark.parametrize(("pages", "format"), [("FP8_KV_CFG", "fp8"), ("NVFP4_KV_CFG", "nvfp4")])
def test_multipliers_of_pages_are_taken_as_they_stand(tmp_path: Path, pages: str, format: str) -> None:
    checkpoint = Checkpoint(modelopt_llama(tmp_path, pages=pages))
    files = load_file(tmp_path / "model.safetensors")
    expected = [float(files[f"{ATTENTION}.{name}_proj.{name}_scale"]) for name in "kv"]
    assert checkpoint.pages == format and list(checkpoint.multipliers(ATTENTION)) == expected
    assert not any("k_scale" in name for name in checkpoint.plain())


@pytest.mark.parametrize("is_mixed", [False, True])
def test_configurations_are_what_modelopt_makes_of_them(is_mixed: bool) -> None:
    groups = {f"{ATTENTION}.{name}_proj": Group(("Linear",), "nvfp4", True) for name in "qkv"}
    if is_mixed:
        groups["model.layers.0.mlp.down_proj"] = Group(("Linear",), "fp8", True)
        groups["model.layers.0.mlp.up_proj"] = Group(("Linear",), "nvfp4_weight_only", False)
    config = modelopt.config_of(groups, ["lm_head"], "fp8")
    expected = convert_hf_quant_config_format(json.loads(json.dumps(config)))
    embedded = modelopt.embedded(config)
    assert embedded == expected
    for given in (config["quantization"], embedded):
        scheme = modelopt.parse(given, "x")
        assert scheme.pages == "fp8"
        for module, group in groups.items():
            found = scheme.group_of(module, "fp8" if group.format == "fp8" else "nvfp4")
            assert found is not None and (found.format, found.static_inputs) == (
                group.format,
                group.static_inputs,
            )


def test_a_layout_has_no_name_for_every_group() -> None:
    with pytest.raises(
        CheckpointError, match="no name for fp8 with scales by token of inputs and weights by tensor"
    ):
        modelopt.config_of({"a": Group((), "fp8", False)}, (), "bf16")


def test_its_lossless_cast_of_mxfp4_has_our_values() -> None:
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (8, 4, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 126, (8, 4), generator=generator, dtype=torch.uint8)
    ours = mxfp4.read("w", {"_blocks": blocks, "_scales": scales})
    with quiet():
        result = quantize_mxfp4_to_nvfp4_lossless(blocks.flatten(-2), scales, int(scales.max()) - 127, "cpu")
    packed, block_scales, outer = result[:3]
    assert result[3] == result[4]
    values = theirs({"weight": packed, "weight_scale": block_scales, "weight_scale_2": outer}, ours.shape)
    assert torch.equal(values, ours.dequantize(torch.float32))
