"""Selection rows of the cpp family for mixtures of quantised experts."""

from torch import fx

from octavo.codegen.kernel import Arg, KernelSpec, pointer
from octavo.codegen.moe_cpp import chunk, too_many_experts
from octavo.codegen.quantized_cpp import linear_scales
from octavo.codegen.quantized_moe_nodes import (
    SCHEMES,
    QuantizedMixture,
    quantized_moe_refusal,
    read_quantized_mixture,
)
from octavo.codegen.row import Row, op_name, static_size
from octavo.codegen.rows_cpp import floats, scalar
from octavo.compiler.legality import named_arguments
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS
from octavo.compiler.program import Dim
from octavo.compiler.target import Target

Scratch = tuple[tuple[str, str, tuple[Dim, ...]], ...]


def quantized_moe_spec(op: str, mixture: QuantizedMixture) -> KernelSpec:
    dtype, scheme = mixture.dtype, mixture.scheme
    codes, has_scales = "fp8" if scheme == "fp8" else "u8", scheme != "fp8"
    weights: list[Arg] = []
    for name, outer, rows in (
        ("gate_up", "x_outer", mixture.x_outer),
        ("down", "hidden_outer", mixture.hidden_outer),
    ):
        weights += [pointer(outer, "fp32")] * rows + [pointer(name, codes)]
        weights += [pointer(f"{name}_scale", "fp8")] * has_scales + [pointer(f"{name}_alpha", "fp32")]
        bias = getattr(mixture, f"{name}_bias")
        weights += [pointer(f"{name}_bias", bias)] if bias else []
    scratch = _scratch(mixture)
    return KernelSpec(
        op=op,
        template="cpp/quantized_moe.cpp.jinja",
        params=(
            ("scheme", scheme), ("dtype", dtype), ("activation", mixture.activation),
            ("gate_up_bias", mixture.gate_up_bias), ("down_bias", mixture.down_bias), ("x_outer", mixture.x_outer),
            ("hidden_outer", mixture.hidden_outer), ("LIMIT", mixture.limit), ("ALPHA", mixture.alpha),
            ("EXPERTS", mixture.experts), ("TOP_K", mixture.top_k), ("HIDDEN", mixture.hidden),
            ("INTERMEDIATE", mixture.intermediate), ("GATE_UP_ALPHAS", mixture.alphas[0]),
            ("DOWN_ALPHAS", mixture.alphas[1]), ("GATE_UP_CHUNK", chunk(mixture.hidden)),
            ("DOWN_CHUNK", chunk(mixture.intermediate)),
        ),
        args=(
            pointer("x", dtype), pointer("experts", "i64"), pointer("weights", "fp32"), *weights,
            *(pointer(name, kind) for name, kind, _ in scratch), pointer("out", dtype),
            scalar("num_rows", mixture.count),
        ),
        bytes=mixture.bytes,
        flops=mixture.flops,
        label=mixture.label,
        scratch=scratch,
    )  # fmt: skip


def _scratch(mixture: QuantizedMixture) -> Scratch:
    """As of a plain mixture, and the quantised rows of both products with the outer scales that are their own."""
    pairs = (mixture.count, mixture.top_k)
    found: Scratch = (
        ("order", "i32", pairs), ("hidden", mixture.dtype, (*pairs, mixture.intermediate)),
        ("parts", "fp32", (*pairs, mixture.hidden)),
    )  # fmt: skip
    if mixture.scheme == "weight_only":
        return found
    rows = (("x", (mixture.count,), mixture.hidden), ("hidden", pairs, mixture.intermediate))
    for name, count, width in rows:
        if mixture.scheme == "fp8":
            found += ((f"{name}_codes", "fp8", (*count, width)),)
        else:
            found += (
                (f"{name}_codes", "u8", (*count, width // 2)),
                (f"{name}_codes_scale", "fp8", (*count, width // BLOCK_ELEMENTS)),
            )
        if not getattr(mixture, f"{name}_outer"):
            found += ((f"{name}_own", "fp32", count),)
    return found


def refuse(node: fx.Node, target: Target) -> str | None:
    return (
        too_many_experts(static_size(node, "down", 0))
        or linear_scales(quantized_moe_refusal, floats("x", "gate_up_bias", "down_bias"))(node, target)
        or _turned(node)
    )


def _turned(node: fx.Node) -> str | None:
    return (
        "rows of gates must come before those of ups, got them in turn"
        if named_arguments(node)["interleaved"]
        else None
    )


ROWS: tuple[Row, ...] = tuple(
    Row(
        op,
        op,
        refuse,
        lambda node, target: quantized_moe_spec(str(op_name(node)), read_quantized_mixture(node)),
    )
    for op in SCHEMES
)
