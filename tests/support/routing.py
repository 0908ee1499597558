"""Routers by the papers, in exact numbers and in decimal ones of sixty digits; shares no code with ops or kernels.

DeepSeek-V2 (arXiv 2405.04434, 2.1.2) and V3 (2412.19437, 2.1.2), Mixtral (2401.04088, 2.1), Qwen3 (2505.09388), gpt-oss
(2508.10925). Of equal scores the lower index comes first. A kernel computes in fp32 and cannot tell apart what lies
closer than its roundings: such a token is no evidence, unless the numbers themselves are equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from experts import Routing
from torch import Tensor

DIGITS = 60
# Relative to what a score is made of: some roundings of fp32, which are 2^-24 each.
MARGIN = Decimal(2) ** -18


@dataclass(frozen=True)
class Score:
    """of: the numbers that it is made of; equal ones make equal scores in fp32 too. size: of the largest of them."""

    value: Decimal
    of: tuple[Any, ...]
    size: Decimal


@dataclass(frozen=True)
class Routed:
    """One token's experts, best first, and their weights. is_sure: fp32 tells apart all that was compared."""

    experts: list[int]
    weights: list[Decimal]
    is_sure: bool


Rule = Callable[[Sequence[Decimal], Sequence[Decimal]], Routed]


@cache
def exp(x: Decimal) -> Decimal:
    return x.exp()


def sigmoid(x: Decimal) -> Decimal:
    return 1 / (1 + exp(-x))


def softmax(xs: Sequence[Decimal]) -> list[Decimal]:
    powers = [exp(x - max(xs)) for x in xs]
    return [power / sum(powers) for power in powers]


