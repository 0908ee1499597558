"""Quantised artifacts as directories for other engines: what was compiled comes back, and other libraries decode it."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from foreign import quiet
from models import VOCAB, tiny, with_margin
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import octavo
from octavo.compiler.checkpoints import compressed
from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.checkpoints.scheme import Group
from octavo.compiler.compiled import Compiled
from octavo.compiler.eager_runner import EagerRunner
from octavo.compiler.errors import CheckpointError
from octavo.compiler.options import QuantConfig
from octavo.compiler.whole_model import _artifact_rows, _prompts

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from compressed_tensors.quantization import QuantizationConfig
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

CALIBRATION = [[(7 * i + 3 * j) % VOCAB for i in range(40)] for j in range(3)]
W4A4 = QuantConfig("nvfp4", kv="fp8", weights="nearest")
PAGES: dict[str, Any] = {"page_size": 4, "max_model_len": 48, "verify": "off"}


def compiled(model: Any, quantize: Any, **options: Any) -> Compiled:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(action="ignore"):
        patch.setenv("CXX", "no-such-compiler")  # the program is not run here
        return octavo.compile(model, quantize=quantize, calibration=CALIBRATION, **{**PAGES, **options})


def again(path: Path) -> Compiled:
    with quiet():
        loaded = octavo.load_model(str(path))
    return compiled(loaded.model, loaded.checkpoint)


def exported(artifact: Compiled, path: Path, model: Any, layout: Any = "modelopt") -> Path:
    with quiet():
        return artifact.export_checkpoint(path, model, layout)


def check_same(first: Compiled, second: Compiled, roundings: float = 0.0) -> None:
    """Every weight to the bit, and so every code, scale and multiplier. roundings: of outer scales, if turned over."""
    ours, theirs = first.artifact.weights, second.artifact.weights
    assert list(ours) == list(theirs)
    for name in ours:
        one, other = np.array(ours[name].array), np.array(theirs[name].array)
        if roundings and ("alpha" in name or "outer" in name or name.startswith("input_scales")):
            assert np.allclose(one, other, rtol=roundings * 2**-23, atol=0), name
        else:
            assert np.array_equal(one.view(np.uint8), other.view(np.uint8)), name


@pytest.fixture(scope="module")
def llama() -> Compiled:
    return compiled(tiny("llama"), W4A4)


def test_modelopt_gets_every_bit_and_decodes_it(llama: Compiled, tmp_path: Path) -> None:
    path = exported(llama, tmp_path / "hf", tiny("llama"))
    check_same(llama, again(path))
    checkpoint, files = Checkpoint(path), load_file(path / "model.safetensors")
    modules = [*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down"))]
    assert set(checkpoint.groups) == {f"model.layers.{i}.{module}" for i in range(2) for module in modules}
    originals = tiny("llama").state_dict()
    for module in checkpoint:
        values = checkpoint.read(module).dequantize(torch.float32)
        packed = NVFP4QTensor(values.shape, torch.float32, files[f"{module}.weight"])
        scales = {"scale": files[f"{module}.weight_scale"], "double_scale": files[f"{module}.weight_scale_2"]}
        decode: Any = packed.dequantize
        assert torch.equal(decode(torch.float32, **scales, block_sizes={-1: 16}), values)
        error = values - originals[f"{module}.weight"]
        assert error.norm() < 0.12 * originals[f"{module}.weight"].norm()
    for name in checkpoint.plain():
        assert torch.equal(files[name], originals[name])
    told = json.loads((path / "hf_quant_config.json").read_text())["quantization"]
    assert (told["quant_algo"], told["kv_cache_quant_algo"]) == ("NVFP4", "FP8")


def test_compressed_tensors_decodes_and_loads_it(llama: Compiled, tmp_path: Path) -> None:
    path = exported(llama, tmp_path / "hf", tiny("llama"), "compressed-tensors")
    check_same(llama, again(path), roundings=2)
    checkpoint, files = Checkpoint(path), load_file(path / "model.safetensors")
    config = compressed.config_of({"a": Group((), "nvfp4", True)}, (), "bf16")
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    for module in checkpoint:
        names = ("weight_packed", "weight_scale", "weight_global_scale")
        values = NVFP4PackedCompressor.decompress({n: files[f"{module}.{n}"] for n in names}, scheme)[
            "weight"
        ]
        # They divide in bf16.
        assert torch.allclose(
            values.float(), checkpoint.read(module).dequantize(torch.float32), rtol=2**-7, atol=0
        )
    with quiet():
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    assert isinstance(loaded, LlamaForCausalLM)


def mixtral() -> Any:
    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=2, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return with_margin(MixtralForCausalLM(config))


@pytest.mark.parametrize(
    ("mode", "layout"),
    [
        ("nvfp4", "modelopt"),
        *(pytest.param("fp8", x, marks=pytest.mark.slow) for x in ("modelopt", "compressed-tensors")),
    ],
)  # fmt: skip
def test_experts_have_modules_of_their_own(tmp_path: Path, mode: Any, layout: str) -> None:
    first = compiled(mixtral(), QuantConfig(mode, weights="nearest"))
    path = exported(first, tmp_path / "hf", mixtral(), layout)
    checkpoint = Checkpoint(path)
    assert len(checkpoint.groups) == 4 + 2 * 3
    assert "model.layers.0.block_sparse_moe.experts.1.w3" in checkpoint.groups
    check_same(first, again(path))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["nvfp4", "nvfp4_weight_only"])
def test_what_gpu_kernels_read_in_another_order_comes_back(tmp_path: Path, mode: Any) -> None:
    def model() -> Any:
        config = MixtralConfig(
            vocab_size=VOCAB, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=2, bos_token_id=None, eos_token_id=None,
        )  # fmt: skip
        torch.manual_seed(0)
        return with_margin(MixtralForCausalLM(config)).bfloat16()

    config = QuantConfig(mode, weights="nearest")
    on_cpu, on_gpu = (compiled(model(), config, target=target) for target in ("cpu", "b200"))
    files = [
        load_file(exported(one, tmp_path / name, model()) / "model.safetensors")
        for one, name in ((on_cpu, "cpu"), (on_gpu, "gpu"))
    ]
    assert set(files[0]) == set(files[1])
    assert all(same(tensor, files[1][name]) for name, tensor in files[0].items())


def same(one: Tensor, other: Tensor) -> bool:
    flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return torch.equal(*flat)


def test_formats_side_by_side_and_from_one_layout_to_the_other(tmp_path: Path) -> None:
    config = QuantConfig("nvfp4_weight_only", weights="nearest", keep=("*.o_proj", "model.layers.1.*"))
    first = compiled(tiny("llama"), config)
    path = exported(first, tmp_path / "a", tiny("llama"))
    second = again(path)
    other = second.export_checkpoint(tmp_path / "b", path, "compressed-tensors")
    check_same(first, again(other), roundings=2)
    assert set(Checkpoint(other).plain()) == set(Checkpoint(path).plain())


def test_what_is_searched_gives_the_same_logits(tmp_path: Path) -> None:
    """Channels may be scaled before a search: norms have other weights then."""
    first = compiled(tiny("llama"), QuantConfig("nvfp4", weights="search"))
    second = again(exported(first, tmp_path / "hf", tiny("llama")))
    step = _prompts(first.artifact)
    ours, theirs = (
        np.stack(_artifact_rows(step, one.artifact.program, EagerRunner(one.artifact, 64)).logits)
        for one in (first, second)
    )
    assert np.array_equal(ours, theirs)


def test_what_no_layout_says_is_refused_by_name(llama: Compiled, tmp_path: Path) -> None:
    by_token = compiled(tiny("llama"), QuantConfig("nvfp4", activations="by_token", weights="nearest"))
    other = with_margin(tiny("llama"))
    for parameter in other.parameters():
        parameter.data = parameter.data.flip(0)
    cases = {
        r"model\.layers\.0\.\S+_proj: its inputs have outer scales by token": (
            by_token,
            tiny("llama"),
        ),
        r"model\.layers\.0\.\S+_proj: its values are 14\d% off": (llama, other),
    }
    for said, (artifact, model) in cases.items():
        with pytest.raises(CheckpointError, match=f"^{said}"):
            exported(artifact, tmp_path / "hf", model)
        assert list(tmp_path.iterdir()) == []
    (tmp_path / "hf").mkdir()
    with pytest.raises(CheckpointError, match="expected no file there"):
        exported(llama, tmp_path / "hf", tiny("llama"))
