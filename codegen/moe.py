"""What both families read off a router or a mixture of experts, what it costs, and what neither can serve."""

from dataclasses import dataclass

from torch import fx

from octavo.codegen.row import arguments, static_size, tensor, token_count
from octavo.compiler.dims import ITEM_BYTES, dtype_name
from octavo.compiler.expression import at_most
from octavo.compiler.ops.mlp import ACTIVATIONS
from octavo.compiler.ops.moe import GROUP_SCORES, SCORINGS
from octavo.compiler.program import Dim
from octavo.compiler.target import Target


@dataclass(frozen=True)
class Router:
    """One router. bias_dtype is empty without a bias; group_score without groups."""

    count: Dim
    dtype: str
    bias_dtype: str
    experts: int
    top_k: int
    scoring: str
    renormalize: bool
    groups: int
    top_groups: int
    group_score: str
    scaling: float

    @property
    def bytes(self) -> str:
        return f"({self.count}) * {self.experts * ITEM_BYTES[self.dtype] + 12 * self.top_k}"

    @property
    def flops(self) -> str:
        return f"({self.count}) * {self.experts * (self.top_k + 4)}"


def read_router(node: fx.Node) -> Router:
    given = arguments(node)
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


@dataclass(frozen=True)
class Mixture:
    """One mixture of experts. Empty dtypes of biases stand for none."""

    count: Dim
    dtype: str
    gate_up_bias: str
    down_bias: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    out: int
    activation: str
    limit: float
    alpha: float

    @property
    def pairs(self) -> str:
        """Tokens times the experts of each."""
        return f"({self.count}) * {self.top_k}"

    @property
    def bytes(self) -> str:
        """Tokens in and out, and once the weights of as many experts as the tokens can reach."""
        item = ITEM_BYTES[self.dtype]
        token = (self.hidden + self.out) * item + 12 * self.top_k
        return f"({self.count}) * {token} + ({self.reached}) * {self.expert_elements * item}"

    @property
    def reached(self) -> str:
        """Experts that the tokens can reach."""
        return at_most(self.pairs, self.experts)

    @property
    def expert_elements(self) -> int:
        return self.intermediate * (2 * self.hidden + self.out)

    @property
    def flops(self) -> str:
        return f"{self.pairs} * {2 * self.expert_elements}"

    @property
    def label(self) -> str:
        return f"{self.dtype}_e{self.experts}_k{self.top_k}_d{self.hidden}_i{self.intermediate}"


def read_mixture(node: fx.Node) -> Mixture:
    given = arguments(node)
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
    given, experts = arguments(node), static_size(node, "logits", -1)
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
    activation, known = arguments(node)["activation"], (*ACTIVATIONS, "swiglu_oai")
    if activation not in known:
        return f"activation must be one of {', '.join(known)}, got {activation!r}"
    experts, intermediate = static_size(node, "down", 0), static_size(node, "down", 2)
    expected = (experts, 2 * intermediate, static_size(node, "x", -1))
    shape = tuple(static_size(node, "gate_up", axis) for axis in range(3))
    return None if shape == expected else f"gate_up must be {expected} as down and x say, got {shape}"


def _dtype_if_any(node: fx.Node, name: str) -> str:
    return "" if arguments(node)[name] is None else dtype_name(tensor(node, name))
