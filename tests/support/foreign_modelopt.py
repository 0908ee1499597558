"""A tiny Llama that ModelOpt calibrates, quantises and exports. Apart from foreign.py: its import takes seconds."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from foreign import quiet
from tiny_llama import VOCAB, build

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import modelopt.torch.quantization as modelopt_quantization
    from modelopt.torch.export import export_hf_checkpoint


def modelopt_llama(path: Path, name: str = "NVFP4_DEFAULT_CFG", pages: str | None = None) -> Path:
    """name, pages: configurations of modelopt.torch.quantization."""
    with quiet():
        model = build()
        model.config.architectures = ["LlamaForCausalLM"]
        config: Any = copy.deepcopy(getattr(modelopt_quantization, name))
        if pages is not None:
            kv = copy.deepcopy(getattr(modelopt_quantization, pages))
            config["quant_cfg"] = [*config["quant_cfg"], *kv["quant_cfg"]]
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, VOCAB, (2, 32), generator=generator)
        export_hf_checkpoint(modelopt_quantization.quantize(model, config, lambda m: m(ids)), export_dir=path)
    return path
