"""What each product of a lowered graph would lose in NVFP4 and in FP8: measured, on a few calibration tokens.

Its weight and its input are in NVFP4 by mode "auto", its weight alone by "auto_weight_only".

For every product: the ratio of signal to quantisation noise of its weight, its input and its result; the share of
blocks of the input whose scale is subnormal or lost; how far the blocks' magnitudes spread; how much larger the inputs
of held-out tokens are; and the mean KL divergence of the logits from the model's own when this product alone is
quantised. That of NVFP4 is measured, by running the graph again from the product on; that of FP8 is estimated: KL is of
second order in a small error, so it goes by the ratio of the squared errors of the product's result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler import nvfp4
from octavo.compiler.calibration import HELD_OUT_PART
from octavo.compiler.observed import Observed
from octavo.compiler.ops.quantize import outer_scales, quantize
from octavo.compiler.ops.quantized_moe import Mix
from octavo.compiler.ops.quantized_moe import Product as Half
from octavo.compiler.options import Mode, QuantConfig
from octavo.compiler.pipeline import Progress
from octavo.compiler.precision import Format, ProductPrecision, QuantizedWeight, WeightQuantizer
from octavo.compiler.quality import Distribution
from octavo.compiler.replay import Replacement, Replay, evaluate
from octavo.passes.assign_precision import Choice, holds, precision_of, quantisable
from octavo.passes.products import Product
from octavo.passes.rewrite import held

# Tokens that products are measured on, and of each sequence. From a product on, they cost half of a step on average.
PROBE_TOKENS, PROBE_LENGTH = 192, 96
# Scaled magnitudes of blocks: E4M3 scales below the first are subnormal, below the second they round to nothing.
SUBNORMAL, LOST = 2.0**-6, 2.0**-10
FORMATS: dict[Mode, tuple[Format, ...]] = {
    "auto": ("nvfp4", "fp8"),
    "auto_weight_only": ("nvfp4_weight_only", "fp8"),
}


@dataclass
class Sensitivity:
    """Of one product. Mappings are by format, ratios in dB (inf: exact).

    input   the node that it reads, by name: products of one input share a format
    kl      nats a token, of this product alone
    subnormal, lost  shares of the input's blocks that are not zero
    tail    largest magnitude of the input over that which 1 % of its blocks stay below; inf: those are zero
    growth  largest magnitude on held-out tokens over that on the others; nan where none were seen
    """

    name: str
    module: str
    elements: int
    input: str
    sqnr_weight: dict[Format, float] = field(default_factory=dict)
    sqnr_input: dict[Format, float] = field(default_factory=dict)
    sqnr_output: dict[Format, float] = field(default_factory=dict)
    kl: dict[Format, float] = field(default_factory=dict)
    subnormal: float = 0.0
    lost: float = 0.0
    tail: float = math.nan
    growth: float = math.nan


def measure(
    graph_module: GraphModule, config: QuantConfig, observed: Observed, quantizer: WeightQuantizer,
    sequences: Sequence[Sequence[int]], page_size: int, progress: Progress | None = None,
) -> list[Sensitivity]:  # fmt: skip
    """Of every product that may be quantised, in the order of the graph.

    sequences  those of calibration; PROBE_TOKENS of them are run
    Raises OptionError for products that calibration did not see.
    """
    products = quantisable(graph_module, config)
    replay = Replay(
        graph_module, probe(sequences), page_size, [node for product in products for node in product.nodes]
    )
    if progress is not None:
        progress("the model itself", 0, len(products) + 1)
    reference = Distribution(replay.reference())
    rows: list[Sensitivity] = []
    # The last first: runs from later products leave the pages that earlier ones read as they are (replay.py).
    for done, product in enumerate(reversed(products), 1):
        if progress is not None:
            progress(product.name, done, len(products) + 1)
        rows.append(_measure(graph_module, product, config, observed, quantizer, replay, reference))
    return rows[::-1]


def probe(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """PROBE_TOKENS in pieces of PROBE_LENGTH, from sequences that lie evenly among those that are not held out."""
    tokens, kept = sum(map(len, sequences)), 0
    pieces: list[list[int]] = []
    for sequence in sequences:
        room = tokens - tokens // HELD_OUT_PART - kept
        kept += len(sequence)
        pieces += [
            list(sequence[start : start + PROBE_LENGTH])
            for start in range(0, min(len(sequence), room), PROBE_LENGTH)
        ]
    whole = [piece for piece in pieces if len(piece) == PROBE_LENGTH] or pieces
    count = min(PROBE_TOKENS // PROBE_LENGTH, len(whole))
    return [whole[i * len(whole) // count] for i in range(count)]


def _measure(
    graph_module: GraphModule, product: Product, config: QuantConfig, observed: Observed, quantizer: WeightQuantizer,
    replay: Replay, reference: Distribution,
) -> Sensitivity:  # fmt: skip
    node = product.nodes[0]
    x, *rest = replay.arguments(node)
    row = Sensitivity(product.name, module_of(product), product.elements, node.all_input_nodes[0].name)
    exact = evaluate(node, (x, *rest)).double()
    errors: dict[Format, float] = {}
    formats: list[Format] = [one for one in FORMATS[config.mode] if not holds(product, one)]
    for format in formats:
        precision = precision_of(product, Choice(format, ""), config, observed)
        row.sqnr_weight[format], replacement = _replacement(graph_module, product, precision, quantizer)
        row.sqnr_input[format] = decibels(x, fake(x, format, scale_of(precision.input_scale)))
        result = replacement(x, *rest)
        errors[format] = float((result.double() - exact).square().sum())
        row.sqnr_output[format] = decibels(exact, result)
        if not row.kl:
            replaced = {**dict.fromkeys(product.nodes, replacement), node: lambda *_, made=result: made}
            row.kl[format] = float(reference.kl(replay.again(node, replaced)).mean())
        else:
            first = next(iter(row.kl))
            row.kl[format] = row.kl[first] * (errors[format] / errors[first] if errors[first] else 0.0)
        if format == "nvfp4":
            row.subnormal, row.lost = underflow(x, precision.input_scale)
    look_at_calibration(row, observed)
    return row


def module_of(product: Product) -> str:
    """The modules that hold the product's weights, as one path: `layers.0.mlp.gate_proj+up_proj`."""
    modules = list(dict.fromkeys(source.rpartition(".")[0] or source for source in product.sources))
    around = modules[0].rpartition(".")[0]
    if len(modules) > 1 and all(module.rpartition(".")[0] == around for module in modules):
        return f"{around}.{'+'.join(module.rpartition('.')[2] for module in modules)}".lstrip(".")
    return "+".join(modules)


