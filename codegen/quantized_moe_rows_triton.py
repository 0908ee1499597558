"""Selection rows of the Triton family for mixtures of quantised experts."""

from torch import fx

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.moe_grouped import Experts, Places, Unit
from octavo.codegen.moe_nvfp4_triton import refuse_nvfp4, size_refusal
from octavo.codegen.moe_quantized_triton import experts_spec, products
from octavo.codegen.moe_rows_triton import too_many_experts
from octavo.codegen.quantized_moe_nodes import (
    SCHEMES,
    QuantizedMixture,
    quantized_moe_refusal,
    read_quantized_mixture,
)
from octavo.codegen.row import Row, static_size
from octavo.compiler.target import Target

LAYOUT = "swizzled_128x4"


def layer_of(mixture: QuantizedMixture) -> Experts:
    is_oai = mixture.activation == "swiglu_oai"
    unit = Unit(mixture.limit, mixture.alpha, 1.0) if is_oai else Unit(mixture.limit)
    return Experts(
        mixture.count, mixture.dtype, mixture.experts, mixture.top_k, mixture.hidden, mixture.intermediate, unit,
        mixture.gate_up_bias, by_row=mixture.alphas[1] > 1,
    )  # fmt: skip


def quantized_moe(node: fx.Node, target: Target) -> KernelSpec:
    mixture = read_quantized_mixture(node)
    return experts_spec(layer_of(mixture), mixture.scheme, target)


def refuse(node: fx.Node, target: Target) -> str | None:
    reason = too_many_experts(static_size(node, "down", 0)) or quantized_moe_refusal(node, target)
    if reason:
        return reason
    mixture = read_quantized_mixture(node)
    return (
        _target_refusal(mixture, target)
        or _form_refusal(mixture)
        or _outer_refusal(mixture)
        or _alpha_refusal(mixture)
        or _size_refusal(mixture)
    )


def _target_refusal(mixture: QuantizedMixture, target: Target) -> str | None:
    if target.arch is None or target.arch < 90:
        return f"TMA needs sm_90 or newer, {target.name} is sm_{target.arch}"
    return refuse_nvfp4(target) if mixture.scheme == "nvfp4" else None


def _form_refusal(mixture: QuantizedMixture) -> str | None:
    if mixture.activation not in ("silu", "swiglu_oai"):
        return f"activation must be silu or swiglu_oai, got {mixture.activation!r}"
    if mixture.scheme != "fp8" and mixture.layout != LAYOUT:
        return f"block scales must lie in the layout {LAYOUT}, got {mixture.layout!r}"
    if not mixture.interleaved:
        return "rows of gates and ups must lie in turn, got gates before ups"
    if mixture.gate_up_bias != mixture.down_bias:
        biases = (mixture.gate_up_bias or "none", mixture.down_bias or "none")
        return f"biases of both products must have one dtype, got {' and '.join(biases)}"
    return None


def _outer_refusal(mixture: QuantizedMixture) -> str | None:
    """NVFP4 rows are quantised as they are made, tile by tile; FP8 rows when they are whole."""
    given = (mixture.x_outer, mixture.hidden_outer)
    if mixture.scheme == "nvfp4" and not all(given):
        return (
            "outer scales of NVFP4 rows must be given (calibrated); those of each row are not known in time"
        )
    if mixture.scheme == "fp8" and any(given):
        return "FP8 rows have outer scales of their own, got calibrated ones"
    return None


def _alpha_refusal(mixture: QuantizedMixture) -> str | None:
    by_expert, by_row = (2, 1), (2 * mixture.intermediate, mixture.hidden)
    if mixture.alphas == by_expert or (mixture.alphas == by_row and mixture.scheme != "nvfp4"):
        return None
    allowed = f"{by_expert}" if mixture.scheme == "nvfp4" else f"{by_expert} or {by_row}"
    return f"alphas of an expert must be {allowed}, got {mixture.alphas}"


def _size_refusal(mixture: QuantizedMixture) -> str | None:
    places = Places(mixture.count, mixture.experts, mixture.top_k, 1)
    kind = "fp8" if mixture.scheme == "fp8" else "nvfp4"
    both = products(layer_of(mixture), places, mixture.scheme)
    return next((reason for product in both if (reason := size_refusal(product, kind))), None)


ROWS: tuple[Row, ...] = tuple(Row(op, op, refuse, quantized_moe) for op in SCHEMES)
