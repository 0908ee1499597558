"""Against compressed-tensors itself: what it packs is read to its values, and written back to its bytes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.entrypoints.convert.converters import ModelOptNvfp4Converter
from compressed_tensors.quantization import QuantizationConfig
from foreign import compressed_tensors_llama, float_weights, input_scale, quiet
from safetensors.torch import load_file
from torch import Tensor

from octavo.compiler.checkpoints import compressed, modelopt
from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.checkpoints.scheme import Group

LAYER = "model.layers.0"


@pytest.mark.parametrize("preset", ["NVFP4", "NVFP4A16", "FP8", "FP8_DYNAMIC"])
def test_a_model_is_read_to_its_values_and_written_to_its_bytes(tmp_path: Path, preset: str) -> None:
    checkpoint = Checkpoint(compressed_tensors_llama(tmp_path, preset))
    files = load_file(tmp_path / "model.safetensors")
    originals = float_weights()
    assert set(checkpoint) == set(originals) and len(originals) == 7
    written: dict[str, Tensor] = {}
    for module in checkpoint:
        weight = checkpoint.read(module)
        expected = decoded(files, module)
        got = weight.dequantize(torch.float64)
        # code * scale / global there, code * (scale * outer) here: two roundings of fp32 apart.
        assert (got - expected).abs().max() <= 2**-22 * expected.abs().max()
        assert (got - originals[module]).norm() < 0.11 * originals[module].norm()
        static = preset in ("NVFP4", "FP8")
        assert (weight.input_scale is not None) == static
        if weight.input_scale is not None:
            assert float(weight.input_scale) == pytest.approx(input_scale(module), rel=1e-6)
        written |= {f"{module}.{end}": part for end, part in compressed.parts_of(weight).items()}
    plain = set(checkpoint.plain())
    assert plain | set(written) == set(files) and plain.isdisjoint(written)
    for name, part in written.items():
        assert part.dtype == files[name].dtype and torch.equal(bytes_of(part), bytes_of(files[name])), name


def decoded(files: dict[str, Tensor], module: str) -> Tensor:
    """fp64 by what the format means; of NVFP4 the library's own values must agree."""
    scale = files[f"{module}.weight_scale"].double()
    if f"{module}.weight" in files:
        return files[f"{module}.weight"].double() * scale
    packed, outer = files[f"{module}.weight_packed"], files[f"{module}.weight_global_scale"].double()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]).double()
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    values = table[codes.long()] * (scale / outer).repeat_interleave(16, -1)
    state = {
        end: files[f"{module}.{end}"] for end in ("weight_packed", "weight_scale", "weight_global_scale")
    }
    theirs = NVFP4PackedCompressor.decompress(state, scheme())["weight"]
    assert torch.allclose(theirs.double(), values, rtol=2**-7, atol=0)
    return values


def scheme() -> object:
    group = compressed.config_of({"a": Group((), "nvfp4", True)}, (), "bf16")
    return QuantizationConfig.model_validate(group).config_groups["group_0"]


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_outer_scales_are_turned_over_once(tmp_path: Path) -> None:
    """Their converter makes of ModelOpt's layout what ours makes; read back, it is what it was."""
    checkpoint = Checkpoint(compressed_tensors_llama(tmp_path))
    for module in checkpoint:
        weight = checkpoint.read(module)
        ours = modelopt.parts_of(weight)
        named = {f"{module}.{end}": tensor.clone() for end, tensor in ours.items()}
        with quiet():
            theirs = ModelOptNvfp4Converter(targets=["re:.*"]).process(named)
        assert set(theirs) == {f"{module}.{end}" for end in weight.parts}
        for end, part in weight.parts.items():
            assert torch.allclose(
                theirs[f"{module}.{end}"].float(), part.float().reshape(ours_shape(end, ours))
            )


def ours_shape(end: str, ours: dict[str, Tensor]) -> tuple[int, ...]:
    names = {
        "weight_packed": "weight",
        "weight_global_scale": "weight_scale_2",
        "input_global_scale": "input_scale",
    }
    return tuple(ours[names.get(end, end)].shape)


@pytest.mark.parametrize("outer", [1.0, 0.75, 1.2, 1.9999999, 3.1e-5, 2.0**-20])
def test_encode_form_reads_back_as_the_same_scale_where_one_does(outer: float) -> None:
    wanted = compressed.invertible(torch.tensor(outer))
    assert abs(float(wanted) - outer) <= 2**-23 * outer
    assert float(1.0 / compressed.encode(wanted)) == float(wanted)


def test_the_configuration_is_one_that_the_library_takes(tmp_path: Path) -> None:
    groups = {
        f"{LAYER}.a": Group(("Linear",), "nvfp4", True),
        f"{LAYER}.b": Group(("Linear",), "nvfp4_weight_only", False),
        f"{LAYER}.c": Group(("x",), "fp8", False, True),
        f"{LAYER}.d": Group(("Linear",), "fp8", True),
        f"{LAYER}.e": Group(("Linear",), "nvfp4", True),
    }
    config = json.loads(json.dumps(compressed.config_of(groups, ["lm_head"], "fp8")))
    theirs: Any = QuantizationConfig.model_validate(config)
    assert theirs.format == "mixed-precision" and theirs.ignore == ["lm_head"]
    assert theirs.config_groups["group_0"].targets == [f"{LAYER}.a", f"{LAYER}.e"]
    assert theirs.kv_cache_scheme is not None and theirs.kv_cache_scheme.num_bits == 8
    ours = compressed.parse(config, "x")
    assert ours.pages == "fp8"
    kinds = dict(zip("abcde", ("nvfp4", "nvfp4", "fp8", "fp8", "nvfp4"), strict=True))
    for end, kind in kinds.items():
        found = ours.group_of(f"{LAYER}.{end}", kind)  # type: ignore[arg-type]
        wanted = groups[f"{LAYER}.{end}"]
        assert found is not None
        assert (found.format, found.static_inputs, found.by_row) == (
            wanted.format,
            wanted.static_inputs,
            wanted.by_row,
        )
    single = compressed.config_of({"a": groups[f"{LAYER}.a"]}, ["lm_head"], "bf16")
    assert single["format"] == "nvfp4-pack-quantized"
    assert single["config_groups"]["group_0"]["targets"] == ["Linear"]
