"""Router arithmetic in the spellings of real models becomes octavo.router with its attributes, each one proven."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from stages import BF16, FP32, SETTINGS, after, assert_idempotent, assert_same_numbers, calls, count, tokens
from torch import Tensor, nn
from torch.nn import functional as F

from octavo.compiler.capture import capture
from octavo.compiler.legality import is_attention
from octavo.compiler.pipeline import PIPELINE, apply_step
from octavo.compiler.verify import prove_report
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
WIDTH, EXPERTS, INNER, TOP = 16, 8, 6, 3
Pair = tuple[Tensor, Tensor]
Route = Callable[[Tensor, Tensor], Pair]
NO_GROUPS = (1, 1, "top2_sum")


class Model(nn.Module):
    """A table, a router, its experts and a head: all that a router's pass looks at."""

    def __init__(self, route: Route) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(shape, generator=generator) / shape[-1] ** 0.5)

        self.table, self.gate = random(96, WIDTH), random(EXPERTS, WIDTH)
        self.gate_up, self.down = random(EXPERTS, 2 * INNER, WIDTH), random(EXPERTS, WIDTH, INNER)
        self.bias = nn.Parameter(torch.randn(EXPERTS, generator=generator))
        self.route = route

    def forward(self, input_ids: Tensor) -> Tensor:
        x = F.embedding(input_ids, self.table)
        weights, experts = self.route(F.linear(x.view(-1, WIDTH), self.gate), self.bias)
        slots = (1, -1, TOP)
        both = (experts.view(slots), weights.view(slots).float())
        y: Tensor = octavo.moe(x, *both, self.gate_up, None, self.down, None, "silu", 0.0, 1.0)
        return F.linear(x + y, self.table)


def routed(route: Route, dtype: torch.dtype = FP32) -> tuple[list[Any], PassReport]:
    """Attributes of the routers that the pass makes of `route`, after its proof, and its report."""
    model = Model(route).to(dtype)
    model.bias.data = model.bias.data.float()
    graph_module = capture(model).graph_module
    end = [step.name for step in PIPELINE].index("fuse_router") + 1
    report = [apply_step(step, graph_module, SETTINGS)[0] for step in PIPELINE[:end]][-1]
    prove_report(report, {})
    if dtype is FP32 and report.matched:
        with torch.no_grad():
            (result,) = graph_module(tokens(9), torch.arange(9)[None])
            assert torch.allclose(result, model(tokens(9)), atol=1e-5)
    found = calls(graph_module, octavo.router.default)
    if found:
        assert count(graph_module, aten.topk.default, aten.softmax.int, aten.sigmoid.default) == 0
    return [(n.args[1] is not None, *n.args[2:]) for n in found], report


def over_all(logits: Tensor, _: Tensor) -> Pair:
    return tuple(F.softmax(logits, dim=-1, dtype=torch.float).topk(TOP, dim=-1))  # type: ignore[return-value]


def divided(logits: Tensor, _: Tensor) -> Pair:
    weights, experts = torch.topk(F.softmax(logits.float(), dim=1), TOP, dim=-1)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


def selected(logits: Tensor, _: Tensor) -> Pair:
    values, experts = logits.topk(TOP, dim=-1)
    return F.softmax(values, dim=-1).type_as(logits), experts


def biased(epsilon: float = 1e-20, scaling: float = 2.5, unsorted: bool = False) -> Route:
    def route(logits: Tensor, bias: Tensor) -> Pair:
        scores = logits.float().sigmoid()
        experts = torch.topk(scores + bias, TOP, dim=-1, sorted=not unsorted)[1]
        weights = scores.gather(1, experts)
        return weights / (weights.sum(dim=-1, keepdim=True) + epsilon) * scaling, experts

    return route


def floored(logits: Tensor, bias: Tensor) -> Pair:
    scores = F.softmax(logits, dim=1, dtype=torch.float)
    experts = torch.topk(scores + bias[None], TOP, dim=-1)[1]
    weights = torch.gather(scores, dim=-1, index=experts)
    return weights / torch.clamp(weights.sum(dim=-1, keepdim=True), min=1e-12), experts


