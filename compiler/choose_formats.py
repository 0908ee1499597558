"""Modes "auto": formats within a budget of bits or of KL, from what measuring each product alone has shown.

Every product starts in the smallest format that holds it, and is raised where that saves most KL a bit, until the bits
are spent or the KL, which adds up over products nearly enough, is within the budget. Then the KL of all together is
measured on held-out tokens; where it is above what was asked for, the budget is tightened and more products are raised.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler import nvfp4
from octavo.compiler.dims import cache_number, caches_of
from octavo.compiler.errors import OptionError
from octavo.compiler.observed import Observed
from octavo.compiler.ops.paging import scaled_rows
from octavo.compiler.options import QuantConfig
from octavo.compiler.pipeline import Progress
from octavo.compiler.precision import (
    EFFECTIVE_BITS,
    Format,
    PagePrecision,
    PrecisionPlan,
    WeightQuantizer,
)
from octavo.compiler.quality import Distribution, held_out
from octavo.compiler.replay import Replacement, Replay, evaluate
from octavo.compiler.sensitivity import Sensitivity, measure, replacement_of, values_of
from octavo.passes.assign_precision import Choice, assign_precision
from octavo.passes.products import Product, find_products
from octavo.passes.rewrite import held

octavo = torch.ops.octavo
WRITES = (octavo.kv_write.default, octavo.rope_kv_write.default, octavo.latent_write.default)
# A measured KL above the budget: the next try asks for this share of what would be enough if KL just added up.
TIGHTER, MOST_TRIES = 0.85, 8
# Of the budget: sums of the passes' own graph are in another order.
NEARLY = 0.99


@dataclass(frozen=True)
class Chosen:
    """bits: of a weight's element, on average over the products that may be quantised.

    tries  with a budget of KL: what was measured of all products together, try by try; the last one holds
    """

    choices: dict[str, Choice]
    rows: list[Sensitivity]
    bits: float
    tries: tuple[float, ...] = ()


def choose_formats(
    graph_module: GraphModule, config: QuantConfig, observed: Observed, quantizer: WeightQuantizer,
    sequences: Sequence[Sequence[int]], page_size: int, progress: Progress | None = None,
) -> Chosen:  # fmt: skip
    """Measure every product of a lowered graph, and choose. The graph stays as it is.

    quantizer  is asked for a weight several times; it may as well remember
    sequences  those of calibration
    Raises OptionError for a budget that cannot be kept, saying what can.
    """
    rows = measure(graph_module, config, observed, quantizer, sequences, page_size, progress)
    if not config.kl:
        return _chosen(rows, within_bits(rows, config.bits))
    trial = _Trial(graph_module, config, observed, quantizer, held_out(sequences), page_size)
    budget = config.kl
    tries: list[float] = []
    formats: dict[str, Format] = {}
    while len(tries) < MOST_TRIES:
        formats = within_kl(rows, budget)
        tries.append(trial.kl(_choices(rows, formats)))
        if tries[-1] <= NEARLY * config.kl:
            return _chosen(rows, formats, tries)
        if set(formats.values()) == {"bf16"}:
            break
        expected = sum(row.kl.get(formats[row.name], 0.0) for row in rows)
        budget = expected * TIGHTER * config.kl / tries[-1]
    raise OptionError(
        f"kl: expected at most {config.kl:g} nats a token, got {tries[-1]:.3g} with {average_bits(rows, formats):.2f} "
        f"bits after {len(tries)} tries; ask for more" + (', or for kv="bf16"' if config.kv != "bf16" else "")
    )


def _chosen(rows: list[Sensitivity], formats: Mapping[str, Format], tries: Sequence[float] = ()) -> Chosen:
    return Chosen(_choices(rows, formats), rows, average_bits(rows, formats), tuple(tries))


def _choices(rows: Sequence[Sensitivity], formats: Mapping[str, Format]) -> dict[str, Choice]:
    return {row.name: Choice(formats[row.name], _reason(row)) for row in rows}


def _reason(row: Sensitivity) -> str:
    return "auto: alone costs " + ", ".join(f"{kl:.2g} nats as {format}" for format, kl in row.kl.items())


def average_bits(rows: Sequence[Sensitivity], formats: Mapping[str, Format]) -> float:
    elements = sum(row.elements for row in rows)
    bits = sum(row.elements * EFFECTIVE_BITS[formats[row.name]] for row in rows)
    return bits / elements if elements else 0.0


@dataclass(frozen=True)
class _Raise:
    """One group of products, from a format to the next that pays: its bits more, the KL less."""

    group: int
    format: Format
    bits: float
    saved: float


def _groups(rows: Sequence[Sensitivity]) -> list[list[Sensitivity]]:
    """Products of one input share a format: it is quantised once."""
    groups: dict[str, list[Sensitivity]] = {}
    for row in rows:
        groups.setdefault(row.input, []).append(row)
    return list(groups.values())


def _options(group: Sequence[Sensitivity]) -> list[tuple[float, float, Format]]:
    """(bits, KL, format) of the formats that hold all of the group, by bits, bf16 last."""
    elements = sum(row.elements for row in group)
    formats: list[Format] = [format for format in group[0].kl if all(format in row.kl for row in group)]
    found: list[tuple[float, float, Format]] = [
        (elements * EFFECTIVE_BITS[format], sum(row.kl[format] for row in group), format)
        for format in formats
    ]
    return [*sorted(found), (elements * EFFECTIVE_BITS["bf16"], 0.0, "bf16")]


def _raises(index: int, options: Sequence[tuple[float, float, Format]]) -> list[_Raise]:
    """From the first option on, each time the raise that saves most a bit: what is saved a bit then falls."""
    found: list[_Raise] = []
    bits, kl, _ = options[0]
    rest = list(options[1:])
    while rest:
        best = max(range(len(rest)), key=lambda i: ((kl - rest[i][1]) / (rest[i][0] - bits), i))
        more, less, format = rest[best]
        found.append(_Raise(index, format, more - bits, kl - less))
        bits, kl, rest = more, less, rest[best + 1 :]
    return found


def _in_order(groups: Sequence[Sequence[Sensitivity]]) -> tuple[dict[int, Format], list[_Raise]]:
    """The formats to start with, and all raises, the best first; of equal ones the earlier product's."""
    options = [_options(group) for group in groups]
    raises = [one for index, given in enumerate(options) for one in _raises(index, given)]
    raises.sort(key=lambda one: -one.saved / one.bits)  # stable
    return {index: given[0][2] for index, given in enumerate(options)}, raises


