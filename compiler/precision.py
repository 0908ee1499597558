"""What is quantised into which format: decided once, carried to the passes, recorded in the artifact."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from torch import Tensor

from octavo.compiler.errors import OptionError
from octavo.compiler.nvfp4 import E4M3_MAX_SEARCHED, RECIPE
from octavo.compiler.options import PageFormat
from octavo.compiler.types import FP8, NVFP4

Format = Literal["nvfp4", "nvfp4_weight_only", "fp8", "bf16"]
WeightRule = Literal["nearest", "search", "feedback", "given"]
# Of pages: below it a quotient by a multiplier may overflow on the way.
SMALLEST_MULTIPLIER = 2.0**-80
# Bits that an element of a weight takes, its scales included.
EFFECTIVE_BITS: dict[str, float] = {"nvfp4": 4.5, "nvfp4_weight_only": 4.5, "fp8": 8.0, "bf16": 16.0}


@dataclass(frozen=True)
class ProductPrecision:
    """Of one weight, and of what it is multiplied with. "bf16" stands for the model's own dtype.

    input_scale   outer scale of x (decode form), calibrated; None: each row has its own
    hidden_scale  experts only: of what the activation makes
    reason        one line of the report
    """

    format: Format
    input_scale: float | None = None
    hidden_scale: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class PagePrecision:
    """Of the pages of one attention. The multipliers are the outer scales of keys and values, stored, never derived."""

    format: PageFormat
    k_multiplier: float = 1.0
    v_multiplier: float = 1.0
    reason: str = ""


@dataclass
class PrecisionPlan:
    """products: by the name of the weight (of experts: that of gate and up); pages: by the number of the cache."""

    products: dict[str, ProductPrecision] = field(default_factory=dict)
    pages: dict[int, PagePrecision] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """As JSON holds it, where every key is text: keys sort alike before and after, as a manifest's must."""
        plan = asdict(self)
        return {**plan, "pages": {str(number): facts for number, facts in plan["pages"].items()}}


@dataclass(frozen=True)
class QuantizedWeight:
    """codes (N, K / 2) u8 or (N, K) E4M3; scales (N, K / 16) E4M3, linear, or None; outer fp32, () or (N,).

    Weights of experts have a leading axis E on all of them.
    recipe, e4m3_max  of NVFP4: by whose rules, and the largest block scale that outer was made for
    rule    what a proof may ask of the codes (compiler/verify_quantized.py): "nearest": scales carry each block's
            largest element; "search": scales near those, codes to nearest; "feedback": GPTQ; "given": foreign bytes
    seen    of the input's columns: what the search weighed errors by, (K,), or the second moments of feedback, (K, K)
    """

    codes: Tensor
    scales: Tensor | None
    outer: Tensor
    recipe: str = RECIPE
    e4m3_max: float = E4M3_MAX_SEARCHED
    rule: WeightRule = "search"
    seen: Tensor | None = None


def weight_type(quantized: QuantizedWeight, layout: Any, by_row: bool) -> FP8 | NVFP4:
    """layout: of the scales, as kernels read them; by_row: whether alpha has a number for each row."""
    outer: Literal["row", "tensor"] = "row" if by_row else "tensor"
    *leading, width = quantized.codes.shape
    if quantized.scales is None:
        return FP8((*leading, width), outer)
    return NVFP4((*leading, 2 * width), quantized.recipe, quantized.e4m3_max, layout, outer=outer)


# (name, weight, format) -> its parts; name is that in the graph.
WeightQuantizer = Callable[[str, Tensor, Format], QuantizedWeight]


def plan_to_json(plan: PrecisionPlan) -> bytes:
    return (json.dumps(plan.as_dict(), indent=1) + "\n").encode()


def plan_from_json(text: str, where: str) -> PrecisionPlan:
    """Raises OptionError, naming the file, for a text that `plan_to_json` did not write."""
    try:
        data = json.loads(text)
        products = {str(name): ProductPrecision(**facts) for name, facts in data["products"].items()}
        pages = {int(number): PagePrecision(**facts) for number, facts in data["pages"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(
            f"{where}: expected the plan of a dump, got: {error}; dump the model again"
        ) from None
    formats = [("products", p.format, get_args(Format)) for p in products.values()]
    formats += [("pages", p.format, get_args(PageFormat)) for p in pages.values()]
    for kind, format, known in formats:
        if format not in known:
            raise OptionError(f"{where}: {kind}: expected a format of {', '.join(known)}, got {format!r}")
    return PrecisionPlan(products, pages)
