"""Tiny lowered models that may be changed, what calibration sees of them, and a plain quantiser of weights."""

from functools import cache

import torch
from stages import SETTINGS, captured, copied
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler import nvfp4
from octavo.compiler.calibration import calibrate
from octavo.compiler.observed import Observed
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import lower
from octavo.compiler.precision import Format, QuantizedWeight
from octavo.passes.rewrite import recipes


@cache
def _lowered(name: str) -> GraphModule:
    return lower(captured(name), CompileOptions(verify="off"), SETTINGS).graph_module


def lowered(name: str = "llama") -> GraphModule:
    """A graph of one's own, which knows what its weights are made of."""
    graph_module = copied(_lowered(name))
    graph_module.meta["recipes"] = dict(recipes(_lowered(name)))
    return graph_module


def sequences(vocab: int = 96) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab, (5, 40), generator=generator).tolist()


def quantizer(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
    if format == "fp8":
        outer = weight.abs().amax(-1) / 448
        return QuantizedWeight((weight / outer[..., None]).to(torch.float8_e4m3fn), None, outer)
    if weight.dim() == 3:
        parts = [quantizer(name, one, format) for one in weight]
        return QuantizedWeight(
            torch.stack([one.codes for one in parts]),
            torch.stack([one.scales for one in parts if one.scales is not None]),
            torch.stack([one.outer for one in parts]),
        )
    outer = nvfp4.outer_scale(weight.abs().amax())
    return QuantizedWeight(*nvfp4.quantize(weight, outer), outer)


@cache
def observed(name: str = "llama") -> Observed:
    return calibrate(lowered(name), sequences(), SETTINGS.page_size)
