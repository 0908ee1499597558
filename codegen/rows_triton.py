"""Selection rows of the Triton family: what each kernel refuses, and the shapes it is made for."""

from collections.abc import Callable

from torch import fx

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.linear_triton import Product, linear_pointer_spec, linear_tma_spec, tma_refusal
from octavo.codegen.moe_rows_triton import ROWS as MOE_ROWS
from octavo.codegen.row import (
    Row,
    always,
    dtype_of,
    result_dtype,
    row_count,
    static_size,
    tensor,
    token_count,
)
from octavo.codegen.specs_triton import (
    act_mul_spec,
    add_spec,
    gather_rows_spec,
    layer_norm_spec,
    pointwise_spec,
    rms_norm_spec,
    rope_spec,
)
from octavo.compiler.legality import named_arguments
from octavo.compiler.ops.pointwise import kind
from octavo.compiler.pointwise import NAMES
from octavo.compiler.target import Target

# The widest row that a program holds at once: 32 elements a thread of 16 warps.
MAX_ROW = 16384

Reject = Callable[[fx.Node, Target], str | None]


def wider_than_a_program(name: str) -> Reject:
    """Refuses rows of that argument which one program cannot hold."""

    def reject(node: fx.Node, target: Target) -> str | None:
        width = static_size(node, name, -1)
        return (
            f"rows of {name} must have at most {MAX_ROW} elements, got {width}" if width > MAX_ROW else None
        )

    return reject


def embedding(node: fx.Node, target: Target) -> KernelSpec:
    width, dtype = static_size(node, "weight", 1), dtype_of(node, "weight")
    return gather_rows_spec("embedding", "ids", "weight", row_count(node), width, dtype)


def gather_logits(node: fx.Node, target: Target) -> KernelSpec:
    width, dtype = static_size(node, "hidden", 2), dtype_of(node, "hidden")
    return gather_rows_spec("gather_logits", "logit_rows", "hidden", row_count(node), width, dtype)


def add(node: fx.Node, target: Target) -> KernelSpec:
    width = 1
    for axis in range(2, tensor(node, "x").dim()):
        width *= static_size(node, "x", axis)
    return add_spec(row_count(node), width, dtype_of(node, "x"))


def rms_norm(node: fx.Node, target: Target) -> KernelSpec:
    given = named_arguments(node)
    hidden, dtype = static_size(node, "x", -1), dtype_of(node, "x")
    sizes = (row_count(node), hidden, dtype, given["eps"], given["offset"], "residual" in given)
    return rms_norm_spec(*sizes, weight_dtype=dtype_of(node, "weight"))


def layer_norm(node: fx.Node, target: Target) -> KernelSpec:
    given, dtype = named_arguments(node), dtype_of(node, "x")
    weights = {name: dtype_of(node, name) for name in ("weight", "bias") if given[name] is not None}
    return layer_norm_spec(row_count(node), static_size(node, "x", -1), dtype, float(given["eps"]), weights)


def pointwise(node: fx.Node, target: Target) -> KernelSpec:
    given = named_arguments(node)
    operands = {
        name: (dtype_of(node, name), kind(tensor(node, name), tensor(node, "a")))
        for name in NAMES
        if given[name] is not None
    }
    width = static_size(node, "a", -1)
    return pointwise_spec(row_count(node), width, operands, given["expression"], result_dtype(node))


def act_mul(node: fx.Node, target: Target) -> KernelSpec:
    intermediate = static_size(node, "gate_up", -1) // 2
    return act_mul_spec(
        row_count(node), intermediate, dtype_of(node, "gate_up"), named_arguments(node)["activation"]
    )


def rope(node: fx.Node, target: Target) -> KernelSpec:
    num_heads, head_dim = static_size(node, "x", 2), static_size(node, "x", 3)
    rotary_dim, is_interleaved = static_size(node, "cos", -1), named_arguments(node)["interleaved"]
    return rope_spec(token_count(node), num_heads, head_dim, rotary_dim, dtype_of(node, "x"), is_interleaved)


def product(node: fx.Node) -> Product:
    n, k = static_size(node, "weight", 0), static_size(node, "weight", 1)
    has_bias = named_arguments(node)["bias"] is not None
    return Product(row_count(node), n, k, dtype_of(node, "weight"), result_dtype(node), has_bias)


ROWS: tuple[Row, ...] = (
    Row("embedding", "embedding", wider_than_a_program("weight"), embedding),
    Row("gather_logits", "gather_logits", wider_than_a_program("hidden"), gather_logits),
    Row("add", "add", always, add),
    Row("rms_norm", "rms_norm", wider_than_a_program("x"), rms_norm),
    Row("add_rms_norm", "add_rms_norm", wider_than_a_program("x"), rms_norm),
    Row(
        "linear_tma",
        "linear",
        lambda node, target: tma_refusal(product(node), target),
        lambda node, target: linear_tma_spec(product(node), target),
    ),
    Row("linear_pointer", "linear", always, lambda node, target: linear_pointer_spec(product(node))),
    Row("rope", "rope", always, rope),
    Row("act_mul", "act_mul", always, act_mul),
    Row("layer_norm", "layer_norm", wider_than_a_program("x"), layer_norm),
    Row("pointwise", "pointwise", always, pointwise),
    *MOE_ROWS,
)
