"""Selection rows of the Triton family for routers and mixtures of experts; rows_triton has all others."""

from torch import fx

from octavo.codegen.moe_nodes import moe_refusal, read_mixture, read_numbering, read_router, router_refusal
from octavo.codegen.moe_triton import map_spec, moe_spec, router_spec, tma_refusal
from octavo.codegen.row import Row, always, static_size
from octavo.compiler.target import Target

# Experts that a program holds at once: their scores, or where the rows of each begin.
MAX_EXPERTS = 4096


def refuse_router(node: fx.Node, target: Target) -> str | None:
    return too_many_experts(static_size(node, "logits", -1)) or router_refusal(node, target)


def refuse_moe(node: fx.Node, target: Target) -> str | None:
    return too_many_experts(static_size(node, "down", 0)) or moe_refusal(node, target)


def too_many_experts(experts: int) -> str | None:
    return f"at most {MAX_EXPERTS} experts, got {experts}" if experts > MAX_EXPERTS else None


ROWS: tuple[Row, ...] = (
    Row("router", "router", refuse_router, lambda node, target: router_spec(read_router(node))),
    Row("map_experts", "map_experts", always, lambda node, target: map_spec(read_numbering(node))),
    Row(
        "moe_tma",
        "moe",
        lambda node, target: refuse_moe(node, target) or tma_refusal(read_mixture(node), target),
        lambda node, target: moe_spec(read_mixture(node), is_tma=True),
    ),
    Row("moe_pointer", "moe", refuse_moe, lambda node, target: moe_spec(read_mixture(node), is_tma=False)),
)
