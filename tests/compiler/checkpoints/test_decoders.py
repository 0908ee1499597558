"""Two more libraries: what torchao packs is read to its values; onnx decodes our weights to ours."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from foreign import quiet
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator
from safetensors.torch import save_file
from torch import Tensor

from octavo.compiler import nvfp4_weights
from octavo.compiler.checkpoints import modelopt
from octavo.compiler.checkpoints.checkpoint import MODELOPT_CONFIG, Checkpoint
from octavo.compiler.checkpoints.stored import StoredWeight

with warnings.catch_warnings(), quiet():
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

MODULE = "model.layers.0.mlp.down_proj"


def weight_of(rows: int, length: int) -> Tensor:
    return torch.randn(rows, length, generator=torch.Generator().manual_seed(5)) * 0.03


def checkpoint_of(path: Path, parts: dict[str, Tensor]) -> Checkpoint:
    save_file({f"{MODULE}.{end}": part.clone() for end, part in parts.items()}, path / "model.safetensors")
    (path / "config.json").write_text("{}")
    (path / MODELOPT_CONFIG).write_text(json.dumps({"quantization": {"quant_algo": "W4A16_NVFP4"}}))
    return Checkpoint(path)


def test_torchao(tmp_path: Path) -> None:
    weight = weight_of(12, 96)
    packed: Any = NVFP4Tensor.to_nvfp4(weight, per_tensor_scale=per_tensor_amax_to_scale(weight.abs().amax()))
    parts = {
        "weight": packed.qdata.view(torch.uint8), "weight_scale": packed.scale.reshape(12, 6),
        "weight_scale_2": packed.per_tensor_scale,
    }  # fmt: skip
    read = checkpoint_of(tmp_path, parts).read(MODULE)
    assert torch.equal(read.dequantize(torch.float32), packed.dequantize(torch.float32))
    back = modelopt.parts_of(read)
    assert all(torch.equal(bytes_of(back[end]), bytes_of(part)) for end, part in parts.items())


def bytes_of(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_onnx_decodes_our_weights(tmp_path: Path) -> None:
    """Two DequantizeLinear, the first of the block scales, as the standard says of NVFP4."""
    weight = weight_of(12, 96)
    outer = nvfp4_weights.weight_outer_scale(MODULE, weight)
    codes, scales = nvfp4_weights.quantize_weight(weight, outer)
    ours = StoredWeight(MODULE, "octavo", "nvfp4_weight_only", codes, scales, outer)
    read = checkpoint_of(tmp_path, modelopt.parts_of(ours)).read(MODULE)
    assert read.scales is not None
    initializers = [
        _tensor("codes", TensorProto.FLOAT4E2M1, (12, 96), read.codes),
        _tensor("scales", TensorProto.FLOAT8E4M3FN, (12, 6), read.scales),
        _tensor("outer", TensorProto.FLOAT, (), read.outer),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["scales", "outer"], ["steps"]),
        helper.make_node("DequantizeLinear", ["codes", "steps"], ["values"], axis=-1, block_size=16),
    ]
    output = helper.make_tensor_value_info("values", TensorProto.FLOAT, (12, 96))
    graph = helper.make_graph(nodes, "weight", [], [output], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    onnx.checker.check_model(model)
    results: Any = ReferenceEvaluator(model).run(None, {})
    (values,) = results
    assert values.dtype == np.float32
    assert torch.equal(torch.from_numpy(values), read.dequantize(torch.float32))


def _tensor(name: str, kind: int, shape: tuple[int, ...], raw: Tensor) -> onnx.TensorProto:
    content = raw.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, kind, shape, content, raw=True)
