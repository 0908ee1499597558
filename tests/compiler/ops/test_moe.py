"""The router and the experts against plain torch, written another way: loops over tokens, no stacked products."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from octavo.compiler import ops  # noqa: F401  (registers the dialect)

octavo = torch.ops.octavo
PLAIN = (1, 1, "top2_sum", 1.0)  # no groups, no scaling


def routed(
    logits: list[float] | Tensor, bias: Tensor | None = None, top_k: int = 2, scoring: str = "softmax",
    renormalize: bool = False, groups: tuple[int, int, str, float] = PLAIN,
) -> tuple[list[float], list[int]]:  # fmt: skip
    """The weights and experts of one token."""
    row = torch.as_tensor(logits, dtype=torch.float32)[None, None]
    weights, experts = octavo.router(row, bias, top_k, scoring, renormalize, *groups)
    assert (weights.dtype, experts.dtype) == (torch.float32, torch.int64)
    assert weights.shape == experts.shape == (1, 1, top_k)
    return weights[0, 0].tolist(), experts[0, 0].tolist()


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_a_bias_selects_but_does_not_weigh() -> None:
    logits = [2.0, 1.0, -1.0, -3.0]
    bias = torch.tensor([0.0, 0.0, 0.0, 50.0])
    weights, experts = routed(logits, bias, 2, "sigmoid", True, (1, 1, "top2_sum", 2.5))
    assert experts == [3, 0]
    raw = [sigmoid(-3.0), sigmoid(2.0)]
    assert weights == pytest.approx([2.5 * w / sum(raw) for w in raw], rel=1e-6)


def test_experts_outside_the_best_groups_are_out_even_where_all_scores_are_negative() -> None:
    # Group 1 has the best expert, group 0 the best two together; with a fill of zero, group 1 would be selected.
    logits, bias = [0.0, 0.0, 3.0, -6.0], torch.full((4,), -10.0)
    weights, experts = routed(logits, bias, 2, "sigmoid", False, (2, 1, "top2_sum", 1.0))
    assert experts == [0, 1]
    assert weights == pytest.approx([0.5, 0.5])


def test_groups_are_scored_by_their_best_or_by_their_best_two() -> None:
    logits = [1.0, 0.9, 1.5, -9.0]
    assert routed(logits, None, 1, "sigmoid", False, (2, 1, "top2_sum", 1.0))[1] == [0]
    assert routed(logits, None, 1, "sigmoid", False, (2, 1, "max", 1.0))[1] == [2]


def test_a_bias_rounded_to_bf16_selects_others() -> None:
    logits, bias = [0.0, 0.0], torch.tensor([1.0, 1.001])
    assert routed(logits, bias, 1, "sigmoid")[1] == [1]
    assert routed(logits, bias.bfloat16(), 1, "sigmoid")[1] == [0]


def test_weights_are_probabilities_and_sum_to_one_only_when_renormalized() -> None:
    logits = [3.0, 1.0, 0.0, -1.0]
    total = sum(math.exp(x) for x in logits)
    weights, experts = routed(logits)
    assert experts == [0, 1]
    assert weights == pytest.approx([math.exp(3.0) / total, math.exp(1.0) / total], rel=1e-6)
    weights, _ = routed(logits, renormalize=True)
    assert sum(weights) == pytest.approx(1.0)
    assert weights == pytest.approx(routed(logits, scoring="softmax_selected")[0], rel=1e-6)


def test_logits_only_select_where_every_weight_is_one() -> None:
    weights, experts = routed(
        [-3.0, 0.0, -1.0], torch.tensor([5.0, 0.0, 0.0]), 2, "unit", False, (1, 1, "max", 2.5)
    )
    assert (weights, experts) == ([2.5, 2.5], [0, 1])


def test_equal_scores_take_the_lower_index() -> None:
    for scoring in ("softmax", "sigmoid", "softmax_selected", "unit"):
        assert routed([1.0, 2.0, 1.0, 2.0, 1.0], None, 4, scoring)[1] == [1, 3, 0, 2]
    assert routed(torch.zeros(64), None, 8, "sigmoid", False, (8, 2, "max", 1.0))[1] == list(range(8))


def test_bf16_logits_are_scored_in_fp32() -> None:
    logits = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    weights, experts = octavo.router(logits, None, 3, "softmax", False, *PLAIN)
    expected = logits.float().softmax(-1)
    assert weights.dtype is torch.float32
    assert torch.equal(weights, expected.gather(-1, experts))
    assert octavo.router(logits.double(), None, 3, "softmax", False, *PLAIN)[0].dtype is torch.float64


def test_refuses_names_it_does_not_know() -> None:
    with pytest.raises(
        ValueError, match=r"scoring must be one of softmax, sigmoid, softmax_selected, unit, got 'tanh'"
    ):
        routed([0.0, 1.0], scoring="tanh")
    with pytest.raises(ValueError, match=r"group_score must be one of top2_sum, max, got 'mean'"):
        routed([0.0, 1.0, 2.0, 3.0], groups=(2, 1, "mean", 1.0))


TOKENS, EXPERTS, SLOTS, HIDDEN, WIDTH = 5, 4, 2, 6, 3


def made(dtype: torch.dtype, bias: bool) -> tuple[Any, ...]:
    """x, experts, weights, gate_up, gate_up_bias, down, down_bias with values past a clamp of one."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    experts = torch.stack([torch.randperm(EXPERTS, generator=generator)[:SLOTS] for _ in range(TOKENS)])
    weights = torch.rand(1, TOKENS, SLOTS, generator=generator).to(torch.promote_types(dtype, torch.float32))
    return (
        random(1, TOKENS, HIDDEN), experts[None], weights, random(EXPERTS, 2 * WIDTH, HIDDEN),
        random(EXPERTS, 2 * WIDTH) if bias else None, random(EXPERTS, HIDDEN, WIDTH),
        random(EXPERTS, HIDDEN) if bias else None,
    )  # fmt: skip


