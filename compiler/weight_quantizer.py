"""The parts of quantised weights, made of a model's values as QuantConfig.weights says, by what calibration saw."""

from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.compiler.errors import OptionError
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS, E4M3_MAX, E4M3_MAX_SEARCHED, outer_scale, quantize
from octavo.compiler.nvfp4_weights import quantize_weight, quantize_weight_with_feedback, weight_outer_scale
from octavo.compiler.observed import Observed
from octavo.compiler.options import WeightMethod
from octavo.compiler.precision import Format, QuantizedWeight

# Elements at a time where a whole weight would be copied to fp32.
CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class MethodQuantizer:
    """A WeightQuantizer. It keeps no weight, so one is in memory at a time.

    method    of NVFP4: "nearest", "search" or "gptq"; FP8 has one scale for each row, that of its largest element
    observed  None: the search weighs all columns alike
    Raises OptionError naming a weight that is not finite, and one that "gptq" has no second moments for.
    """

    method: WeightMethod
    observed: Observed | None = None

    def __call__(self, name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        """name: of a weight (N, K), or of experts (E, N, K); format: not "bf16"."""
        weight = weight.detach()
        if weight.dim() == 2:
            return self._matrix(name, weight, format)
        experts = [self._matrix(f"{name}, expert {e}", one, format, name) for e, one in enumerate(weight)]
        first = experts[0]
        scales = [one.scales for one in experts if one.scales is not None]
        codes, outer = (
            torch.stack(parts) for parts in zip(*((e.codes, e.outer) for e in experts), strict=True)
        )
        return QuantizedWeight(
            codes,
            torch.stack(scales) if scales else None,
            outer,
            first.recipe,
            first.e4m3_max,
            first.rule,
            first.seen,
        )

    def _matrix(self, name: str, weight: Tensor, format: Format, product: str = "") -> QuantizedWeight:
        """product: what calibration knows it by, where that is not `name`."""
        if format == "fp8":
            return _fp8(name, weight)
        if weight.shape[1] % BLOCK_ELEMENTS:
            raise OptionError(
                f"nvfp4: expected rows of whole blocks of {BLOCK_ELEMENTS} elements, "
                f"got {name} of {tuple(weight.shape)}"
            )
        outer = weight_outer_scale(name, weight)
        if self.method == "nearest":
            outer = outer_scale(largest(weight), E4M3_MAX)
            parts = [quantize(rows, outer) for rows in _chunks(weight)]
            codes, scales = torch.cat([c for c, _ in parts]), torch.cat([s for _, s in parts])
            return QuantizedWeight(codes, scales, outer, e4m3_max=E4M3_MAX, rule="nearest")
        if self.method == "gptq":
            moments = self._moments(product or name, name)
            codes, scales = quantize_weight_with_feedback(weight, outer, moments)
            return QuantizedWeight(
                codes, scales, outer, e4m3_max=E4M3_MAX_SEARCHED, rule="feedback", seen=moments
            )
        importance = self._importance(product or name)
        codes, scales = quantize_weight(weight, outer, importance)
        return QuantizedWeight(
            codes, scales, outer, e4m3_max=E4M3_MAX_SEARCHED, rule="search", seen=importance
        )

    def _moments(self, product: str, name: str) -> Tensor:
        seen = None if self.observed is None else self.observed.products.get(product)
        if seen is None or seen.moments is None:
            raise OptionError(
                f'weights="gptq": calibration saw no input of {name}, which its errors are weighed by; give more '
                'calibration text, or choose weights="search"'
            )
        return seen.moments

    def _importance(self, product: str) -> Tensor | None:
        """Second moments (K,). A column that was never used counts as of the mean: elsewhere it may be."""
        seen = None if self.observed is None else self.observed.products.get(product)
        if seen is None:
            return None
        moments = seen.second_moments
        return torch.where(moments == 0, moments.mean(), moments)


def largest(weight: Tensor) -> Tensor:
    """The largest magnitude, without a copy of the weight."""
    low, high = weight.aminmax()
    return torch.maximum(-low, high)


def _fp8(name: str, weight: Tensor) -> QuantizedWeight:
    """E4M3 codes (N, K) and an outer scale for each row (N,); 1 for a row of zeros."""
    low, high = weight.aminmax(dim=1)
    amax = torch.maximum(-low, high).float()
    if not bool(amax.isfinite().all()):
        rows = int((~amax.isfinite()).sum())
        raise OptionError(
            f"fp8: {name} holds elements that are not finite, in {rows} of {weight.shape[0]} rows; mend the checkpoint "
            "or leave this weight in bf16"
        )
    outer = torch.where(amax == 0, torch.ones_like(amax), amax / E4M3_MAX)
    codes = []
    for part, scale in zip(_chunks(weight), outer.split(_chunk_rows(weight)), strict=True):
        scaled = part.float() / scale[:, None]
        codes.append(scaled.clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn))
    return QuantizedWeight(torch.cat(codes), None, outer)


def _chunks(weight: Tensor) -> tuple[Tensor, ...]:
    parts: tuple[Tensor, ...] = weight.split(_chunk_rows(weight))
    return parts


def _chunk_rows(weight: Tensor) -> int:
    return max(1, CHUNK_ELEMENTS // weight.shape[1])