def within_bits(rows: Sequence[Sensitivity], bits: float) -> dict[str, Format]:
    """By the name of the weight. Raises OptionError where `bits` are too few."""
    groups = _groups(rows)
    formats, raises = _in_order(groups)
    room = sum(row.elements for row in rows) * bits - sum(_options(group)[0][0] for group in groups)
    if room < 0:
        least = average_bits(rows, _spread(groups, formats))
        raise OptionError(f"bits: expected at least {least:.2f}, the least of these products, got {bits:g}")
    full: set[int] = set()
    for one in raises:
        if one.bits > room:
            full.add(one.group)
        if one.group not in full:
            formats[one.group] = one.format
            room -= one.bits
    return _spread(groups, formats)


def within_kl(rows: Sequence[Sensitivity], kl: float) -> dict[str, Format]:
    """The fewest bits, nearly, whose KL adds up to at most `kl`."""
    groups = _groups(rows)
    formats, raises = _in_order(groups)
    left = sum(_options(group)[0][1] for group in groups)
    for one in raises:
        if left <= kl:
            break
        formats[one.group] = one.format
        left -= one.saved
    return _spread(groups, formats)


def _spread(groups: Sequence[Sequence[Sensitivity]], formats: Mapping[int, Format]) -> dict[str, Format]:
    return {row.name: formats[index] for index, group in enumerate(groups) for row in group}


class _Trial:
    """Runs the graph with all products and pages in their formats, as the passes will make it."""

    def __init__(
        self, graph_module: GraphModule, config: QuantConfig, observed: Observed, quantizer: WeightQuantizer,
        pieces: Sequence[Sequence[int]], page_size: int,
    ) -> None:  # fmt: skip
        self.graph_module, self.config, self.observed = graph_module, config, observed
        self.quantizer = quantizer
        self.replay = Replay(graph_module, pieces, page_size)
        self.reference = Distribution(self.replay.reference())

    def kl(self, choices: Mapping[str, Choice]) -> float:
        plan = PrecisionPlan()
        assign_precision(self.graph_module, self.config, self.observed, plan, choices)
        replaced: dict[Node, Replacement] = {}
        for product in find_products(self.graph_module):
            if plan.products[product.name].format != "bf16":
                replaced |= dict.fromkeys(product.nodes, self._product(product, plan))
        for node in self.replay.nodes:
            if node.target in WRITES:
                caches = caches_of(node)
                pages = plan.pages[cache_number(caches[0])]
                if pages.format != "bf16":
                    replaced[node] = _write(node, [self.replay.constants[n] for n in caches], pages)
        return self.reference.compare(self.replay.again(None, replaced)).kl

    def _product(self, product: Product, plan: PrecisionPlan) -> Replacement:
        """Weights are decoded when the product's turn comes, and go with it."""
        precision = plan.products[product.name]

        def replacement(*args: Any) -> Tensor:
            weights = [held(self.graph_module, name) for name in product.weights]
            parts = [
                self.quantizer(name, weight, precision.format)
                for name, weight in zip(product.weights, weights, strict=True)
            ]
            return replacement_of(product, precision, [values_of(one) for one in parts])(*args)

        return replacement


def _write(node: Node, caches: Sequence[Tensor], pages: PagePrecision) -> Replacement:
    """The write, and then what quantised pages would hold in place of what it wrote."""

    def replacement(*args: Any) -> Any:
        result = evaluate(node, args)
        for cache, multiplier in zip(caches, (pages.k_multiplier, pages.v_multiplier), strict=False):
            outer = torch.tensor(multiplier, dtype=torch.float32)
            if pages.format == "fp8":
                cache.copy_(scaled_rows(cache, outer).to(torch.float8_e4m3fn).float() * outer)
            else:
                cache.copy_(nvfp4.dequantize(*nvfp4.quantize(cache, outer), outer))
        return result

    return replacement
