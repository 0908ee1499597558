"""What a graph may hold at each stage, and the checker that runs after every pass."""

from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.origin import where
from octavo.compiler.program import COLLECTIVES as COLLECTIVE_NAMES

Stage = Literal["captured", "canonical", "fused", "paged", "lowered", "quantized", "parallel"]

KERNELS = frozenset(
    "octavo::" + name
    for name in (
        "embedding", "rms_norm", "add_rms_norm", "linear", "rope", "kv_write", "rope_kv_write",
        "paged_attention", "act_mul", "gather_logits", "add", "layer_norm", "pointwise",
        "head_linear", "latent_write", "paged_mla_attention",
        "router", "map_experts", "moe",
    )
)  # fmt: skip
# What the passes that quantise add.
QUANTIZED_KERNELS = frozenset(
    "octavo::" + name
    for name in (
        "quantize", "rms_norm_quantize", "add_rms_norm_quantize", "act_mul_quantize",
        "nvfp4_linear", "nvfp4_weight_linear", "fp8_linear", "nvfp4_moe", "nvfp4_weight_moe", "fp8_moe",
    )
)  # fmt: skip
# What ranks do together.
COLLECTIVES = frozenset("octavo::" + name for name in COLLECTIVE_NAMES)
VIEWS = frozenset(("aten::reshape", "getitem"))
# Spellings that canonicalize removes, so that patterns need not know them.
REMOVED = frozenset(
    "aten::" + name
    for name in (
        "_assert_tensor_metadata", "alias", "detach", "contiguous", "clone", "dropout", "view",
        "_unsafe_view", "unsqueeze", "squeeze", "transpose", "t", "linear", "embedding", "type_as", "to",
    )
)  # fmt: skip
ATTENTION = frozenset(
    ("octavo::attention", "aten::softmax", "aten::_softmax", "aten::scaled_dot_product_attention")
)
LATENT = frozenset(("octavo::mla_attention", "octavo::latent_attention"))

# Of masks and scores these may stay until attention is found.
VIEWS_OF_PAIRS = frozenset("aten::" + name for name in ("view", "_unsafe_view", "unsqueeze", "squeeze"))

# None: anything may remain. Otherwise the ops that must be gone, or the only ones that may stay.
LEGAL: dict[Stage, frozenset[str] | None] = {
    "captured": None, "canonical": None, "fused": None, "paged": None, "lowered": KERNELS | VIEWS,
    "quantized": KERNELS | QUANTIZED_KERNELS | VIEWS,
    "parallel": KERNELS | QUANTIZED_KERNELS | VIEWS | COLLECTIVES,
}  # fmt: skip
ILLEGAL: dict[Stage, frozenset[str]] = {
    "captured": frozenset(), "canonical": REMOVED, "fused": REMOVED | (ATTENTION - {"octavo::attention"}),
    "paged": REMOVED | ATTENTION | LATENT, "lowered": frozenset(), "quantized": frozenset(),
    "parallel": frozenset(),
}  # fmt: skip


def op(node: Node) -> str:
    """`aten::mul`, `octavo::linear`, `getitem`."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "__name__", str(target))


def named_arguments(node: Node) -> dict[str, Any]:
    """Arguments of a call by the schema's names, defaults filled in; tensors are nodes."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload), f"{node.format_node()} calls no op"
    values: dict[str, Any] = {}
    for index, parameter in enumerate(target._schema.arguments):
        if index < len(node.args):
            values[parameter.name] = node.args[index]
        else:
            values[parameter.name] = node.kwargs.get(parameter.name, parameter.default_value)
    return values


def is_attention(node: Node) -> bool:
    """An attention, or the softmax over keys inside one: its last axis is a length, not a number of experts."""
    if op(node) not in ATTENTION:
        return False
    return "softmax" not in op(node) or not isinstance(node.meta["val"].shape[-1], int)


def check(graph_module: GraphModule, stage: Stage, after: str) -> None:
    """Raise IllegalGraphError for the first node that `stage` does not allow, or that lacks its shape."""
    legal, illegal = LEGAL[stage], ILLEGAL[stage]
    # Sizes last: they are only left over by an op that says more about the cause.
    for node in sorted(graph_module.graph.nodes, key=_is_size):
        if node.op not in ("placeholder", "get_attr", "call_function", "output"):
            raise IllegalGraphError(f"{after}: {node.op} {node.name} is not a call of an op")
        if node.op == "call_function":
            _check_call(node, stage, after, legal, illegal)


def _check_call(
    node: Node, stage: Stage, after: str, legal: frozenset[str] | None, illegal: frozenset[str]
) -> None:
    name = op(node)
    if (
        stage in ("lowered", "quantized", "parallel")
        and name == "aten::reshape"
        and _leading(node) != _leading(node.all_input_nodes[0])
    ):
        raise IllegalGraphError(
            f"{after}: {name} joins or splits the token axis ({where(node)}); tokens of different "
            "sequences lie next to each other in a step, so no value may mix them"
        )
    if stage == "canonical" and name in VIEWS_OF_PAIRS and _is_of_pairs(node):
        return
    if (name in illegal and (name not in ATTENTION or is_attention(node))) or (
        legal is not None and name not in legal
    ):
        raise IllegalGraphError(
            f"{after}: {name} is not legal in a {stage} graph ({where(node)}); " + _advice(stage, name, legal)
        )
    if "val" not in node.meta:
        raise IllegalGraphError(f"{after}: {where(node)} has no inferred shape")


def _is_of_pairs(node: Node) -> bool:
    """A value for each pair of tokens: its view has two symbolic sizes, which no -1 can stand for."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and sum(not isinstance(d, int) for d in value.shape) > 1


def _is_size(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _leading(node: Node) -> str:
    """The first axis that is not of size one: that of the tokens."""
    return next((str(d) for d in node.meta["val"].shape if not (isinstance(d, int) and d == 1)), "1")


def _advice(stage: Stage, name: str, legal: frozenset[str] | None) -> str:
    if legal is None:
        return "a pass before this stage should have replaced it"
    return f"kernels exist for {', '.join(sorted(n.removeprefix('octavo::') for n in legal - VIEWS))}"
