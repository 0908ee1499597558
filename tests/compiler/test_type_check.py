"""The checker of types: quantised graphs pass, and a part of another value, layout or format is named."""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from stages import before, calls
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler import nvfp4
from octavo.compiler.dump import print_graph, settle
from octavo.compiler.dump_load import load_graph
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.precision import Format, PrecisionPlan, ProductPrecision, QuantizedWeight
from octavo.compiler.type_rules import check_types, declared
from octavo.compiler.types import FP8, NVFP4, Part, Plain
from octavo.passes.quantize_linear import quantize_linear

octavo = torch.ops.octavo
PRODUCTS = {
    "nvfp4": octavo.nvfp4_linear.default,
    "nvfp4_weight_only": octavo.nvfp4_weight_linear.default,
    "fp8": octavo.fp8_linear.default,
}


def quantizer(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
    if format == "fp8":
        outer = weight.abs().amax(-1) / 448
        return QuantizedWeight((weight / outer[:, None]).to(torch.float8_e4m3fn), None, outer)
    outer = nvfp4.outer_scale(weight.abs().amax(), 256.0)
    return QuantizedWeight(*nvfp4.quantize(weight, outer), outer)


def quantized(format: Format, scale: float | None = None, layout: str = "linear") -> GraphModule:
    graph_module = before("")
    linears = calls(graph_module, octavo.linear.default)
    products = {str(n.all_input_nodes[1].target): ProductPrecision(format, scale) for n in linears}
    # The last has another scale than the rest.
    if scale is not None:
        products[next(reversed(products))] = ProductPrecision(format, 2 * scale)
    quantize_linear(graph_module, PrecisionPlan(products), quantizer, layout)
    graph_module.graph.eliminate_dead_code()
    return graph_module


def argument(node: Node, name: str) -> int:
    return [a.name for a in node.target._schema.arguments].index(name)  # type: ignore[union-attr]


def with_argument(node: Node, name: str, value: Any) -> None:
    args = list(node.args)
    args[argument(node, name)] = value
    node.args = tuple(args)


def of(node: Node, name: str) -> Any:
    return node.args[argument(node, name)]


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("scale", [None, 0.01])
@pytest.mark.parametrize("format", PRODUCTS)
def test_quantised_graphs_have_types(format: Format, scale: float | None, layout: str) -> None:
    graph_module = quantized(format, scale, layout)
    types = check_types(graph_module, "test")
    product = calls(graph_module, PRODUCTS[format])[0]
    weight, x = types[of(product, "weight")], types[of(product, "x")]
    assert isinstance(weight, Part) and weight.role == "codes"
    shape = (128, 64)
    if format == "fp8":
        assert weight.type == FP8(shape, "row")
        assert isinstance(x, Part) and x.type == FP8(x.type.shape, "token" if scale is None else "tensor")
    else:
        assert weight.type == NVFP4(shape, e4m3_max=256.0, layout=layout)  # type: ignore[arg-type]
    if format == "nvfp4":
        assert isinstance(x, Part) and x.type.shape[-1] == 64 and x.value == of(product, "x").args[0].name
        assert x.type == NVFP4(x.type.shape, layout=layout, outer="row" if scale is None else "tensor")  # type: ignore[arg-type]
    assert isinstance(types[product], Plain)


def other(product: Node, graph_module: GraphModule) -> Node:
    return next(n for n in calls(graph_module, product.target) if n is not product)


def scales_of_another_value(graph_module: GraphModule, product: Node) -> None:
    with_argument(product, "weight_scale", of(other(product, graph_module), "weight_scale"))


def scales_of_another_input(graph_module: GraphModule, product: Node) -> None:
    later = other(product, graph_module)
    with_argument(later, "x_scale", of(product, "x_scale"))


def scales_of_another_layout(graph_module: GraphModule, product: Node) -> None:
    with_argument(product, "layout", "swizzled_128x4")


def codes_that_are_plain(graph_module: GraphModule, product: Node) -> None:
    del declared(graph_module)[of(product, "weight").target]


def retyped(graph_module: GraphModule, weight: Node, **facts: Any) -> None:
    """Declare another type for a weight."""
    part = declared(graph_module)[str(weight.target)]
    assert isinstance(part.type, NVFP4)
    declared(graph_module)[str(weight.target)] = replace(part, type=replace(part.type, **facts))


def another_bound(graph_module: GraphModule, product: Node) -> None:
    retyped(graph_module, of(product, "weight_scale"), e4m3_max=448.0)


def another_recipe(graph_module: GraphModule, product: Node) -> None:
    retyped(graph_module, of(product, "weight_scale"), recipe="modelopt")


def blocks_along_rows(graph_module: GraphModule, product: Node) -> None:
    for role in ("weight", "weight_scale", "alpha"):
        retyped(graph_module, of(product, role), axis=-2)


def alpha_of_another_weight(graph_module: GraphModule, product: Node) -> None:
    with_argument(product, "alpha", of(other(product, graph_module), "alpha"))


def alpha_of_another_input(graph_module: GraphModule, product: Node) -> None:
    last = calls(graph_module, product.target)[-1]
    part = declared(graph_module)[of(product, "alpha").target]
    name = of(last, "alpha").target
    declared(graph_module)[name] = replace(declared(graph_module)[name], other=part.other)


def missing_row_scale(graph_module: GraphModule, product: Node) -> None:
    with_argument(product, "row_scale", None)


def a_row_scale_too_many(graph_module: GraphModule, product: Node) -> None:
    with_argument(product, "row_scale", of(product, "alpha"))


def codes_in_a_norm(graph_module: GraphModule, product: Node) -> None:
    norm = calls(graph_module, octavo.add_rms_norm.default)[0]
    norm.args = (of(product, "x"), *norm.args[1:])


def nvfp4_codes_as_fp8(graph_module: GraphModule, product: Node) -> None:
    with graph_module.graph.inserting_after(product):
        args = (of(product, "x"), of(product, "weight"), of(product, "alpha"), None, None, "fp32")
        new = graph_module.graph.call_function(octavo.fp8_linear.default, args)
    new.meta = dict(product.meta)
    product.replace_all_uses_with(new)
    graph_module.graph.erase_node(product)


def reshaped(shape: list[int], role: str) -> Callable[[GraphModule, Node], None]:
    def change(graph_module: GraphModule, product: Node) -> None:
        old = of(product, role)
        with graph_module.graph.inserting_before(product):
            new = graph_module.graph.call_function(torch.ops.aten.reshape.default, (old, shape))
        with old.meta["val"].fake_mode:
            new.meta = {**product.meta, "val": old.meta["val"].reshape(shape)}
        with_argument(product, role, new)

    return change


MISMATCHES = [
    ("nvfp4", 0.01, "linear", scales_of_another_value,
     r"weight_scale must belong to weight, which is codes of \S+q_proj\S*: nvfp4\[128, 64\].*; got scales "),
    ("nvfp4", 0.01, "linear", scales_of_another_input,
     r"x_scale must belong to x, which is codes of quantize_1.*: nvfp4.*; got scales of quantize x"),
    ("nvfp4", 0.01, "linear", scales_of_another_layout, "reads swizzled_128x4 scales, got x_scale linear: getitem"),
    ("nvfp4", 0.01, "linear", codes_that_are_plain, r"weight must be codes of an NVFP4 value, got \S+codes, u8"),
    ("nvfp4", 0.01, "linear", another_bound, r"max 256 linear.*; got scales of .* max 448"),
    ("nvfp4", 0.01, "linear", another_recipe, r"octavo-v1.*; got scales of .* modelopt"),
    ("nvfp4", 0.01, "linear", blocks_along_rows, "weight must have its blocks along the last axis, got .* axis -2"),
    ("nvfp4", 0.01, "linear", alpha_of_another_weight, "alpha must belong to weight"),
    ("nvfp4", 0.01, "linear", alpha_of_another_input,
     r"alpha must hold input_scales.s1, since x was quantised with it; got alpha of .* x input_scales.s0"),
    ("nvfp4", None, "linear", missing_row_scale, r"row_scale is missing: each row of x has its own"),
    ("fp8", None, "linear", missing_row_scale, "row_scale is missing"),
    ("nvfp4", 0.01, "linear", a_row_scale_too_many, "row_scale must not be given, since x has the outer scale"),
    ("nvfp4", 0.01, "linear", codes_in_a_norm, r"takes plain numbers, got getitem_7, codes of quantize x"),
    ("nvfp4", 0.01, "linear", nvfp4_codes_as_fp8, "x must be codes of an FP8 value, got getitem_7, codes of quantize"),
    ("nvfp4", 0.01, "linear", reshaped([256, 16], "weight"), r"rows of x and weight|weight_scale must belong"),
    ("nvfp4", 0.01, "linear", reshaped([1024, 4], "weight"), "a last axis of 8 cuts blocks of 16"),
    ("nvfp4", 0.01, "swizzled_128x4", reshaped([128, 4], "weight_scale"), "swizzled scales cannot be reshaped"),
    ("nvfp4_weight_only", None, "linear", scales_of_another_value, "weight_scale must belong to weight"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "scale", "layout", "damage", "said"), MISMATCHES)
def test_a_mismatch_is_refused_by_name(
    format: Format, scale: float | None, layout: str, damage: Callable[[GraphModule, Node], None], said: str
) -> None:
    graph_module = quantized(format, scale, layout)
    damage(graph_module, calls(graph_module, PRODUCTS[format])[0])
    with pytest.raises(IllegalGraphError) as error:
        check_types(graph_module, "a_pass")
    assert re.search(said, str(error.value)), str(error.value)
    assert re.match(r"a_pass: .*\(node \w+, .*modeling_llama.py:\d+\)", str(error.value))


@pytest.mark.parametrize(("format", "scale"), [("nvfp4", 0.01), ("fp8", None)])
def test_types_survive_in_the_text_of_a_graph(format: Format, scale: float | None) -> None:
    graph_module = quantized(format, scale)
    settle(graph_module)
    text = print_graph(graph_module)
    loaded = load_graph(text, graph_module)
    assert declared(loaded) == declared(graph_module) != {}
    assert print_graph(loaded) == text
    check_types(loaded, "test")


def test_a_type_that_is_none_is_refused_with_its_line() -> None:
    graph_module = quantized("nvfp4", 0.01)
    text = print_graph(graph_module)
    line = next(n for n, line in enumerate(text.splitlines(), 1) if ": nvfp4[" in line)
    with pytest.raises(
        IllegalGraphError, match=rf"a.py:{line}: '.* of .*nvfp5.*' is no part of a quantised value"
    ):
        load_graph(text.replace(": nvfp4[", ": nvfp5["), graph_module, "a.py")
