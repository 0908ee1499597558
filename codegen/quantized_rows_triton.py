"""Selection rows of the Triton family for products with quantised weights, and for what quantises their inputs."""

from dataclasses import replace

from torch import fx

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.linear_triton import Product, linear_pointer_spec, linear_tma_spec, tma_refusal
from octavo.codegen.norm_quantize_triton import act_mul_quantize_spec, rms_norm_quantize_spec
from octavo.codegen.nvfp4_triton import Nvfp4Product, nvfp4_linear_spec, nvfp4_refusal
from octavo.codegen.quantize_triton import Quantization, quantize_spec
from octavo.codegen.row import Row, dtype_of, result_dtype, row_count, static_size
from octavo.codegen.rows_triton import wider_than_a_program
from octavo.compiler.legality import named_arguments
from octavo.compiler.target import Target

# Of the block scales of activations and of weights.
LAYOUT = "swizzled_128x4"
# E4M3 is a type of the hardware from this arch on.
FIRST_WITH_FP8 = 89


def other_layout(node: fx.Node, target: Target) -> str | None:
    """Refuses block scales that do not lie in tiles. Rows of FP8 have none."""
    given = named_arguments(node)
    if given["layout"] == LAYOUT or given.get("format") == "fp8":
        return None
    return f"block scales must be in the layout {LAYOUT}, got {given['layout']}; quantise the model for {target.name}"


def no_fp8(target: Target) -> str | None:
    if target.arch is None or target.arch < FIRST_WITH_FP8:
        return f"sm_{target.arch} has no FP8; keep the weights in bf16"
    return None


def quantization_refusal(node: fx.Node, target: Target) -> str | None:
    return no_fp8(target) or other_layout(node, target)


def norm_refusal(node: fx.Node, target: Target) -> str | None:
    return quantization_refusal(node, target) or wider_than_a_program("x")(node, target)


def quantization(node: fx.Node) -> Quantization:
    given = named_arguments(node)
    return Quantization(given["format"], by_token=given["outer"] is None)


def quantize(node: fx.Node, target: Target) -> KernelSpec:
    return quantize_spec(
        row_count(node), static_size(node, "x", -1), dtype_of(node, "x"), quantization(node), target
    )


def rms_norm_quantize(node: fx.Node, target: Target) -> KernelSpec:
    """With a residual, the sum is the last result."""
    given = named_arguments(node)
    return rms_norm_quantize_spec(
        row_count(node), static_size(node, "x", -1), dtype_of(node, "x"), given["eps"], given["offset"],
        "residual" in given, quantization(node), target, weight_dtype=dtype_of(node, "weight"),
    )  # fmt: skip


def act_mul_quantize(node: fx.Node, target: Target) -> KernelSpec:
    intermediate, activation = static_size(node, "gate_up", -1) // 2, named_arguments(node)["activation"]
    return act_mul_quantize_spec(
        row_count(node), intermediate, dtype_of(node, "gate_up"), activation, quantization(node), target
    )


def scales_of(node: fx.Node) -> tuple[str, bool, str]:
    """Whether alpha is one number or one a column, whether rows of x have scales, and the dtype of the bias."""
    given = named_arguments(node)
    alpha = "scalar" if static_size(node, "alpha", 0) == 1 else "column"
    bias = dtype_of(node, "bias") if given["bias"] is not None else ""
    return alpha, given.get("row_scale") is not None, bias


def nvfp4_product(node: fx.Node) -> Nvfp4Product:
    n, k = static_size(node, "weight", 0), 2 * static_size(node, "weight", 1)
    x_dtype = "nvfp4" if "x_scale" in named_arguments(node) else dtype_of(node, "x")
    return Nvfp4Product(row_count(node), n, k, x_dtype, result_dtype(node), *scales_of(node))


def nvfp4_row_refusal(node: fx.Node, target: Target) -> str | None:
    product = nvfp4_product(node)
    if product.x_dtype == "fp32":
        return "x must be bf16 beside weights of NVFP4, got fp32; compile with dtype='bf16'"
    return other_layout(node, target) or nvfp4_refusal(product, target)


def nvfp4_linear(node: fx.Node, target: Target) -> KernelSpec:
    return nvfp4_linear_spec(nvfp4_product(node), target)


def fp8_product(node: fx.Node) -> Product:
    n, k = static_size(node, "weight", 0), static_size(node, "weight", 1)
    alpha, row_scale, bias = scales_of(node)
    product = Product(row_count(node), n, k, "fp8", result_dtype(node), bool(bias), alpha, row_scale)
    return replace(product, bias_dtype=bias) if bias else product


def fp8_tma_refusal(node: fx.Node, target: Target) -> str | None:
    return no_fp8(target) or tma_refusal(fp8_product(node), target)


ROWS: tuple[Row, ...] = (
    Row("quantize", "quantize", quantization_refusal, quantize),
    Row("rms_norm_quantize", "rms_norm_quantize", norm_refusal, rms_norm_quantize),
    Row("add_rms_norm_quantize", "add_rms_norm_quantize", norm_refusal, rms_norm_quantize),
    Row("act_mul_quantize", "act_mul_quantize", quantization_refusal, act_mul_quantize),
    Row("nvfp4_block_scaled", "nvfp4_linear", nvfp4_row_refusal, nvfp4_linear),
    Row("nvfp4_weight_only", "nvfp4_weight_linear", nvfp4_row_refusal, nvfp4_linear),
    Row(
        "fp8_tma",
        "fp8_linear",
        fp8_tma_refusal,
        lambda node, target: linear_tma_spec(fp8_product(node), target),
    ),
    Row(
        "fp8_pointer",
        "fp8_linear",
        lambda node, target: no_fp8(target),
        lambda node, target: linear_pointer_spec(fp8_product(node)),
    ),
)