GATES: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "silu": lambda g, u, _: F.silu(g) * u,
    "gelu": lambda g, u, _: F.gelu(g) * u,
    "gelu_tanh": lambda g, u, _: F.gelu(g, approximate="tanh") * u,
    "relu": lambda g, u, _: F.relu(g) * u,
    "swiglu_oai": lambda g, u, alpha: g / (1 + torch.exp(-alpha * g)) * (1 + u),
}


def looped(values: tuple[Any, ...], activation: str, limit: float, alpha: float) -> Tensor:
    """Token by token, as the models' own loops have it."""
    x, experts, weights, gate_up, gate_up_bias, down, down_bias = values
    result = torch.zeros_like(x)
    for t, k in itertools.product(range(TOKENS), range(SLOTS)):
        e = int(experts[0, t, k])
        if e == -1:
            continue
        first, second = (None, None) if gate_up_bias is None else gate_up_bias[e].split(WIDTH)
        gate, up = F.linear(x[0, t], gate_up[e, :WIDTH], first), F.linear(x[0, t], gate_up[e, WIDTH:], second)
        if limit:
            gate, up = torch.minimum(gate, torch.full_like(gate, limit)), torch.clip(up, -limit, limit)
        hidden = GATES[activation](gate, up, alpha)
        result[0, t] += weights[0, t, k] * F.linear(
            hidden, down[e], None if down_bias is None else down_bias[e]
        )
    return result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", GATES)
def test_experts_equal_a_loop_over_tokens(activation: str, bias: bool) -> None:
    values = made(torch.float64, bias)
    for limit in (0.0, 1.0):
        expected = looped(values, activation, limit, 1.7)
        assert torch.allclose(octavo.moe(*values, activation, limit, 1.7), expected, rtol=1e-12, atol=1e-12)


