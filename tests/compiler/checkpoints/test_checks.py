"""Bytes that cannot be meant: every check of an import, by the message that names the tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from octavo.compiler import nvfp4
from octavo.compiler.checkpoints.checkpoint import MODELOPT_CONFIG, Checkpoint
from octavo.compiler.errors import CheckpointError

Tensors = dict[str, Tensor]
MODULE = "model.layers.0.mlp.experts.3.up_proj"


def tensors(rows: int = 8, length: int = 64, module: str = MODULE, std: float = 0.05) -> Tensors:
    """A module of NVFP4 in ModelOpt's layout."""
    weight = torch.randn(rows, length, generator=torch.Generator().manual_seed(1)) * std
    outer = nvfp4.outer_scale(weight.abs().amax())
    codes, scales = nvfp4.quantize(weight, outer)
    ends = {
        "weight": codes,
        "weight_scale": scales,
        "weight_scale_2": outer,
        "input_scale": torch.tensor(0.01),
    }
    return {f"{module}.{end}": tensor for end, tensor in ends.items()}


def write(path: Path, content: Tensors, algorithm: str = "NVFP4") -> Path:
    save_file(content, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    quantization = {"quantization": {"quant_algo": algorithm}}
    (path / MODELOPT_CONFIG).write_text(json.dumps(quantization))
    return path


def encoded(path: Path, content: Tensors) -> Path:
    """The same in the layout of compressed-tensors, as a converter that copies outer scales would write it."""
    names = {
        "weight": "weight_packed",
        "weight_scale_2": "weight_global_scale",
        "input_scale": "input_global_scale",
    }
    renamed = {}
    for name, tensor in content.items():
        module, _, end = name.rpartition(".")
        renamed[f"{module}.{names.get(end, end)}"] = tensor.reshape(1) if tensor.dim() == 0 else tensor
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": {"num_bits": 4, "dynamic": "local"},
    }
    save_file(renamed, path / "model.safetensors")
    config = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": {"g": group},
    }
    (path / "config.json").write_text(json.dumps({"quantization_config": config}))
    return path


def changed(end: str, change: Callable[[Tensor], Tensor | None]) -> Tensors:
    content = tensors()
    result = change(content.pop(f"{MODULE}.{end}"))
    return content if result is None else {**content, f"{MODULE}.{end}": result}


def bytes_at(value: int) -> Callable[[Tensor], Tensor]:
    def change(scales: Tensor) -> Tensor:
        raw = scales.view(torch.uint8).clone()
        raw[2, 1] = raw[3, 3] = value
        return raw.view(torch.float8_e4m3fn)

    return change


@pytest.mark.parametrize(
    ("end", "change", "said"),
    [
        ("weight_scale_2", lambda t: t * float("inf"), r"\.weight_scale_2 \(expert 3\): expected finite .* got inf"),
        ("weight_scale_2", lambda t: t * 0, "got 0.0 in 1 of 1"),
        ("weight_scale_2", lambda t: -t, "got -"),
        ("weight_scale_2", lambda t: None, r"\.weight_scale_2 \(expert 3\): .* the checkpoint is not complete"),
        ("weight_scale_2", lambda t: torch.stack([t, t]), "an outer scale of 1 elements, got 2"),
        ("input_scale", lambda t: t * float("nan"), r"\.input_scale \(expert 3\): .* got nan"),
        ("weight_scale", lambda t: None, r"\.weight_scale \(expert 3\): expected one beside the weight, got none"),
        ("weight_scale", bytes_at(0x7F), r"\.weight_scale \(expert 3\): 2 of 32 block scales are nan \(0x7F\)"),
        ("weight_scale", bytes_at(0xFF), "2 of 32 block scales are nan"),
        ("weight_scale", bytes_at(0x81), "2 of 32 block scales are negative"),
        ("weight_scale", torch.zeros_like, "all block scales are 0 and the codes are not"),
        ("weight_scale", lambda t: t[:, :2].contiguous(), r"expected block scales \(8, 4\) .* got \(8, 2\)"),
        ("weight_scale", lambda t: t.float(), "got .* of torch.float32"),
        ("weight", lambda t: t.flatten(), "expected codes of torch.uint8 in two axes"),
        ("weight_scale_2", lambda t: 1 / t, r"the root mean square .* with the scale turned over it would be 0\.05"),
        ("weight_scale_2", lambda t: t * 1e-6, r"root mean square of its values is .*e-08 .* it is damaged"),
    ],
)  # fmt: skip
def test_bytes_that_cannot_be_meant(
    tmp_path: Path, end: str, change: Callable[[Tensor], Tensor | None], said: str
) -> None:
    with pytest.raises(CheckpointError, match=f"experts.3.up_proj.*{said}"):
        Checkpoint(write(tmp_path, changed(end, change))).read(MODULE)


