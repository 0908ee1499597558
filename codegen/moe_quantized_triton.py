"""A mixture of experts on quantised weights as launches of the Triton family, from tokens to tokens.

Arguments, for E experts, hidden H and intermediate I:
    x, out, shared (T, H); experts (T, top_k) i64; weights (T, top_k) fp32
    gate_up (E * 2 I, H), rows 2 j and 2 j + 1 of an expert being gate j and up j; gate_up_alpha (E, 2) fp32, the gate's
    and the up's; gate_up_bias (E, 2 I), the gates' before the ups'
    down (E * H, I); down_alpha (E,) fp32; down_bias (E, H)
    by row: gate_up_alpha (E, 2 I), the gates' before the ups', and down_alpha (E, H)
NVFP4 weights are codes; their scales are in the 128 x 4 layout, every expert's rows padded to 128.
An alpha is what sums are multiplied by: the outer scale of the weight, with NVFP4 rows times that of the rows.
NVFP4 rows: x_outer (1,) and hidden_outer (E,) fp32 are their outer scales, static, so that no token depends on another.
"""

from dataclasses import replace

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.moe_grouped import FEW_TILE, MANY_TILE, WEIGHT_ONLY_TILE, Experts, Grouped, Places
from octavo.codegen.moe_nvfp4_triton import few_spec, fp8_many_spec, nvfp4_few_spec, nvfp4_many_spec
from octavo.codegen.moe_permute_triton import permute_specs, placed_sum_spec, quantize_rows_spec
from octavo.codegen.quantize_triton import scale_bytes
from octavo.codegen.specs_triton import in_order, power_of_2
from octavo.compiler.program import Dim
from octavo.compiler.target import Target

Scratch = tuple[tuple[str, str, tuple[Dim, ...]], ...]
SCHEMES = ("nvfp4", "fp8", "weight_only")


def experts_spec(layer: Experts, scheme: str, target: Target) -> KernelSpec:
    """Every launch, for few pairs of a token and an expert and for many. scheme: what rows and weights are.

    nvfp4: both NVFP4; fp8: both FP8, rows with a scale of their own; weight_only: NVFP4 weights, fp16 rows.
    """
    launches: list[KernelSpec] = []
    for tile in (FEW_TILE, _tall(scheme)):
        places = layer.places(tile)
        when = f"{places.pairs} {'<=' if tile == FEW_TILE else '>'} {layer.limit}"
        chain = _chain(layer, scheme, places, target)
        launches += [replace(spec, when=f"{spec.when} and {when}" if spec.when else when) for spec in chain]
    return in_order(replace(launches[0], scratch=_scratch(layer, scheme)), *launches[1:])


def _tall(scheme: str) -> int:
    return WEIGHT_ONLY_TILE if scheme == "weight_only" else MANY_TILE


def _chain(layer: Experts, scheme: str, places: Places, target: Target) -> list[KernelSpec]:
    """The launches with tiles of one height."""
    kind = "fp16" if scheme == "weight_only" else scheme
    x = quantize_rows_spec(places, kind, layer.hidden, layer.dtype, "x", "rows", target)
    gate_up, down = products(layer, places, scheme)
    between = []
    if scheme == "fp8":
        source, rows = gate_up.out, down.x
        between.append(
            quantize_rows_spec(places, kind, layer.intermediate, "bf16", source, rows, target, in_order=True)
        )
    total = placed_sum_spec(layer.count, layer.top_k, layer.hidden, layer.dtype, "bf16", shared=layer.shared)
    parts = replace(total.args[0], name=down.out)
    return [
        *permute_specs(places), x, product_spec(gate_up, scheme, target), *between, product_spec(down, scheme, target),
        replace(total, args=(parts, *total.args[1:])),
    ]  # fmt: skip


def products(layer: Experts, places: Places, scheme: str) -> tuple[Grouped, Grouped]:
    """Both products. Of FP8 the first one's result is bf16, and is quantised by a launch of its own."""
    first = "wide" if scheme == "fp8" else "hidden"
    width, inner, rounded = layer.hidden, layer.intermediate, "" if layer.dtype == "fp32" else layer.dtype
    gate_up = Grouped(
        places, "rows", "gate_up", first, 2 * inner, width, layer.unit, layer.bias, layer.by_row, rounded
    )  # fmt: skip
    return gate_up, Grouped(places, "hidden", "down", "parts", width, inner, None, layer.bias, layer.by_row)


def product_spec(product: Grouped, scheme: str, target: Target) -> KernelSpec:
    is_few = product.places.tile == FEW_TILE
    if scheme == "nvfp4":
        return nvfp4_few_spec(product, target) if is_few else nvfp4_many_spec(product, target)
    if scheme == "fp8":
        return few_spec(product, "fp8", target) if is_few else fp8_many_spec(product, target)
    out_dtype = "fp16" if product.unit else "bf16"
    return few_spec(product, "nvfp4", target, product.places.tile, out_dtype)


def _scratch(layer: Experts, scheme: str) -> Scratch:
    """Tables, and rows in the order by expert: of x, of the hidden state, and of the result.

    Tall tiles may leave more rows empty than short ones, so what they take suffices for both.
    """
    pairs, rows = layer.places(FEW_TILE).pairs, layer.places(_tall(scheme)).rows
    found: Scratch = (
        ("place", "i32", (pairs,)), ("tile_expert", "i32", (pairs,)), ("num_tiles", "i32", (1,)),
        ("counts", "i32", (f"({pairs} + 1023) // 1024", power_of_2(layer.experts, 32))),
        ("parts", "bf16", (rows, layer.hidden)),
    )  # fmt: skip
    for name, k in (("rows", layer.hidden), ("hidden", layer.intermediate)):
        if scheme == "nvfp4":
            found += ((name, "u8", (rows, k // 2)), (f"{name}_scale", "fp8", (scale_bytes(rows, k),)))
        elif scheme == "fp8":
            found += ((name, "fp8", (rows, k)), (f"{name}_scale", "fp32", (rows,)))
        else:
            found += ((name, "fp16", (rows, k)),)
    return (*found, ("wide", "bf16", (rows, layer.intermediate))) if scheme == "fp8" else found
