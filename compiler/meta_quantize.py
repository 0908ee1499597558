"""Quantise a lowered graph whose weights have no values: their parts have shapes and dtypes, and no values either."""

import torch
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.nvfp4 import BLOCK_ELEMENTS
from octavo.compiler.observed import Observed, ObservedInput, ObservedPages
from octavo.compiler.options import QuantConfig
from octavo.compiler.precision import Format, PrecisionPlan, QuantizedWeight
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.passes.products import find_pages, find_products
from octavo.passes.rule import PassReport

META = torch.device("meta")


def quantize_meta(graph_module: GraphModule, config: QuantConfig, layout: str) -> list[PassReport]:
    """The passes of QUANTIZE, in place. What calibration would see is made up, as no shape depends on it.

    layout  of block scales, "linear" or "swizzled_128x4"
    config  none of the modes "auto", which choose by values
    Nothing is proven.
    """
    settings = QuantSettings(
        PrecisionPlan(), without_values, layout, config=config, observed=_made_up(graph_module), prove=None
    )
    with META:
        return quantize(graph_module, settings)


def without_values(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
    """Parts as MethodQuantizer makes them: an outer scale for each matrix of NVFP4, for each row of FP8."""
    *leading, rows, length = weight.shape
    if format == "fp8":
        return QuantizedWeight(
            _empty((*leading, rows, length), torch.float8_e4m3fn), None, _empty((*leading, rows))
        )
    return QuantizedWeight(
        _empty((*leading, rows, length // 2), torch.uint8),
        _empty((*leading, rows, length // BLOCK_ELEMENTS), torch.float8_e4m3fn),
        _empty(tuple(leading)),
    )


def _empty(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def _made_up(graph_module: GraphModule) -> Observed:
    names = [name for product in find_products(graph_module) for name in product.weights]
    seen = ObservedInput(rows=1, amax=1.0, block_amax=(1.0, 1.0, 1.0), second_moments=torch.ones(1))
    pages = {one.number: ObservedPages(1.0, 1.0) for one in find_pages(graph_module)}
    return Observed(dict.fromkeys(names, seen), pages, tokens=1)
