"""octavo.linear  ->  a product with quantised weights, and the quantisation of its input.

What a plan says of each weight is done. An input that several products read in one form is quantised once. Weights come
from a WeightQuantizer: out of the model's values, or as a checkpoint has them.
"""

import operator
from collections.abc import Callable, Collection

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler.dims import dtype_name
from octavo.compiler.errors import PassError
from octavo.compiler.nvfp4 import swizzle
from octavo.compiler.precision import (
    PrecisionPlan,
    ProductPrecision,
    QuantizedWeight,
    WeightQuantizer,
    weight_type,
)
from octavo.compiler.types import Part, Role
from octavo.passes.balance_channels import Balance
from octavo.passes.products import planned
from octavo.passes.rewrite import Builder, Site, exchange, held, new_weight, release, replace
from octavo.passes.rule import PassReport, Prove

octavo = torch.ops.octavo


def quantize_linear(
    graph_module: GraphModule, plan: PrecisionPlan, quantizer: WeightQuantizer, layout: str = "linear",
    progress: Callable[[str, int, int], None] | None = None, prove: Prove | None = None,
    balance: Balance | None = None,
) -> PassReport:  # fmt: skip
    """layout: of block scales, "linear" or "swizzled_128x4", as the target's kernels read them.

    prove    called for every site while the plain weight is still held; afterwards it is not, unless others read it
    balance  how weights are scaled first, each when its turn comes
    Raises PassError where a weight would have to be scaled that stays as it is.
    """
    report = PassReport("quantize_linear", "quantizes")
    linears = graph_module.graph.find_nodes(op="call_function", target=octavo.linear.default)
    chosen = [
        (node, precision) for node in linears if (precision := planned(node, [node.args[1]], plan, report))
    ]
    balance = balance or Balance()
    _scale_norms(graph_module, balance, {str(node.args[1].target) for node, _ in chosen})
    inputs = _Inputs(graph_module, layout)
    weights: dict[str, tuple[QuantizedWeight, dict[str, Node]]] = {}
    for index, (node, precision) in enumerate(chosen):
        name = str(node.args[1].target)
        if progress is not None:
            progress(name, index, len(chosen))
        if name not in weights:
            weight = balance.weight(name, held(graph_module, name))
            exchange(graph_module, name, weight)
            quantized = quantizer(name, weight, precision.format)
            parts = _hold(graph_module, name, quantized, inputs.scale_of(precision), layout)
            weights[name] = (quantized, parts)
        node_of_weight = node.args[1]
        site = _rewrite(graph_module, node, precision, weights[name][1], inputs, layout)
        if prove is not None:
            prove(report, site, [weights[name][0]])
        report.sites.append(release(graph_module, site, [node_of_weight]))
    return report


def _scale_norms(graph_module: GraphModule, balance: Balance, chosen: Collection[str]) -> None:
    """The half of the balance that is not a matter of quantised weights."""
    left = sorted({*balance.inputs, *balance.rows} - {*chosen})
    if left:
        raise PassError(f"quantize_linear: {left[0]} is to be scaled, but the plan leaves it as it is")
    balance.scale_norms(graph_module)


def _hold(
    graph_module: GraphModule, name: str, quantized: QuantizedWeight, input_scale: Node | None, layout: str
) -> dict[str, Node]:
    """The parts as weights of the graph. alpha is the product of the outer scales that are known."""
    alpha, scale_name = quantized.outer.float(), ""
    if input_scale is not None:
        scale_name = str(input_scale.target)
        alpha = alpha * held(graph_module, scale_name)
    parts: dict[Role, Tensor] = {"codes": quantized.codes, "alpha": alpha.reshape(-1)}
    if quantized.scales is not None:
        parts["scales"] = quantized.scales if layout == "linear" else swizzle(quantized.scales)
    kind = weight_type(quantized, layout, quantized.outer.numel() > 1)
    return {
        role: new_weight(
            graph_module, f"{name}_{role}", tensor, part=Part(kind, role, name, scale_name if role == "alpha" else "")
        )
        for role, tensor in parts.items()
    }  # fmt: skip


class _Inputs:
    """Quantised forms of values; what is asked for twice is made once, in front of who asks first."""

    def __init__(self, graph_module: GraphModule, layout: str) -> None:
        self.graph_module = graph_module
        self.layout = layout
        self.known: dict[tuple[Node, str, float | None], list[Node]] = {}
        self.scales: dict[float, Node] = {}

    def get(self, builder: Builder, x: Node, precision: ProductPrecision) -> list[Node]:
        key = (x, precision.format, precision.input_scale)
        if key not in self.known:
            parts = builder.call(
                octavo.quantize.default, x, self.scale_of(precision), precision.format, self.layout
            )
            count = len(parts.meta["val"])
            self.known[key] = [builder.call(operator.getitem, parts, index) for index in range(count)]
        return self.known[key]

    def scale_of(self, precision: ProductPrecision) -> Node | None:
        """The outer scale of an input that is calibrated, one weight for all that have it."""
        value = precision.input_scale
        if value is None or precision.format == "nvfp4_weight_only":
            return None
        if value not in self.scales:
            tensor = torch.tensor([value], dtype=torch.float32)
            self.scales[value] = new_weight(self.graph_module, f"input_scales.s{len(self.scales)}", tensor)
        return self.scales[value]


def _rewrite(
    graph_module: GraphModule, node: Node, precision: ProductPrecision, weight: dict[str, Node], inputs: _Inputs,
    layout: str,
) -> Site:  # fmt: skip
    x, bias = node.args[0], node.args[2] if len(node.args) > 2 else None
    assert isinstance(x, Node)
    dtype = dtype_name(node.meta["val"])

    def build(b: Builder) -> list[Node]:
        if precision.format == "nvfp4_weight_only":
            weights = (weight["codes"], weight["scales"], weight["alpha"])
            return [b.call(octavo.nvfp4_weight_linear.default, x, *weights, bias, layout)]
        given = inputs.get(b, x, precision)
        row_scale = given[-1] if precision.input_scale is None else None
        if precision.format == "fp8":
            pair = (given[0], weight["codes"], weight["alpha"])
            return [b.call(octavo.fp8_linear.default, *pair, row_scale, bias, dtype)]
        weights = (weight["codes"], weight["scales"], weight["alpha"])
        return [b.call(octavo.nvfp4_linear.default, *given[:2], *weights, row_scale, bias, dtype, layout)]

    return replace(graph_module, [node], build, [x])
