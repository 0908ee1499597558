"""Selection rows of the cpp family for mixtures of experts; rows_cpp has all others."""

from torch import fx

from octavo.codegen.kernel import KernelSpec, pointer
from octavo.codegen.moe import Mixture, Numbering, Router
from octavo.codegen.moe_nodes import (
    moe_refusal,
    read_mixture,
    read_numbering,
    read_router,
    router_refusal,
)
from octavo.codegen.row import Row, always, static_size
from octavo.codegen.rows_cpp import MAX_CHUNK, floats, scalar
from octavo.compiler.target import Target

# A token's scores, and where the rows of each expert begin, lie on the stack.
MAX_EXPERTS = 4096


def router_spec(router: Router) -> KernelSpec:
    bias = (pointer("bias", router.bias_dtype),) if router.bias_dtype else ()
    return KernelSpec(
        op="router",
        template="cpp/router.cpp.jinja",
        params=(
            ("dtype", router.dtype), ("bias", router.bias_dtype), ("scoring", router.scoring),
            ("renormalize", router.renormalize), ("group_score", router.group_score), ("EXPERTS", router.experts),
            ("TOP_K", router.top_k), ("GROUPS", router.groups), ("TOP_GROUPS", router.top_groups),
            ("SCALING", router.scaling),
        ),
        args=(
            pointer("logits", router.dtype), *bias, pointer("out_0", "fp32"), pointer("out_1", "i64"),
            scalar("num_rows", router.count),
        ),
        bytes=router.bytes,
        flops=router.flops,
        label=f"{router.dtype}_e{router.experts}_k{router.top_k}",
    )  # fmt: skip


def map_spec(numbering: Numbering) -> KernelSpec:
    return KernelSpec(
        op="map_experts",
        template="cpp/map_experts.cpp.jinja",
        params=(("EXPERTS", numbering.experts),),
        args=(
            pointer("experts", "i64"), pointer("table", "i64"), pointer("out", "i64"),
            scalar("num_pairs", numbering.pairs),
        ),
        bytes=numbering.bytes,
        label=numbering.label,
    )  # fmt: skip


def moe_spec(mixture: Mixture) -> KernelSpec:
    dtype, biases = mixture.dtype, {}
    for name in ("gate_up_bias", "down_bias"):
        bias = getattr(mixture, name)
        biases[name] = (pointer(name, bias),) if bias else ()
    return KernelSpec(
        op="moe",
        template="cpp/moe.cpp.jinja",
        params=(
            ("dtype", dtype), ("activation", mixture.activation), ("gate_up_bias", mixture.gate_up_bias),
            ("down_bias", mixture.down_bias), ("LIMIT", mixture.limit), ("ALPHA", mixture.alpha),
            ("EXPERTS", mixture.experts), ("TOP_K", mixture.top_k), ("HIDDEN", mixture.hidden),
            ("INTERMEDIATE", mixture.intermediate), ("OUT", mixture.out),
            ("GATE_UP_CHUNK", chunk(mixture.hidden)), ("DOWN_CHUNK", chunk(mixture.intermediate)),
        ),
        args=(
            pointer("x", dtype), pointer("experts", "i64"), pointer("weights", "fp32"),
            pointer("gate_up", dtype), *biases["gate_up_bias"], pointer("down", dtype), *biases["down_bias"],
            pointer("order", "i32"), pointer("hidden", dtype), pointer("parts", "fp32"),
            pointer("out", dtype), scalar("num_rows", mixture.count),
        ),
        bytes=mixture.bytes,
        flops=mixture.flops,
        label=mixture.label,
        scratch=(
            ("order", "i32", (mixture.count, mixture.top_k)),
            ("hidden", dtype, (mixture.count, mixture.top_k, mixture.intermediate)),
            ("parts", "fp32", (mixture.count, mixture.top_k, mixture.out)),
        ),
    )  # fmt: skip


def chunk(length: int) -> int:
    """Elements that one dot product takes: equal parts of up to MAX_CHUNK, in whole cache lines."""
    parts = -(-length // MAX_CHUNK)
    return -(-length // (64 * parts)) * 64


def refuse_router(node: fx.Node, target: Target) -> str | None:
    return (
        too_many_experts(static_size(node, "logits", -1))
        or router_refusal(node, target)
        or floats("logits", "bias")(node, target)
    )


def refuse_moe(node: fx.Node, target: Target) -> str | None:
    return (
        too_many_experts(static_size(node, "down", 0))
        or moe_refusal(node, target)
        or floats("x gate_up down", "gate_up_bias", "down_bias")(node, target)
    )


def too_many_experts(experts: int) -> str | None:
    return f"at most {MAX_EXPERTS} experts, got {experts}" if experts > MAX_EXPERTS else None


ROWS: tuple[Row, ...] = (
    Row("router", "router", refuse_router, lambda node, target: router_spec(read_router(node))),
    Row("map_experts", "map_experts", always, lambda node, target: map_spec(read_numbering(node))),
    Row("moe", "moe", refuse_moe, lambda node, target: moe_spec(read_mixture(node))),
)
