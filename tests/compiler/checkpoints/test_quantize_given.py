"""Whole models compiled from their quantised checkpoints: the bytes of the files, and tokens of the decoded values."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from foreign import compressed_tensors_llama, quiet
from models import VOCAB, with_margin
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, MixtralConfig, MixtralForCausalLM

import octavo
from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.checkpoints.convert import convert
from octavo.compiler.compiled import Compiled
from octavo.compiler.errors import CheckpointError, OptionError
from octavo.compiler.precision_table import precision_tables
from octavo.compiler.report import as_text

PROMPT, TOKENS = list(range(5, 17)), 8
EXPERTS = "model.layers.0.block_sparse_moe.experts"
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def saved(model: Any, path: Path) -> Path:
    with quiet():
        model.save_pretrained(path)
    return path


def mixtral(path: Path) -> Path:
    torch.manual_seed(0)
    return saved(with_margin(MixtralForCausalLM(MixtralConfig(intermediate_size=96, **SIZES))), path)


def compiled(path: Path, target: str = "cpu", **options: Any) -> tuple[Any, Compiled]:
    with quiet():
        loaded = octavo.load_model(str(path))
    assert loaded.checkpoint is not None
    return loaded.model, octavo.compile(
        loaded.model, target, quantize=loaded.checkpoint, page_size=4, **options
    )


def check_tokens(model: Any, artifact: Compiled) -> None:
    (answer,) = artifact.generate([PROMPT], octavo.SamplingParams(max_tokens=TOKENS))
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in range(TOKENS):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    assert list(answer.token_ids) == ids[0, len(PROMPT) :].tolist()


def weight(artifact: Compiled, name: str) -> Tensor:
    return torch.from_numpy(np.array(artifact.artifact.weights[name].array))


def raw(tensors: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([tensors[name].view(torch.uint8) for name in names])


def test_a_llama_keeps_its_bytes_and_says_where_from(tmp_path: Path) -> None:
    path = compressed_tensors_llama(tmp_path / "tiny", "NVFP4A16")
    model, artifact = compiled(path)
    check_tokens(model, artifact)
    files, layer = load_file(path / "model.safetensors"), "model.layers.0.self_attn"
    for end, part in (("weight_packed", "codes"), ("weight_scale", "scales")):
        wanted = raw(files, [f"{layer}.{name}_proj.{end}" for name in "qkv"])
        assert torch.equal(
            weight(artifact, f"{layer}.q_proj_k_proj_v_proj_cat_{part}").view(torch.uint8), wanted
        )
    told = artifact.artifact.manifest["provenance"]["quantization"]
    assert (told["from_checkpoint"], told["recipe"], told["calibration"]) == (
        "tiny",
        "compressed-tensors",
        None,
    )
    assert {one["reason"] for one in told["plan"]["products"].values()} == {
        "from checkpoint", "plain in the checkpoint",
    }  # fmt: skip
    assert artifact.artifact.manifest["options"]["checkpoint"] == "tiny"
    text = " ".join(as_text(*precision_tables(artifact.report().data["precision"])).split())
    assert "from checkpoint tiny: formats, codes and scales are those of its files" in text
    assert "from checkpoint tiny: 2 families of products" in text


@pytest.mark.parametrize("layout", ["modelopt", pytest.param("compressed-tensors", marks=pytest.mark.slow)])
def test_experts_in_modules_of_their_own(tmp_path: Path, layout: Any) -> None:
    path = convert(mixtral(tmp_path / "plain"), tmp_path / "quantised", layout, "nearest").directory
    model, artifact = compiled(path)
    check_tokens(model, artifact)
    files = load_file(path / "model.safetensors")
    end = "weight" if layout == "modelopt" else "weight_packed"
    wanted = raw(files, [f"{EXPERTS}.{e}.{name}.{end}" for e in range(2) for name in ("w1", "w3")])
    got = weight(artifact, "model.layers.0.mlp.experts.gate_up_proj_codes")
    assert torch.equal(got.flatten(0, 1), wanted)


def with_inputs(path: Path) -> Path:
    """A converted Mixtral with quantised inputs, whose ups have other outer scales than its gates."""
    tensors = load_file(path / "model.safetensors")
    for name in list(tensors):
        module = name.removesuffix(".weight_scale_2")
        if name != module:
            tensors[f"{module}.input_scale"] = torch.tensor(0.0021 if "w2" in name else 0.0012)
            if module.endswith("w3"):
                tensors[name] = tensors[name] * 1.25
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    for file in ("hf_quant_config.json", "config.json"):
        (path / file).write_text((path / file).read_text().replace("W4A16_NVFP4", "NVFP4"))
    return path


def test_gates_and_ups_with_outer_scales_of_their_own(tmp_path: Path) -> None:
    path = with_inputs(
        convert(mixtral(tmp_path / "plain"), tmp_path / "quantised", "modelopt", "nearest").directory
    )
    _, artifact = compiled(path)  # the whole model is compared with its graph
    files, scale = load_file(path / "model.safetensors"), torch.tensor(0.0012)
    outers = [[files[f"{EXPERTS}.{e}.{name}.weight_scale_2"] for name in ("w1", "w3")] for e in range(2)]
    expected = torch.tensor(outers) * scale
    assert torch.equal(weight(artifact, "model.layers.0.mlp.experts.gate_up_proj_alpha"), expected)
    with pytest.raises(
        CheckpointError, match=r"experts\.0\.w1\): nvfp4: rows of 96 elements are no multiple of 64"
    ):
        compiled(path, "b200")
    with pytest.raises(
        OptionError, match=r"^quantised: model\.layers\.0\.\S+: .* sm_90 has no NVFP4 tensor core"
    ):
        compiled(path, "h100")


def test_inputs_without_scales_have_one_for_each_row(tmp_path: Path) -> None:
    path = compressed_tensors_llama(tmp_path / "tiny")
    tensors = load_file(path / "model.safetensors")
    names = [name for name in tensors if name.endswith("input_global_scale")]
    some = {name: tensor for name, tensor in tensors.items() if name != names[0]}
    save_file(some, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"^{names[0]}: expected one beside the weight"):
        Checkpoint(path).read(names[0].rpartition(".")[0])
    save_file(
        {n: t for n, t in tensors.items() if n not in names}, path / "model.safetensors", {"format": "pt"}
    )
    with quiet():
        _, artifact = compiled(path, verify="off")
    notes = artifact.report().data["precision"]["notes"]
    assert "4 products have no scales of their inputs: each row has its own" in notes
    plan = artifact.artifact.manifest["provenance"]["quantization"]["plan"]["products"]
    assert {one["input_scale"] for one in plan.values() if one["format"] == "nvfp4"} == {None}


@pytest.mark.slow
def test_blocks_of_32_with_powers_of_two(tmp_path: Path) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = GptOssConfig(intermediate_size=64, head_dim=16, sliding_window=8, rope_parameters=rope, **SIZES)
    torch.manual_seed(0)
    path = saved(with_margin(GptOssForCausalLM(config)), tmp_path / "oss")
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            count, length, rows = tensors.pop(name).shape
            blocks = torch.randint(0, 256, (count, rows, length // 32, 16), generator=generator)
            exponents = torch.randint(121, 125, (count, rows, length // 32), generator=generator)
            tensors |= {f"{name}_blocks": blocks.byte(), f"{name}_scales": exponents.byte()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(
        text.replace("{", '{"quantization_config": {"quant_method": "mxfp4"},', 1)
    )
    model, artifact = compiled(path)
    check_tokens(model, artifact)
    given = tensors["model.layers.0.mlp.experts.down_proj_blocks"].flatten(-2)
    (name,) = [n for n in artifact.artifact.weights if "down_proj" in n and n.endswith("_codes")]
    assert torch.equal(weight(artifact, name), given)


def test_a_dump_does_not_go_on_without_its_checkpoint(tmp_path: Path) -> None:
    path = compressed_tensors_llama(tmp_path / "tiny", "NVFP4A16")
    compiled(path, verify="off", dump=tmp_path / "dump")
    (graph,) = (tmp_path / "dump").glob("??_merge_qkv.py")
    with pytest.raises(
        OptionError, match="of the checkpoint tiny, which a dump does not hold; compile it again"
    ):
        octavo.resume(graph)
