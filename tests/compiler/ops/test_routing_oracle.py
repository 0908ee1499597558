"""The router, as the dialect's reference and as C++, against oracles from the papers in exact and decimal numbers."""

from collections.abc import Callable
from decimal import Decimal, localcontext

import pytest
import torch
from cpp_kernels import RUNNABLE, KernelLibrary
from experts import Routing, router_spec
from routing import BIASES, DIGITS, LOGITS, RULES, check, draw, draw_bias
from torch import Tensor

Route = Callable[[Routing, Tensor, Tensor], tuple[Tensor, Tensor]]
FP32, BF16 = torch.float32, torch.bfloat16
# Of the logits that the kernels of each rule are built for; the reference takes both.
DTYPES = {name: (FP32, BF16)[i % 2] for i, name in enumerate(RULES)} | {"deepseek-v3 without groups": FP32}


def eager(routing: Routing, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    given = bias if routing.has_bias else None
    weights, experts = torch.ops.octavo.router(logits[None], given, *routing.attributes)
    return weights[0], experts[0]


@pytest.fixture(scope="module")
def cpp() -> Route:
    kernels = KernelLibrary([router_spec(RULES[name][0], DTYPES[name]) for name in RULES], RUNNABLE[0])

    def route(routing: Routing, logits: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        shape = (len(logits), routing.top_k)
        weights, experts = torch.full(shape, float("nan")), torch.full(shape, -1)
        given = [logits, *([bias] if routing.has_bias else []), weights, experts]
        assert kernels(router_spec(routing, logits.dtype), given, [len(logits)]) == 0
        return weights, experts

    return route


@pytest.fixture(params=["eager", "cpp"])
def route(request: pytest.FixtureRequest) -> Route:
    return eager if request.param == "eager" else request.getfixturevalue("cpp")


def compare(route: Route, name: str, tokens: int, seed: int) -> tuple[int, int]:
    """Tokens that were evidence, and all."""
    routing, rule = RULES[name]
    generator, used, drawn = torch.Generator().manual_seed(seed), 0, 0
    for of_logits in LOGITS:
        for of_bias in BIASES if routing.has_bias else BIASES[:1]:
            for dtype in (FP32, BF16) if route is eager else (DTYPES[name],):
                logits = draw(of_logits, routing.experts, tokens, generator).to(dtype)
                bias = draw_bias(of_bias, routing.experts, generator)
                used += check(routing, rule, logits, bias, *route(routing, logits, bias))
                drawn += tokens
    return used, drawn


@pytest.mark.parametrize("name", RULES)
def test_selection_and_weights_are_those_of_the_paper(route: Route, name: str) -> None:
    used, drawn = compare(route, name, 4, 0)
    assert used >= 0.8 * drawn


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("name", RULES)
def test_many_draws(route: Route, name: str, seed: int) -> None:
    used, drawn = compare(route, name, 60, seed)
    assert used >= 0.8 * drawn


def one(route: Route, name: str, logits: list[float], bias: list[float]) -> tuple[list[float], list[int]]:
    """A single token, checked, and what it got."""
    routing, rule = RULES[name]
    row, added = torch.tensor([logits]).to(DTYPES[name]), torch.tensor(bias)
    weights, experts = route(routing, row, added)
    assert check(routing, rule, row, added, weights, experts) == 1
    return weights[0].tolist(), experts[0].tolist()


def test_a_large_bias_selects_and_does_not_weigh(route: Route) -> None:
    weights, experts = one(
        route, "deepseek-v3 without groups", [2.0, 1.0, 0.5, 0.0, -1.0, -3.0, -8.0], [0.0] * 6 + [1000.0]
    )
    assert experts == [6, 0, 1] and weights[0] < 1e-3


def test_what_lies_outside_of_the_groups_never_wins_though_all_is_negative(route: Route) -> None:
    """Groups 1 and 3 are best. A fill of zero would take experts of group 0 or 2 instead."""
    logits = [-1.0, -1.5, -2.0, 1.0, 0.5, -4.0, -1.0, -1.5, -2.0, 0.75, 0.25, -4.0]
    _, experts = one(route, "small deepseek-v3", logits, [-9.0] * 12)
    assert experts == [3, 9, 4]


def test_a_group_counts_by_its_two_best_and_not_by_its_best(route: Route) -> None:
    """Group 2 has the best expert of all, and little beside it."""
    logits = [1.0, 1.25, 0.0, 1.5, 0.75, 0.0, 3.0, -9.0, -9.0, -9.0, -9.0, -9.0]
    _, experts = one(route, "small deepseek-v3", logits, [0.0] * 12)
    assert experts == [3, 1, 0]


def test_a_bias_has_the_bits_of_fp32(route: Route) -> None:
    """Rounded to bf16 the last two biases would be equal, and the lower index would win."""
    bias = [0.0, 0.0, 0.0, 0.0, 0.0, 2.0, 2.001]
    assert one(route, "deepseek-v3 without groups", [0.25] * 7, bias)[1] == [6, 5, 0]
    rounded = torch.tensor(bias).bfloat16().float().tolist()
    assert one(route, "deepseek-v3 without groups", [0.25] * 7, rounded)[1] == [5, 6, 0]


def test_weights_that_are_not_divided_are_probabilities_of_all(route: Route) -> None:
    logits = [0.5] * 60
    weights, experts = one(route, "qwen2", logits, [0.0] * 60)
    assert experts == [0, 1, 2, 3]
    assert weights == pytest.approx([1 / 60] * 4, rel=1e-6)


def test_the_oracle_by_hand() -> None:
    """Logits ln 1, ln 2, ln 4 .. make shares of powers of two, whose sums are known."""
    with localcontext(prec=DIGITS):
        logits = [(Decimal(2) ** i).ln() for i in range(8)]
        found = RULES["mixtral"][1](logits, [Decimal(0)] * 8)
        assert found.experts == [7, 6] and found.is_sure
        assert [round(w, 30) for w in found.weights] == [round(Decimal(n) / 3, 30) for n in (2, 1)]
        # sigmoid(ln 3) = 3/4, sigmoid(0) = 1/2, sigmoid(-ln 3) = 1/4
        three = Decimal(3).ln()
        logits = [three, -three, Decimal(0), Decimal(0), -three, -three, -three]
        found = RULES["deepseek-v3 without groups"][1](logits, [Decimal(0)] * 6 + [Decimal(1)])
        assert found.experts == [6, 0, 2]
        assert [round(w, 30) for w in found.weights] == [round(Decimal(n) / 6, 30) for n in (1, 3, 2)]
