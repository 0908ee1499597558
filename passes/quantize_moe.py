"""octavo.moe  ->  a mixture of experts with quantised weights, which quantises what its products read.

What a plan says of gate and up is done to both products. Kernels that read swizzled scales activate what their first
product sums: they want the rows of gates and ups in turn.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler.errors import OptionError
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS, swizzle
from octavo.compiler.origin import where
from octavo.compiler.precision import (
    PrecisionPlan,
    ProductPrecision,
    QuantizedWeight,
    WeightQuantizer,
    weight_type,
)
from octavo.compiler.types import Part, Role
from octavo.passes.pattern import arguments
from octavo.passes.products import planned
from octavo.passes.rewrite import Builder, Site, held, new_weight, release, replace
from octavo.passes.rule import PassReport, Prove

octavo = torch.ops.octavo
OPS = {
    "nvfp4": octavo.nvfp4_moe.default,
    "nvfp4_weight_only": octavo.nvfp4_weight_moe.default,
    "fp8": octavo.fp8_moe.default,
}


def quantize_moe(
    graph_module: GraphModule, plan: PrecisionPlan, quantizer: WeightQuantizer, layout: str = "linear",
    progress: Callable[[str, int, int], None] | None = None, prove: Prove | None = None,
) -> PassReport:  # fmt: skip
    """layout: of block scales, "linear" or "swizzled_128x4", as the target's kernels read them.

    prove  called for every site while the plain weights are still held; afterwards they are not

    Raises OptionError for rows that are not whole blocks of NVFP4.
    """
    report = PassReport("quantize_moe", "quantizes")
    mixtures = graph_module.graph.find_nodes(op="call_function", target=octavo.moe.default)
    chosen = [
        (node, precision)
        for node in mixtures
        if (precision := planned(node, [arguments(node)[3], arguments(node)[5]], plan, report))
    ]
    known: dict[tuple[Node, Node], _Experts] = {}
    for index, (node, precision) in enumerate(chosen):
        _, _, _, gate_up, _, down, *_ = arguments(node)
        if (gate_up, down) not in known:
            known[gate_up, down] = _Experts(graph_module, precision, layout)
            for number, weight in enumerate((gate_up, down)):
                name = str(weight.target)
                if progress is not None:
                    progress(name, 2 * index + number, 2 * len(chosen))
                _check_rows(node, name, held(graph_module, name), precision)
                quantized = quantizer(name, held(graph_module, name), precision.format)
                known[gate_up, down].add(("gate_up", "down")[number], name, quantized)
        site = _rewrite(graph_module, node, precision, known[gate_up, down])
        if prove is not None:
            prove(report, site, known[gate_up, down].quantized)
        report.sites.append(release(graph_module, site, [gate_up, down]))
    return report


def _check_rows(node: Node, name: str, weight: Tensor, precision: ProductPrecision) -> None:
    length = weight.shape[-1]
    if precision.format != "fp8" and length % BLOCK_ELEMENTS:
        raise OptionError(
            f"quantize_moe: {precision.format} needs rows of whole blocks of {BLOCK_ELEMENTS} elements, got "
            f"{length} in {name} ({where(node)}); choose fp8 for these experts, or keep them as they are"
        )


class _Experts:
    """The weights of a mixture in their parts, as nodes by the names of the op's arguments."""

    def __init__(self, graph_module: GraphModule, precision: ProductPrecision, layout: str) -> None:
        self.graph_module = graph_module
        self.precision = precision
        self.layout = layout
        self.interleaved = layout != "linear"
        self.nodes: dict[str, Node] = {}
        self.quantized: list[QuantizedWeight] = []

    def add(self, product: Literal["gate_up", "down"], name: str, quantized: QuantizedWeight) -> None:
        """alpha is the product of the outer scales that are known: a gate's and an up's apart, or of every row."""
        self.quantized.append(quantized)
        count, rows = quantized.codes.shape[:2]
        outer = (
            quantized.outer.float().expand(count) if quantized.outer.dim() == 0 else quantized.outer.float()
        )
        alpha = outer.reshape(count, -1)
        if product == "gate_up":
            alpha = _by_half(alpha)
        scale = self._input_scale(product, name, count)
        other = str(scale.target) if scale is not None else ""
        if scale is not None:
            alpha = alpha * held(self.graph_module, other).reshape(-1, 1)
        turned = product == "gate_up" and self.interleaved
        tensors: dict[Role, Tensor] = {"codes": self._in_turn(quantized.codes, turned), "alpha": alpha}
        if quantized.scales is not None:
            tensors["scales"] = self._laid_out(self._in_turn(quantized.scales, turned))
        kind = weight_type(quantized, self.layout, alpha.shape[1] == rows)
        for role, tensor in tensors.items():
            part = Part(kind, role, name, other if role == "alpha" else "")
            suffix = {"codes": "", "scales": "_scale", "alpha": "_alpha"}[role]
            self.nodes[product + suffix] = new_weight(self.graph_module, f"{name}_{role}", tensor, part=part)

    def _input_scale(self, product: str, name: str, count: int) -> Node | None:
        """Of x one, of what the activation makes one for every expert; none where rows have their own."""
        argument = "x_outer" if product == "gate_up" else "hidden_outer"
        value = self.precision.input_scale if product == "gate_up" else self.precision.hidden_scale
        if value is None or self.precision.format == "nvfp4_weight_only":
            return None
        tensor = torch.full((1 if product == "gate_up" else count,), value, dtype=torch.float32)
        self.nodes[argument] = new_weight(self.graph_module, f"{name}_{argument}", tensor)
        return self.nodes[argument]

    def _in_turn(self, rows: Tensor, turned: bool) -> Tensor:
        """Gate and up rows (E, N, ...) of each expert in turn."""
        if not turned:
            return rows
        both = rows.view(torch.uint8).unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
        turned_rows: Tensor = both.contiguous().view(rows.dtype)
        return turned_rows

    def _laid_out(self, scales: Tensor) -> Tensor:
        if self.layout == "linear":
            return scales
        return torch.stack([swizzle(one).view(torch.uint8) for one in scales]).view(scales.dtype)


def _by_half(alpha: Tensor) -> Tensor:
    """Of gates and of ups one each, (E, 2), where their rows (E, N) share it, or both do (E, 1)."""
    if alpha.shape[1] == 1:
        return alpha.repeat(1, 2)
    halves = alpha.unflatten(1, (2, -1))
    first: Tensor = halves[..., 0]
    return first if bool((halves == halves[..., :1]).all()) else alpha


def _rewrite(graph_module: GraphModule, node: Node, precision: ProductPrecision, weights: _Experts) -> Site:
    x, experts, gates, _, gate_up_bias, _, down_bias, activation, limit, alpha = arguments(node)
    given = {
        **weights.nodes, "x": x, "experts": experts, "weights": gates, "gate_up_bias": gate_up_bias,
        "down_bias": down_bias, "activation": activation, "limit": limit, "alpha": alpha, "layout": weights.layout,
        "interleaved": weights.interleaved,
    }  # fmt: skip
    target = OPS[precision.format]

    def build(b: Builder) -> list[Node]:
        return [b.call(target, *(given.get(argument.name) for argument in target._schema.arguments))]

    return replace(graph_module, [node], build, [x, experts, gates])
