"""Feed-forward blocks."""

from torch import Tensor
from torch.nn import functional as F

from octavo.compiler.ops.linear import linear
from octavo.compiler.ops.op import Op, accumulator
from octavo.compiler.pointwise import ACTIVATIONS


def activate(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return F.silu(x)
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "relu":
        return F.relu(x)
    raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")


def act_mul(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up (..., 2 * intermediate), gate first; returns (..., intermediate). Shazeer 2020."""
    gate, up = gate_up.to(accumulator(gate_up)).chunk(2, dim=-1)
    return (activate(gate, activation) * up).to(gate_up.dtype)


def gated_mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, activation: str) -> Tensor:
    """x (..., hidden); gate, up (intermediate, hidden); down (hidden, intermediate)."""
    wide = accumulator(x)
    hidden = activate(linear(x, gate).to(wide), activation) * linear(x, up).to(wide)
    return linear(hidden.to(x.dtype), down)


ACT_MUL = Op(
    "act_mul(Tensor gate_up, str activation) -> Tensor",
    act_mul,
    lambda gate_up, activation: gate_up.new_empty((*gate_up.shape[:-1], gate_up.shape[-1] // 2)),
    "y = activation(gate) * up",
)
GATED_MLP = Op(
    "gated_mlp(Tensor x, Tensor gate, Tensor up, Tensor down, str activation) -> Tensor",
    gated_mlp,
    lambda x, gate, up, down, activation: x.new_empty((*x.shape[:-1], down.shape[0])),
    "y = (activation(x @ gate.T) * (x @ up.T)) @ down.T",
)