def test_an_expert_that_calibration_never_routed_to(tmp_path: Path) -> None:
    """Others have a scale of their inputs, so this one's is missing."""
    others = {name.replace("experts.3", "experts.0"): tensor for name, tensor in tensors().items()}
    checkpoint = Checkpoint(write(tmp_path, {**others, **changed("input_scale", lambda t: None)}))
    said = r"experts.3.up_proj\.input_scale \(expert 3\): expected one .* never routed to"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.read(MODULE)


def test_the_untouched_bytes_are_read(tmp_path: Path) -> None:
    assert Checkpoint(write(tmp_path, tensors())).read(MODULE).shape == (8, 64)


def test_an_outer_scale_that_a_converter_did_not_turn_over(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="written in the other form, or turned over twice"):
        Checkpoint(encoded(tmp_path, tensors())).read(MODULE)


def test_a_dead_expert_in_encode_form(tmp_path: Path) -> None:
    content = {**tensors(), f"{MODULE}.weight_scale_2": torch.tensor(float("inf"))}
    with pytest.raises(
        CheckpointError, match=r"weight_global_scale \(expert 3\): expected finite .* got inf"
    ):
        Checkpoint(encoded(tmp_path, content)).read(MODULE)


def test_a_weight_of_zeros_is_one(tmp_path: Path) -> None:
    weight = Checkpoint(write(tmp_path, tensors(std=0.0))).read(MODULE)
    assert float(weight.outer) == 1 and not weight.dequantize(torch.float32).any()


def test_scales_for_codes_of_fp8_are_noted(tmp_path: Path) -> None:
    content = tensors()
    scale = content[f"{MODULE}.weight_scale"]
    content[f"{MODULE}.weight_scale"] = (scale.float() / 6).to(torch.float8_e4m3fn)
    content[f"{MODULE}.weight_scale_2"] = content[f"{MODULE}.weight_scale_2"] * 6
    checkpoint = Checkpoint(write(tmp_path, content))
    checkpoint.read(MODULE)
    checkpoint.read(MODULE)
    assert [note.partition(": ")[2] for note in checkpoint.notes] == [
        "the largest is 72, as if the outer scale were for codes of FP8 (amax / 448)"
    ]


def test_siblings_may_have_scales_of_their_own_and_one_length(tmp_path: Path) -> None:
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    content: Tensors = {}
    for number, name in enumerate(names):
        content |= tensors(module=name, std=0.05 * (number + 1))
    assert "1 families" in Checkpoint(write(tmp_path, content)).notes[0]
    content |= tensors(module=names[1], length=32)
    with pytest.raises(
        CheckpointError, match=r"q_proj: expected rows of one length in its siblings, got .*: 16"
    ):
        Checkpoint(write(tmp_path, content))


def test_parts_that_nothing_here_multiplies_with(tmp_path: Path) -> None:
    content = {**tensors(), f"{MODULE}.pre_quant_scale": torch.ones(64)}
    with pytest.raises(
        CheckpointError, match=r"\(expert 3\)\.pre_quant_scale: AWQ's smoothing of inputs is not read"
    ):
        Checkpoint(write(tmp_path, content))
    del content[f"{MODULE}.pre_quant_scale"]
    content[f"{MODULE}.weight"] = torch.ones(8, 64)
    with pytest.raises(
        CheckpointError, match=r"\(expert 3\)\.weight: expected codes beside weight_scale, got torch.fl"
    ):
        Checkpoint(write(tmp_path, content))


def test_a_configuration_that_the_files_know_nothing_of(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="says modelopt, its files hold no quantised weight"):
        Checkpoint(write(tmp_path, {"lm_head.weight": torch.ones(2, 2)}))
    config = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}
    write(tmp_path, tensors())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"quant_algo is 'NVFP4' here and 'FP8' in config.json"):
        Checkpoint(tmp_path)
    (tmp_path / MODELOPT_CONFIG).unlink()
    config["quantization_config"]["quant_method"] = "gptq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected modelopt, compressed-tensors or mxfp4, got 'gptq'"):
        Checkpoint(tmp_path)
