"""What both families read off the node of a mixture of quantised experts, and what neither can serve."""

from dataclasses import dataclass, replace

from torch import fx

from octavo.codegen.moe import Mixture
from octavo.codegen.moe_nodes import activation_refusal, read_mixture
from octavo.codegen.row import op_name, static_size, tensor
from octavo.compiler.legality import named_arguments
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS
from octavo.compiler.target import Target

SCHEMES = {"nvfp4_moe": "nvfp4", "nvfp4_weight_moe": "weight_only", "fp8_moe": "fp8"}
# Bits of an element of a weight or of a row, with its share of a block scale.
BITS = {"nvfp4": 4.5, "weight_only": 4.5, "fp8": 8.0}


@dataclass(frozen=True)
class QuantizedMixture(Mixture):
    """One mixture of quantised experts. scheme: nvfp4, weight_only or fp8.

    alphas       numbers that an expert's sums are multiplied by, of gate_up and of down
    x_outer, hidden_outer  whether the outer scales of rows are given; else each row has its own
    layout       of block scales; interleaved: gate and up rows in turn
    """

    scheme: str = ""
    alphas: tuple[int, int] = (1, 1)
    x_outer: bool = False
    hidden_outer: bool = False
    layout: str = "linear"
    interleaved: bool = False

    @property
    def weight_bits(self) -> float:
        return BITS[self.scheme]

    @property
    def bytes(self) -> str:
        """As of a plain mixture, with the weights and alphas of the experts that are reached in their format."""
        weights = int(self.expert_elements * self.weight_bits) // 8 + 4 * sum(self.alphas)
        return f"({self.count}) * {self.token_bytes} + ({self.reached}) * {weights}"

    @property
    def label(self) -> str:
        return f"{self.scheme}_{super().label}"


def read_quantized_mixture(node: fx.Node) -> QuantizedMixture:
    given, plain = named_arguments(node), read_mixture(node)
    scheme = SCHEMES[str(op_name(node))]
    return QuantizedMixture(
        **vars(replace(plain, intermediate=_elements(scheme, plain.intermediate))),
        scheme=scheme,
        alphas=(static_size(node, "gate_up_alpha", 1), static_size(node, "down_alpha", 1)),
        x_outer=given.get("x_outer") is not None,
        hidden_outer=given.get("hidden_outer") is not None,
        layout=given.get("layout", "linear"),
        interleaved=given["interleaved"],
    )


def _elements(scheme: str, stored: int) -> int:
    """Elements of a row of weights that is stored in so many."""
    return stored if scheme == "fp8" else 2 * stored


def quantized_moe_refusal(node: fx.Node, target: Target) -> str | None:
    """Activations that there are not, and weights and alphas that do not fit together."""
    reason = activation_refusal(node)
    if reason:
        return reason
    mixture = read_quantized_mixture(node)
    experts, half, hidden = mixture.experts, mixture.intermediate, mixture.hidden
    stored = static_size(node, "gate_up", 2)
    shape = (*tensor(node, "gate_up").shape[:2], _elements(mixture.scheme, stored))
    if shape != (experts, 2 * half, hidden) or mixture.out != hidden:
        return f"gate_up must hold {(experts, 2 * half, hidden)} as down and x say, got {shape}"
    odd = [length for length in (hidden, half) if length % BLOCK_ELEMENTS]
    if odd and mixture.scheme != "fp8":
        return f"rows must be whole blocks of {BLOCK_ELEMENTS} elements, got {odd[0]}"
    for name, alphas, allowed in (
        ("gate_up", mixture.alphas[0], (1, 2, 2 * half)), ("down", mixture.alphas[1], (1, hidden)),
    ):  # fmt: skip
        if alphas not in allowed:
            return f"{name}_alpha must have {' or '.join(map(str, allowed))} numbers an expert, got {alphas}"
    return None
