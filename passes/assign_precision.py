"""The format of every product and of every attention's pages: fills a PrecisionPlan, changes nothing in the graph.

What makes logits, selects experts, drafts, gates or keeps latents stays in the model's dtype unless asked for by name,
and so does what a format cannot hold. Static outer scales are what calibration saw, with head-room:
headroom * amax / (6 * 448) of NVFP4, headroom * amax / 448 of FP8 pages.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from octavo.compiler.errors import OptionError
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS, TILE_BLOCKS
from octavo.compiler.observed import Observed
from octavo.compiler.ops.quantize import LIMITS
from octavo.compiler.options import QuantConfig
from octavo.compiler.precision import (
    SMALLEST_MULTIPLIER,
    Format,
    PagePrecision,
    PrecisionPlan,
    ProductPrecision,
)
from octavo.passes.products import PAGES, Pages, Product, find_pages, find_products, matches
from octavo.passes.rule import PassReport

# Elements of a row, in the layout of tensor cores, whose scales lie in one word.
READ_TOGETHER = TILE_BLOCKS * BLOCK_ELEMENTS


@dataclass(frozen=True)
class Choice:
    """A format for one product, and why, in a few words."""

    format: Format
    reason: str


def assign_precision(
    graph_module: GraphModule, config: QuantConfig, observed: Observed | None, plan: PrecisionPlan,
    choices: Mapping[str, Choice] | None = None, layout: str = "linear",
) -> PassReport:  # fmt: skip
    """Fill `plan`, of products that it has no entry for yet.

    layout   of block scales, as the target's kernels read them
    choices  of the modes "auto": of every product that may be quantised (quantisable), by the name of its weight
    Raises OptionError for a glob that names nothing, a product asked for that its format cannot hold, and where
    calibration did not see what is needed.
    """
    report = PassReport("assign_precision")
    products, pages = find_products(graph_module), find_pages(graph_module)
    _check_globs(config, products, pages)
    for product in products:
        if product.name not in plan.products:
            plan.products[product.name] = _precision(product, config, observed, choices, layout)
        precision = plan.products[product.name]
        if precision.format == "bf16":
            report.reject(product.nodes[0], precision.reason)
    for one in pages:
        if one.number not in plan.pages:
            plan.pages[one.number] = _page_precision(one, config, observed)
        if config.kv != "bf16" and plan.pages[one.number].format == "bf16":
            report.reject(one.node, plan.pages[one.number].reason)
    formats = [plan.products[product.name].format for product in products]
    report.notes.update({name: formats.count(name) for name in dict.fromkeys(formats)})
    kept = [plan.pages[one.number].format for one in pages]
    report.notes.update({f"pages in {name}": kept.count(name) for name in dict.fromkeys(kept)})
    return report


def _check_globs(config: QuantConfig, products: Sequence[Product], pages: Sequence[Pages]) -> None:
    known = [product.modules for product in products] + [one.modules for one in pages]
    for option, globs in (("keep", config.keep), ("include", config.include)):
        for glob in globs:
            if not any(matches(modules, (glob,)) for modules in known):
                raise OptionError(
                    f"{option}: {glob!r} names no product's module and no pages (*.{PAGES}); expected a glob such as "
                    f"{' or '.join(repr(_module(product)) for product in products[:2]) or '*'}"
                )


def _module(product: Product) -> str:
    """The path of the innermost of its modules that comes first."""
    return min(name.rpartition(".")[0] for name in product.modules if name.count(".") == _depth(product))


def _depth(product: Product) -> int:
    return max(name.count(".") for name in product.modules)


def quantisable(graph_module: GraphModule, config: QuantConfig) -> list[Product]:
    """The products that the modes "auto" choose formats for."""
    return [product for product in find_products(graph_module) if not _why_kept(product, config)]


def _why_kept(product: Product, config: QuantConfig) -> str:
    kept = matches(product.modules, config.keep)
    if kept:
        return f"kept: named by {kept!r}"
    return product.high if product.high and not matches(product.modules, config.include) else ""


def holds(product: Product, format: Format, layout: str = "linear") -> str:
    """Why a format cannot hold the product's weights, or "". layout: of block scales, as kernels read them."""
    if format not in ("nvfp4", "nvfp4_weight_only"):
        return ""
    for length in product.lengths:
        if length % BLOCK_ELEMENTS:
            return f"rows of {length} elements are not whole blocks of {BLOCK_ELEMENTS}"
        # Experts whose inputs are not quantised are decoded as they are read, block by block.
        is_decoded = product.kind == "moe" and format == "nvfp4_weight_only"
        if layout != "linear" and not is_decoded and length % READ_TOGETHER:
            why = "whose scales GPU kernels read together"
            return f"rows of {length} elements are no multiple of {READ_TOGETHER}, {why}"
    return ""