def _replacement(
    graph_module: GraphModule, product: Product, precision: ProductPrecision, quantizer: WeightQuantizer
) -> tuple[float, Replacement]:
    """dB of the weights together, and what the product is with them."""
    exact = [held(graph_module, name) for name in product.weights]
    parts = [
        quantizer(name, weight, precision.format) for name, weight in zip(product.weights, exact, strict=True)
    ]
    values = [values_of(one) for one in parts]
    signal = sum(float(weight.float().square().sum()) for weight in exact)
    noise = sum(float((w.float() - v).square().sum()) for w, v in zip(exact, values, strict=True))
    return _ratio(signal, noise), replacement_of(product, precision, values)


def replacement_of(product: Product, precision: ProductPrecision, values: Sequence[Tensor]) -> Replacement:
    """The product with quantised inputs. values: fp32, what its quantised weights stand for."""
    format = precision.format

    def linear(x: Tensor, _: Tensor, bias: Tensor | None = None) -> Tensor:
        given = fake(x, format, scale_of(precision.input_scale))
        wide = torch.nn.functional.linear(given, values[0], None if bias is None else bias.float())
        return wide.to(x.dtype)

    def moe(
        x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, gate_up_bias: Tensor | None, down: Tensor,
        down_bias: Tensor | None, activation: str, limit: float, alpha: float,
    ) -> Tensor:  # fmt: skip
        ones = torch.ones(len(gate_up), 1)
        hidden = scale_of(precision.hidden_scale)
        mix = Mix(
            Half(lambda e: values[0][e], ones, gate_up_bias, scale_of(precision.input_scale)),
            Half(
                lambda e: values[1][e], ones, down_bias, None if hidden is None else hidden.expand(len(down))
            ),
            lambda rows, outer: (fake(rows, format, outer), None),
        )
        return mix(x, experts, weights, activation, limit, alpha)

    return moe if product.kind == "moe" else linear


def scale_of(value: float | None) -> Tensor | None:
    return None if value is None else torch.tensor(value, dtype=torch.float32)


def values_of(parts: QuantizedWeight) -> Tensor:
    """fp32 (..., K): what a quantised weight stands for."""
    outer = parts.outer.reshape(parts.outer.shape + (1,) * (parts.codes.dim() - parts.outer.dim()))
    if parts.scales is None:
        return parts.codes.float() * outer
    return nvfp4.dequantize(parts.codes, parts.scales, outer)


def fake(x: Tensor, format: Format, outer: Tensor | None) -> Tensor:
    """fp32: what x stands for once it is quantised. outer None: each row has its own."""
    if format in ("bf16", "nvfp4_weight_only"):
        return x.float()
    codes, *scales = quantize(x, outer, format)
    step = scales.pop() if outer is None else outer
    return nvfp4.dequantize(codes, scales[0], step) if format == "nvfp4" else codes.float() * step


def decibels(exact: Tensor, other: Tensor) -> float:
    signal, noise = exact.double().square().sum(), (exact.double() - other.double()).square().sum()
    return _ratio(float(signal), float(noise))


def _ratio(signal: float, noise: float) -> float:
    return 10 * math.log10(signal / noise) if noise and signal else math.inf


def underflow(x: Tensor, scale: float | None) -> tuple[float, float]:
    """Shares of the blocks that are not zero whose scale would be subnormal, and of those that would be lost."""
    step = outer_scales(x, "nvfp4").unsqueeze(-1) if scale is None else torch.tensor(scale)
    blocks = x.float().abs().unflatten(-1, (-1, nvfp4.BLOCK_ELEMENTS)).amax(-1, keepdim=True)
    scaled = (blocks / nvfp4.E2M1_MAX / step)[blocks > 0]
    if not scaled.numel():
        return 0.0, 0.0
    return float((scaled < SUBNORMAL).double().mean()), float((scaled < LOST).double().mean())


def look_at_calibration(row: Sensitivity, observed: Observed) -> None:
    """Fill in spread and growth of the input."""
    seen = observed.products.get(row.name)
    if seen is None or not seen.amax:
        return
    row.tail = seen.amax / seen.block_amax[0] if seen.block_amax[0] else math.inf
    row.growth = seen.held_out_amax / seen.amax if seen.held_out_amax else math.nan
