"""What a region computes is found by running it: the one reading of its stacks that gives its numbers, or a reason."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from octavo.passes.probe_moe import Reading, Refused, Region, matrix_sizes, read

EXPERTS, HIDDEN, INNER, TOP, TOKENS = 4, 6, 5, 2, 5
Gate = Callable[[Tensor], Tensor]


def oai(both: Tensor) -> Tensor:
    gate, up = both[..., ::2].clamp(max=7.0), both[..., 1::2].clamp(-7.0, 7.0)
    return gate * torch.sigmoid(gate * 1.5) * (up + 1)


def silu(both: Tensor) -> Tensor:
    return F.silu(both[..., :INNER]) * both[..., INNER:]


def relu_of_second(both: Tensor) -> Tensor:
    return F.relu(both[..., INNER:]) * both[..., :INNER]


def gelu_in_turn(both: Tensor) -> Tensor:
    return F.gelu(both[..., 1::2]) * both[..., ::2]


def region_of(
    gate: Gate, transposed: bool = False, of_all: bool = False, factor: float = 1.0, on_inputs: bool = False
) -> tuple[GraphModule, Region]:
    """Weights of each slot gathered, for each kind of gate; stacks (E, outputs, inputs) or the other way."""

    def mix(
        x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, bias: Tensor, down: Tensor
    ) -> Tensor:
        if transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        shares = weights.gather(1, experts) if of_all else weights
        rows = x[:, None] * shares[..., None] if on_inputs else x[:, None].expand(-1, TOP, -1)
        both = torch.einsum("tkoi,tki->tko", gate_up[experts], rows) + bias[experts].flatten(2)
        made = torch.einsum("tkoi,tki->tko", down[experts], gate(both))
        return made.sum(1) if on_inputs else (made * shares[..., None]).sum(1) * factor

    shapes = (EXPERTS, 2 * INNER, HIDDEN), (EXPERTS, 1, 2 * INNER), (EXPERTS, HIDDEN, INNER)
    gate_up, bias, down = (torch.zeros(shape) for shape in shapes)
    if transposed:
        gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
    given = (torch.zeros(TOKENS, HIDDEN), torch.zeros(TOKENS, TOP, dtype=torch.int64))
    shares = torch.zeros(TOKENS, EXPERTS if of_all else TOP)
    graph_module = make_fx(mix, tracing_mode="fake")(*given, shares, gate_up, bias, down)
    x, experts, weights, *stacks = graph_module.graph.find_nodes(op="placeholder")
    (root,) = graph_module.graph.output_node().all_input_nodes
    return graph_module, Region(root, x, experts, weights, of_all, tuple(stacks), ())


def reading_of(gate: Gate, **changes: bool) -> Reading:
    return read(*region_of(gate, **changes))


@pytest.mark.parametrize(
    ("gate", "activation", "limit", "alpha", "interleaved", "up_first"),
    [
        (oai, "swiglu_oai", 7.0, 1.5, True, False), (silu, "silu", 0.0, 1.0, False, False),
        (relu_of_second, "relu", 0.0, 1.0, False, True), (gelu_in_turn, "gelu", 0.0, 1.0, True, True),
    ],
)  # fmt: skip
def test_reads_gates(
    gate: Gate, activation: str, limit: float, alpha: float, interleaved: bool, up_first: bool
) -> None:
    found = reading_of(gate)
    assert (found.activation, found.limit, found.alpha) == (activation, limit, alpha)
    assert (found.interleaved, found.up_first, found.transposed) == (interleaved, up_first, (False, False))
    assert ([matrix_sizes(b) for b in found.gate_up_bias], found.down_bias) == ([[2 * INNER]], None)


@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_reads_either_layout_and_either_kind_of_weights(transposed: bool, of_all: bool) -> None:
    assert reading_of(silu, transposed=transposed, of_all=of_all).transposed == (transposed, transposed)


def test_refuses_what_gives_other_numbers() -> None:
    with pytest.raises(Refused, match="no weighted sum over the selected experts with a gate of silu"):
        read(*region_of(silu, factor=1.0 + 1e-6))
    with pytest.raises(Refused, match="its weights multiply what goes into the experts"):
        reading_of(silu, on_inputs=True)


def test_refuses_other_stacks() -> None:
    graph_module, region = region_of(silu)
    only = Region(region.root, region.x, region.experts, region.weights, False, region.stacks[:2], ())
    with pytest.raises(Refused, match=r"it reads 1 stacks of matrices .*, expected two"):
        read(graph_module, only)