def _precision(
    product: Product, config: QuantConfig, observed: Observed | None, choices: Mapping[str, Choice] | None, layout: str
) -> ProductPrecision:  # fmt: skip
    reason = _why_kept(product, config)
    if reason:
        return ProductPrecision("bf16", reason=reason)
    if config.mode == "auto" or config.mode == "auto_weight_only":
        choice = (choices or {}).get(product.name)
        if choice is None:
            raise OptionError(
                f"{config.mode}: expected a choice for {product.name}, got none; measure it first"
            )
    else:
        choice = Choice(config.mode, "stays as it is" if config.mode == "bf16" else f"mode {config.mode}")
    refusal = holds(product, choice.format, layout)
    if refusal and matches(product.modules, config.include):
        raise OptionError(f"include: {product.name} cannot be {choice.format}: {refusal}")
    if refusal:
        return ProductPrecision("bf16", reason=refusal)
    return precision_of(product, choice, config, observed)


def precision_of(
    product: Product, choice: Choice, config: QuantConfig, observed: Observed | None
) -> ProductPrecision:
    """The choice with the static scales that it takes. Raises OptionError where calibration did not see them."""
    if choice.format != "nvfp4" or config.activations == "by_token":
        return ProductPrecision(choice.format, reason=choice.reason)
    scales = [_scale(name, config, observed) for name in product.weights]
    seen = ", ".join(f"{scale * LIMITS['nvfp4'] / config.headroom:.4g}" for scale in scales)
    hidden = scales[1] if product.kind == "moe" else None
    reason = f"{choice.reason}; largest input {seen}, head-room {config.headroom:g}"
    return ProductPrecision("nvfp4", scales[0], hidden, reason)


def _scale(name: str, config: QuantConfig, observed: Observed | None) -> float:
    """Static outer scale of the input of a weight. An input of zeros has 1."""
    seen = None if observed is None else observed.products.get(name)
    if seen is None:
        raise OptionError(
            f"calibration: saw no input of {name}, which a static scale is made of; give calibration text or choose "
            'activations="by_token"'
        )
    return _outer(f"input of {name}", seen.amax, config.headroom, "nvfp4")


def _outer(what: str, amax: float, headroom: float, format: str) -> float:
    if not math.isfinite(amax) or amax < 0:
        raise OptionError(f"calibration: expected a finite largest magnitude of the {what}, got {amax}")
    return headroom * amax / LIMITS[format] if amax > 0 else 1.0


def _page_precision(pages: Pages, config: QuantConfig, observed: Observed | None) -> PagePrecision:
    if config.kv == "bf16":
        return PagePrecision("bf16", reason="pages are not quantised")
    refusal = _why_pages_stay(pages, config)
    if refusal:
        return PagePrecision("bf16", reason=refusal)
    seen = None if observed is None else observed.pages.get(pages.number)
    if seen is None:
        raise OptionError(
            f"calibration: saw no keys and values of the pages {pages.number}, which their multipliers are made of; "
            'give calibration text or choose kv="bf16"'
        )
    largest = (
        f"latent {seen.k_amax:.4g}"
        if pages.is_latent
        else f"key {seen.k_amax:.4g} and value {seen.v_amax:.4g}"
    )
    reason = f"largest {largest}, head-room {config.headroom:g}"
    multipliers = [
        max(
            _outer(f"{what} of the pages {pages.number}", amax, config.headroom, config.kv),
            SMALLEST_MULTIPLIER,
        )
        for what, amax in (("keys", seen.k_amax), ("values", seen.v_amax))
    ]
    return PagePrecision(config.kv, multipliers[0], multipliers[1], reason)


def _why_pages_stay(pages: Pages, config: QuantConfig) -> str:
    kept = matches(pages.modules, config.keep)
    if kept:
        return f"kept: named by {kept!r}"
    if config.kv != "nvfp4":
        return ""
    if pages.is_latent:
        return "a latent is the keys and values of all heads, too much for 4 bits"
    odd = [width for width in pages.widths if width % BLOCK_ELEMENTS]
    if odd:
        return f"heads of {odd[0]} elements are not whole blocks of {BLOCK_ELEMENTS}"
    return pages.high if not matches(pages.modules, config.include) else ""
