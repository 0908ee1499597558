"""What an artifact says of its formats: a row for each product and each attention's pages, and the quality of all."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.errors import OptionError
from octavo.compiler.observed import Observed
from octavo.compiler.precision import (
    EFFECTIVE_BITS,
    Format,
    PrecisionPlan,
    QuantizedWeight,
    WeightQuantizer,
)
from octavo.compiler.quality import Distribution, held_out, judge
from octavo.compiler.replay import Replacement, Replay, evaluate
from octavo.compiler.sensitivity import (
    Sensitivity,
    decibels,
    fake,
    look_at_calibration,
    module_of,
    scale_of,
    underflow,
    values_of,
)
from octavo.passes.balance_channels import Balance
from octavo.passes.products import Product, find_pages, find_products

CHUNK_ELEMENTS = 1 << 20


class Remembering:
    """A WeightQuantizer that makes the NVFP4 parts of a weight once: they are a seventh of an fp32 weight."""

    def __init__(self, quantizer: WeightQuantizer) -> None:
        self.quantizer = quantizer
        self.parts: dict[str, QuantizedWeight] = {}

    def __call__(self, name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        if format not in ("nvfp4", "nvfp4_weight_only"):
            return self.quantizer(name, weight, format)
        if name not in self.parts:
            self.parts[name] = self.quantizer(name, weight, format)
        return self.parts[name]


class PrecisionReport:
    """Made of a lowered graph before it is quantised, which happens in place; `finish` compares what became of it.

    plan  says all; rows  modes "auto": what was measured; None: inputs are looked at on the way, and weights when
    `quantizer`, which the passes are to use, makes them
    """

    def __init__(
        self, graph_module: GraphModule, observed: Observed | None, plan: PrecisionPlan,
        quantizer: WeightQuantizer, sequences: Sequence[Sequence[int]] | None, page_size: int,
        rows: Sequence[Sensitivity] | None = None, balance: Balance | None = None,
    ) -> None:  # fmt: skip
        self.products, self.pages = find_products(graph_module), find_pages(graph_module)
        self.plan, self.inner, self.page_size = plan, quantizer, page_size
        self.balance = balance or Balance()
        self.pieces = [] if sequences is None else held_out(sequences)
        known = {} if rows is None else {row.name: row for row in rows}
        self.rows = {one.name: known.get(one.name) or _row(one, observed) for one in self.products}
        self.weights = {
            weight: one.name for one in self.products for weight in one.weights if one.name not in known
        }
        self.sums: dict[str, tuple[float, float]] = {}
        self.reference: Distribution | None = None
        if self.pieces:
            replay = Replay(graph_module, self.pieces, page_size)
            looks = {one.nodes[0]: self._look(one) for one in self.products if one.name not in known}
            self.reference = Distribution(replay.again(None, looks))

    def _look(self, product: Product) -> Replacement:
        """The product itself, whose input is looked at in passing."""
        node, row, precision = product.nodes[0], self.rows[product.name], self.plan.products[product.name]

        def replacement(*args: Any) -> Tensor:
            if precision.format in ("nvfp4", "fp8"):
                x = self.balance.input(product.name, args[0])
                row.sqnr_input[precision.format] = decibels(
                    x, fake(x, precision.format, scale_of(precision.input_scale))
                )
                if precision.format == "nvfp4":
                    row.subnormal, row.lost = underflow(x, precision.input_scale)
            result: Tensor = evaluate(node, args)
            return result

        return replacement

    def quantizer(self, name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        """A WeightQuantizer that takes note of how much is lost."""
        parts = self.inner(name, weight, format)
        if name in self.weights:
            row = self.rows[self.weights[name]]
            signal, noise = self.sums.get(row.name, (0.0, 0.0))
            for exact, decoded in _by_rows(weight, parts):
                signal += float(exact.square().sum())
                noise += float((exact - decoded).square().sum())
            self.sums[row.name] = signal, noise
            row.sqnr_weight[format] = 10 * math.log10(signal / noise) if signal and noise else math.inf
        return parts

    def finish(self, graph_module: GraphModule, most_kl: float = 0.0) -> dict[str, Any]:
        """`precision` of report.json, of the quantised graph. Raises OptionError for a KL above `most_kl` (0: any)."""
        quality = None
        if self.reference is not None:
            quality = asdict(judge(self.reference, graph_module, self.pieces, self.page_size))
            if 0 < most_kl < quality["kl"]:
                raise OptionError(
                    f"kl: expected at most {most_kl:g} nats a token, got {quality['kl']:.3g}; ask for more"
                )
        rows = [self._as_json(one) for one in self.products]
        chosen = [row for row in rows if row["may_be_quantised"]]
        elements = sum(row["elements"] for row in chosen)
        bits = sum(row["elements"] * row["bits"] for row in chosen) / elements if elements else None
        pages = [{"pages": one.number, **asdict(self.plan.pages[one.number])} for one in self.pages]
        return {"products": rows, "pages": pages, "quality": quality, "bits": bits, "elements": elements}

    def _as_json(self, product: Product) -> dict[str, Any]:
        precision, row = self.plan.products[product.name], self.rows[product.name]
        values = asdict(row)
        formats = {
            format: {name: _finite(values[name][format]) for name in MAPPINGS if format in values[name]}
            for format in dict.fromkeys(format for name in MAPPINGS for format in values[name])
        }
        return {
            "name": product.name, "module": row.module, "format": precision.format,
            "bits": EFFECTIVE_BITS[precision.format], "elements": product.elements, "reason": precision.reason,
            "may_be_quantised": precision.format != "bf16" or bool(row.kl), "formats": formats,
            **{name: _finite(values[name]) for name in ("subnormal", "lost", "tail", "growth")},
        }  # fmt: skip


def _by_rows(weight: Tensor, parts: QuantizedWeight) -> Iterator[tuple[Tensor, Tensor]]:
    """A weight and what its parts stand for in fp32, a few rows at a time, so that no whole copy is held."""
    if weight.dim() == 3:
        for e, expert in enumerate(weight):
            scales = None if parts.scales is None else parts.scales[e]
            yield from _by_rows(expert, QuantizedWeight(parts.codes[e], scales, parts.outer[e]))
        return
    count = max(1, CHUNK_ELEMENTS // weight.shape[1])
    for start in range(0, weight.shape[0], count):
        rows = slice(start, start + count)
        scales = None if parts.scales is None else parts.scales[rows]
        outer = parts.outer[rows] if parts.outer.dim() else parts.outer
        yield weight[rows].float(), values_of(QuantizedWeight(parts.codes[rows], scales, outer))


MAPPINGS = ("kl", "sqnr_weight", "sqnr_input", "sqnr_output")


def _row(product: Product, observed: Observed | None) -> Sensitivity:
    row = Sensitivity(
        product.name, module_of(product), product.elements, product.nodes[0].all_input_nodes[0].name
    )
    if observed is not None:
        look_at_calibration(row, observed)
    return row


def _finite(value: float) -> float | None:
    """JSON has no nan and no infinity."""
    return value if math.isfinite(value) else None