def test_a_slot_without_an_expert_adds_nothing_whatever_its_weight() -> None:
    x, experts, weights, *rest = made(torch.float64, True)
    experts[0, 0, 1] = experts[0, 2, 0] = experts[0, 3, :] = -1
    weights[experts < 0] = float("nan")
    expected = looped((x, experts, weights, *rest), "silu", 0.0, 1.0)
    result = octavo.moe(x, experts, weights, *rest, "silu", 0.0, 1.0)
    assert torch.allclose(result, expected, rtol=1e-12, atol=1e-12)
    assert not result[0, 3].any()
    # A slot more that is nobody's changes no bit.
    wider = torch.cat((torch.full_like(experts[..., :1], -1), experts), -1)
    shares = torch.cat((torch.full_like(weights[..., :1], float("inf")), weights), -1)
    assert torch.equal(octavo.moe(x, wider, shares, *rest, "silu", 0.0, 1.0), result)
    assert not octavo.moe(x, torch.full_like(experts, -1), weights, *rest, "silu", 0.0, 1.0).any()


def test_no_token_makes_no_row() -> None:
    x, experts, weights, *rest = made(torch.bfloat16, True)
    none = octavo.moe(x[:, :0], experts[:, :0], weights[:, :0], *rest, "silu", 0.0, 1.0)
    assert none.shape == (1, 0, HIDDEN) and none.dtype is torch.bfloat16
    shares, chosen = octavo.router(torch.empty(1, 0, 8), None, 2, "softmax", True, *PLAIN)
    assert shares.shape == chosen.shape == (1, 0, 2)


@pytest.mark.parametrize("wrong", [-2, EXPERTS, 2**40])
def test_any_other_expert_that_there_is_not_is_an_error(wrong: int) -> None:
    x, experts, weights, *rest = made(torch.float64, False)
    experts[0, 1, 1] = wrong
    with pytest.raises(IndexError, match=f"experts must be 0 to 3, or -1 for none, got .*{wrong}"):
        octavo.moe(x, experts, weights, *rest, "silu", 0.0, 1.0)


def test_a_clamp_and_alpha_matter() -> None:
    values = made(torch.float64, False)
    results = [
        octavo.moe(*values, "swiglu_oai", *numbers) for numbers in ((0.0, 1.7), (1.0, 1.7), (1.0, 1.0))
    ]
    assert not any(torch.allclose(a, b) for a, b in itertools.pairwise(results))


def test_a_token_has_the_same_bits_in_any_company() -> None:
    x, experts, weights, *rest = made(torch.bfloat16, True)
    whole = octavo.moe(x, experts, weights, *rest, "silu", 0.0, 1.0)
    for t in range(TOKENS):
        alone = (v[:, t : t + 1] for v in (x, experts, weights))
        assert torch.equal(octavo.moe(*alone, *rest, "silu", 0.0, 1.0), whole[:, t : t + 1])


def test_the_sum_over_slots_is_in_fp32() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.bfloat16)
    gate_up, down = torch.ones(3, 2, 1).bfloat16(), torch.tensor([256.0, 1.0, 1.0]).bfloat16()[:, None, None]
    slots, weights = torch.tensor([[[0, 1, 2]]]), torch.ones(1, 1, 3)
    # In bf16, 256 + 1 is 256 again.
    assert octavo.moe(one, slots, weights, gate_up, None, down, None, "relu", 0.0, 1.0).item() == 258


def test_shapes_of_fake_results() -> None:
    with FakeTensorMode():
        logits, x = (torch.empty(1, 7, width, dtype=torch.bfloat16) for width in (256, 64))
        weights, experts = octavo.router(logits, None, 8, "sigmoid", True, *PLAIN)
        stacked = (torch.empty(256, 32, 64), None, torch.empty(256, 64, 16), None)
        result = octavo.moe(x, experts, weights, *stacked, "silu", 0.0, 1.0)
    assert (tuple(weights.shape), weights.dtype) == ((1, 7, 8), torch.float32)
    assert (tuple(experts.shape), experts.dtype) == ((1, 7, 8), torch.int64)
    assert (tuple(result.shape), result.dtype) == ((1, 7, 64), torch.bfloat16)