def grouped(
    fill: float = float("-inf"),
    best: str = "top2_sum",
    with_bias: bool = True,
    kept: int = 2,
    sigmoid: bool = True,
) -> Route:
    def route(logits: Tensor, bias: Tensor) -> Pair:
        scores = logits.float().sigmoid() if sigmoid else logits.float().softmax(-1)
        choice = scores + bias if with_bias else scores
        groups = choice.view(-1, 4, EXPERTS // 4)
        ranks = groups.topk(2, dim=-1)[0].sum(dim=-1) if best == "top2_sum" else groups.max(dim=-1).values
        mask = torch.zeros_like(ranks)
        mask.scatter_(1, torch.topk(ranks, k=kept, dim=-1, sorted=False)[1], 1)
        wide = mask.unsqueeze(-1).expand(-1, 4, EXPERTS // 4).reshape(-1, EXPERTS)
        choice = choice.masked_fill(~wide.bool(), fill)
        if not with_bias:
            return tuple(torch.topk(choice, k=TOP, dim=-1, sorted=False))  # type: ignore[return-value]
        experts = torch.topk(choice, k=TOP, dim=-1, sorted=False)[1]
        return scores.gather(1, experts), experts

    return route


SPELLINGS = {
    "softmax": (over_all, (False, TOP, "softmax", False, *NO_GROUPS, 1.0)),
    "softmax, divided": (divided, (False, TOP, "softmax", True, *NO_GROUPS, 1.0)),
    "selected": (selected, (False, TOP, "softmax_selected", False, *NO_GROUPS, 1.0)),
    "sigmoid, biased": (biased(), (True, TOP, "sigmoid", True, *NO_GROUPS, 2.5)),
    "any order": (biased(unsorted=True), (True, TOP, "sigmoid", True, *NO_GROUPS, 2.5)),
    "softmax, biased": (floored, (True, TOP, "softmax", True, *NO_GROUPS, 1.0)),
    "groups by two": (grouped(), (True, TOP, "sigmoid", False, 4, 2, "top2_sum", 1.0)),
    "groups by one": (
        grouped(0.0, "max", False, sigmoid=False), (False, TOP, "softmax", False, 4, 2, "max", 1.0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", SPELLINGS)
def test_knows_the_spellings_of_real_models(name: str, dtype: torch.dtype) -> None:
    route, attributes = SPELLINGS[name]
    found, report = routed(route, dtype)
    assert found == [attributes]
    assert report.rejected == []
    assert report.proof.sites == report.matched >= 1
    assert report.proof.worst <= report.proof.bound


@pytest.mark.parametrize(
    ("name", "scoring", "layers"), [("gpt_oss", "softmax_selected", 2), ("glm4_moe", "sigmoid", 1)]
)
def test_fires_in_whole_models(name: str, scoring: str, layers: int) -> None:
    graph_module, report = after("fuse_router", name)
    assert [n.args[3] for n in calls(graph_module, octavo.router.default)] == [scoring] * layers
    assert report.rejected == []
    assert_same_numbers(graph_module, name)


def tanh_scores(logits: Tensor, _: Tensor) -> Pair:
    return tuple(torch.topk(logits.tanh(), TOP))  # type: ignore[return-value]


def smallest(logits: Tensor, _: Tensor) -> Pair:
    return tuple(torch.topk(logits.softmax(-1), TOP, largest=False))  # type: ignore[return-value]


def two_choices(logits: Tensor, _: Tensor) -> Pair:
    scores = logits.softmax(-1)
    return torch.topk(scores, TOP)[0], torch.topk(scores * 2, TOP)[1]


def squared(logits: Tensor, _: Tensor) -> Pair:
    weights, experts = torch.topk(logits.softmax(-1), TOP)
    return weights * weights, experts


def other_scores(logits: Tensor, bias: Tensor) -> Pair:
    experts = torch.topk(logits.softmax(-1) + bias, TOP)[1]
    return logits.sigmoid().gather(1, experts), experts


REFUSED: dict[str, tuple[Route, str]] = {
    "epsilon": (
        biased(epsilon=1e-6),
        "the sum of its weights has an epsilon of 1e-06, expected at most 1e-12",
    ),
    "excluded at zero": (
        grouped(0.0),
        "experts outside the best groups have the score 0.0, which may win; expected -inf",
    ),
    "few groups": (grouped(kept=1), "1 groups of 2 experts are fewer than the 3 to be selected"),
    "scores": (tanh_scores, "its scores are tanh (aten.tanh), expected a softmax or a sigmoid"),
    "smallest": (smallest, "topk takes the smallest, expected the largest"),
    "two top-k": (two_choices, "its experts come from another top-k than topk, which its weights come from"),
    "weights": (squared, "its weights are pow_1 (aten.pow), expected values of a top-k or a gather of them"),
    "other scores": (other_scores, "which is not sigmoid and a bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_near_misses_with_the_reason(name: str) -> None:
    route, reason = REFUSED[name]
    found, report = routed(route)
    assert (found, report.matched) == ([], 0)
    (refused,) = report.rejected
    assert refused.reason.startswith("its router: ") and refused.reason.endswith(reason)
    assert "test_fuse_router.py:" in refused.where


def test_a_correction_bias_stays_in_fp32() -> None:
    model = Model(biased()).to(BF16)
    model.bias.data = model.bias.data.float()
    graph_module = capture(model).graph_module
    for step in PIPELINE[: 1 + [s.name for s in PIPELINE].index("fuse_router")]:
        apply_step(step, graph_module, SETTINGS)
    (router,) = calls(graph_module, octavo.router.default)
    assert [router.args[i].meta["val"].dtype for i in (0, 1)] == [BF16, FP32]  # type: ignore[union-attr]


def test_a_softmax_over_experts_is_no_attention() -> None:
    for route in (over_all, selected):
        nodes = capture(Model(route)).graph_module.graph.nodes
        assert not any(is_attention(n) for n in nodes if n.op == "call_function")


def test_idempotent() -> None:
    assert_idempotent("fuse_router", "glm4_moe")
