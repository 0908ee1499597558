"""A tiny Llama as other tools quantise and write it, with their own code, and as our rules read their bytes."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tiny_llama import build
from torch import Tensor

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

INPUT_SCALES = {"qkv": 0.011, "o_proj": 0.007, "gate_up": 0.009, "down_proj": 0.02}


def input_scale(module: str) -> float:
    """A made-up decode-form scale of a module's inputs; modules of one input share theirs."""
    last = module.rpartition(".")[2]
    family = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
    return INPUT_SCALES[family.get(last, last)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the bars and warnings of others."""
    with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def compressed_tensors_llama(path: Path, preset: str = "NVFP4", dtype: torch.dtype = torch.float32) -> Path:
    """Written by compressed-tensors as a whole: scales, packing, configuration. preset: NVFP4, NVFP4A16, FP8, ..."""
    with quiet():
        plain: Any = build()
        model: Any = plain.to(dtype)
        groups: Any = {"group_0": preset_name_to_scheme(preset, ["Linear"])}
        apply_quantization_config(model, QuantizationConfig(config_groups=groups, ignore=["lm_head"]))
        for name, module in model.named_modules():
            if hasattr(module, "weight_scale"):
                _set_scales(name, module)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(path)
        compressor.update_config(str(path))
    return path


def _set_scales(name: str, module: Any) -> None:
    weight, arguments = module.weight.data, module.quantization_scheme.weights
    outer = None
    if hasattr(module, "weight_global_scale"):
        outer = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(outer)
        blocks = weight.unflatten(-1, (-1, 16))
    else:
        blocks = weight if arguments.strategy == "channel" else weight.reshape(1, -1)
    scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), arguments, global_scale=outer)
    module.weight_scale.data.copy_(scale.reshape(module.weight_scale.shape))
    for end, value in (("input_global_scale", 1 / input_scale(name)), ("input_scale", input_scale(name))):
        if hasattr(module, end):
            getattr(module, end).data.fill_(value)


def float_weights() -> dict[str, Tensor]:
    """The weights that were quantised, by the name of their module."""
    return {
        name: module.weight.data
        for name, module in build().named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
