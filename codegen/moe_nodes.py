"""What both families read off the node of a router or a mixture of experts, and what neither can serve."""

from torch import fx

from octavo.codegen.moe import Mixture, Numbering, Router
from octavo.codegen.row import static_size, tensor, token_count
from octavo.compiler.dims import dtype_name
from octavo.compiler.legality import named_arguments
from octavo.compiler.ops.moe import GROUP_SCORES, SCORINGS
from octavo.compiler.pointwise import ACTIVATIONS
from octavo.compiler.target import Target


def read_router(node: fx.Node) -> Router:
    given = named_arguments(node)
    grouped = given["num_groups"] > 1
    return Router(
        count=token_count(node),
        dtype=dtype_name(tensor(node, "logits")),
        bias_dtype=_dtype_if_any(node, "bias"),
        experts=static_size(node, "logits", -1),
        top_k=given["top_k"],
        scoring=given["scoring"],
        renormalize=given["renormalize"],
        groups=given["num_groups"],
        top_groups=given["top_groups"] if grouped else 1,
        group_score=given["group_score"] if grouped else "",
        scaling=float(given["scaling"]),
    )


def read_numbering(node: fx.Node) -> Numbering:
    return Numbering(
        f"({token_count(node)}) * {static_size(node, 'experts', -1)}", static_size(node, "table", 0)
    )


def read_mixture(node: fx.Node) -> Mixture:
    given = named_arguments(node)
    return Mixture(
        count=token_count(node),
        dtype=dtype_name(tensor(node, "x")),
        gate_up_bias=_dtype_if_any(node, "gate_up_bias"),
        down_bias=_dtype_if_any(node, "down_bias"),
        experts=static_size(node, "down", 0),
        top_k=static_size(node, "experts", -1),
        hidden=static_size(node, "x", -1),
        intermediate=static_size(node, "down", 2),
        out=static_size(node, "down", 1),
        activation=given["activation"],
        limit=float(given["limit"]),
        alpha=float(given["alpha"]),
    )


def router_refusal(node: fx.Node, target: Target) -> str | None:
    """Options without a meaning, and choices that cannot be made."""
    given, experts = named_arguments(node), static_size(node, "logits", -1)
    groups, top_k = given["num_groups"], given["top_k"]
    if given["scoring"] not in SCORINGS:
        return f"scoring must be one of {', '.join(SCORINGS)}, got {given['scoring']!r}"
    if not 1 <= top_k <= experts:
        return f"top_k must be 1 to {experts}, the number of experts, got {top_k}"
    if groups < 1 or experts % groups:
        return f"experts must be a multiple of groups, got {experts} and {groups}"
    if groups == 1:
        return None
    if given["group_score"] not in GROUP_SCORES:
        return f"group_score must be one of {', '.join(GROUP_SCORES)}, got {given['group_score']!r}"
    if not 1 <= given["top_groups"] <= groups:
        return f"top_groups must be 1 to {groups}, the number of groups, got {given['top_groups']}"
    if given["group_score"] == "top2_sum" and experts // groups < 2:
        return f"top2_sum needs groups of 2 experts or more, got {experts} experts in {groups} groups"
    return None


def moe_refusal(node: fx.Node, target: Target) -> str | None:
    """Activations that there are not, and weights that do not fit together."""
    reason = activation_refusal(node)
    if reason:
        return reason
    experts, intermediate = static_size(node, "down", 0), static_size(node, "down", 2)
    expected = (experts, 2 * intermediate, static_size(node, "x", -1))
    shape = tuple(static_size(node, "gate_up", axis) for axis in range(3))
    return None if shape == expected else f"gate_up must be {expected} as down and x say, got {shape}"


def activation_refusal(node: fx.Node) -> str | None:
    activation, known = named_arguments(node)["activation"], (*ACTIVATIONS, "swiglu_oai")
    return (
        None if activation in known else f"activation must be one of {', '.join(known)}, got {activation!r}"
    )


def _dtype_if_any(node: fx.Node, name: str) -> str:
    return "" if named_arguments(node)[name] is None else dtype_name(tensor(node, name))