def best(scores: Sequence[Score], count: int) -> tuple[list[int], bool]:
    """Indices of the largest, and whether they are so beyond doubt."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i].value, i))
    compared = [scores[i] for i in order[: count + 1]]
    return order[:count], all(
        a.of == b.of or a.value - b.value > MARGIN * max(a.size, b.size) for a, b in pairwise(compared)
    )


def plain(numbers: Sequence[Decimal], of: Sequence[Decimal]) -> list[Score]:
    """Scores that follow from one logit each."""
    return [Score(value, (x,), abs(value)) for value, x in zip(numbers, of, strict=True)]


def mixtral(top_k: int) -> Rule:
    """Softmax(TopK(x W_g)): also gpt-oss, which takes its four so."""

    def rule(logits: Sequence[Decimal], _: Sequence[Decimal]) -> Routed:
        experts, is_sure = best(plain(logits, logits), top_k)
        return Routed(experts, softmax([logits[e] for e in experts]), is_sure)

    return rule


def qwen(top_k: int, is_normalised: bool) -> Rule:
    """Probabilities over all experts; Qwen3 divides those of the selected by their sum, Qwen2 does not."""

    def rule(logits: Sequence[Decimal], _: Sequence[Decimal]) -> Routed:
        shares = softmax(logits)
        experts, is_sure = best(plain(shares, logits), top_k)
        total = sum(shares[e] for e in experts) if is_normalised else Decimal(1)
        return Routed(experts, [shares[e] / total for e in experts], is_sure)

    return rule


def deepseek_v2(top_k: int, groups: int, top_groups: int, factor: Decimal) -> Rule:
    """Softmax; of the groups (devices) those whose best expert is best; weights are not divided by their sum."""

    def rule(logits: Sequence[Decimal], _: Sequence[Decimal]) -> Routed:
        shares = softmax(logits)
        scores, size = plain(shares, logits), len(logits) // groups
        kept, first = best([max(part, key=lambda s: s.value) for part in parts_of(scores, size)], top_groups)
        experts, second = best_within(scores, kept, size, top_k)
        return Routed(experts, [shares[e] * factor for e in experts], first and second)

    return rule


def deepseek_v3(top_k: int, groups: int, top_groups: int, factor: Decimal) -> Rule:
    """Affinities are sigmoids. The bias takes part in what is compared; the weights are of affinities alone.

    Nodes (groups) are limited to those whose K_r / M = 2 highest sum is highest.
    """

    def rule(logits: Sequence[Decimal], bias: Sequence[Decimal]) -> Routed:
        affinities, size = [sigmoid(x) for x in logits], len(logits) // groups
        scores = [Score(s + b, (x, b), s + abs(b)) for s, b, x in zip(affinities, bias, logits, strict=True)]
        kept, first = best([best_two(part) for part in parts_of(scores, size)], top_groups)
        experts, second = best_within(scores, kept, size, top_k)
        total = sum(affinities[e] for e in experts)
        return Routed(experts, [affinities[e] / total * factor for e in experts], first and second)

    return rule


def unit(top_k: int, factor: Decimal) -> Rule:
    def rule(logits: Sequence[Decimal], bias: Sequence[Decimal]) -> Routed:
        scores = [Score(x + b, (x, b), abs(x) + abs(b)) for x, b in zip(logits, bias, strict=True)]
        experts, is_sure = best(scores, top_k)
        return Routed(experts, [factor] * top_k, is_sure)

    return rule


def parts_of(scores: Sequence[Score], size: int) -> list[Sequence[Score]]:
    return [scores[i : i + size] for i in range(0, len(scores), size)]


def best_two(part: Sequence[Score]) -> Score:
    a, b = sorted(part, key=lambda score: -score.value)[:2]
    return Score(a.value + b.value, (a.of, b.of), a.size + b.size)


def best_within(scores: Sequence[Score], kept: list[int], size: int, top_k: int) -> tuple[list[int], bool]:
    """Of the experts of some groups only."""
    inside = [e for e in range(len(scores)) if e // size in kept]
    found, is_sure = best([scores[e] for e in inside], top_k)
    return [inside[i] for i in found], is_sure


RULES: dict[str, tuple[Routing, Rule]] = {
    "mixtral": (Routing(8, 2, "softmax"), mixtral(2)),
    "mixtral, as its paper writes it": (Routing(8, 2, "softmax_selected", renormalize=False), mixtral(2)),
    "gpt-oss": (Routing(32, 4, "softmax_selected", renormalize=False), mixtral(4)),
    "qwen3": (Routing(128, 8, "softmax"), qwen(8, True)),
    "qwen2": (Routing(60, 4, "softmax", renormalize=False), qwen(4, False)),
    "deepseek-v2": (
        Routing(
            40, 6, "softmax", renormalize=False, num_groups=8, top_groups=3, group_score="max", scaling=16.0
        ),
        deepseek_v2(6, 8, 3, Decimal(16)),
    ),
    "deepseek-v3": (
        Routing(
            256, 8, "sigmoid", num_groups=8, top_groups=4, group_score="top2_sum", scaling=2.5, has_bias=True
        ),
        deepseek_v3(8, 8, 4, Decimal("2.5")),
    ),
    "small deepseek-v3": (
        Routing(
            12, 3, "sigmoid", num_groups=4, top_groups=2, group_score="top2_sum", scaling=0.5, has_bias=True
        ),
        deepseek_v3(3, 4, 2, Decimal("0.5")),
    ),
    "deepseek-v3 without groups": (
        Routing(7, 3, "sigmoid", scaling=1.0, has_bias=True),
        deepseek_v3(3, 1, 1, Decimal(1)),
    ),
    "unit": (Routing(9, 4, "unit", renormalize=False, scaling=0.25, has_bias=True), unit(4, Decimal("0.25"))),
}
# The drawn logits of a token, and biases, by name.
LOGITS = ("spread", "ties", "negative", "equal", "close")
BIASES = ("none", "small", "all negative", "one large", "all large")


def draw(name: str, experts: int, tokens: int, generator: torch.Generator) -> Tensor:
    """(tokens, experts) fp32."""
    normal = torch.randn(tokens, experts, generator=generator)
    return {
        "spread": 3 * normal,
        "ties": (2 * normal).round() / 2,
        "negative": -(normal.abs() + 1).clamp(max=9.0),
        "equal": torch.full_like(normal, -0.75),
        "close": 1.5 + (8 * normal).round() / 256,
    }[name]


def draw_bias(name: str, experts: int, generator: torch.Generator) -> Tensor:
    """(experts,) fp32."""
    small = torch.randn(experts, generator=generator) * 0.1
    one = torch.zeros(experts)
    one[int(torch.randint(0, experts, (1,), generator=generator))] = 50.0
    # A sum of two of these scores is below zero, so that what is left out must be less than nothing.
    return {
        "none": torch.zeros(experts), "small": small, "all negative": small - 3.0, "one large": small + one,
        "all large": 64.0 + (4 * small).round(),
    }[name]  # fmt: skip


def check(
    routing: Routing, rule: Rule, logits: Tensor, bias: Tensor, weights: Tensor, experts: Tensor
) -> int:
    """How many tokens were evidence. logits (T, E), bias (E,), weights and experts (T, K)."""
    used = 0
    with localcontext(prec=DIGITS):
        added = [Decimal(b) for b in bias.tolist()]
        for row, got, chosen in zip(logits.tolist(), weights.tolist(), experts.tolist(), strict=True):
            wanted = rule([Decimal(x) for x in row], added)
            if not wanted.is_sure:
                continue
            used += 1
            assert chosen == wanted.experts, (row, bias.tolist())
            close = [
                abs(Decimal(g) - w) <= w * Decimal(2) ** -19 for g, w in zip(got, wanted.weights, strict=True)
            ]
            assert all(close), (got, wanted.weights)
            if routing.renormalize:
                assert abs(sum(got) / routing.scaling - 1) <= routing.top_k * 2.0**-23
    return used
