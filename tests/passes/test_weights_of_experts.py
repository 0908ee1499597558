"""Weights of all experts are read as weights of the selected ones, whatever spread them, or refused."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from octavo.passes.probe_moe import Region
from octavo.passes.weights_of_experts import Unselected, Weighting, weighting

EXPERTS, TOP, TOKENS = 6, 2, 5
Spread = Callable[[Tensor, Tensor], Tensor]


def masked(scores: Tensor, experts: Tensor) -> Tensor:
    return scores * torch.zeros_like(scores).scatter(-1, experts, 1.0)


def divided(scores: Tensor, experts: Tensor) -> Tensor:
    kept = scores * F.one_hot(experts, EXPERTS).sum(1)
    return kept / kept.sum(-1, keepdim=True)


def softmax(logits: Tensor, experts: Tensor) -> Tensor:
    kept = torch.full_like(logits, float("-inf")).scatter(-1, experts, logits.gather(-1, experts))
    return kept.softmax(-1)


def with_epsilon(scores: Tensor, experts: Tensor) -> Tensor:
    kept = masked(scores, experts)
    return kept / (kept.sum(-1, keepdim=True) + 1e-3)


def unmasked(scores: Tensor, experts: Tensor) -> Tensor:
    return scores / scores.sum(-1, keepdim=True) + masked(scores, experts)


def found(spread: Spread, softmax_first: bool = True) -> Weighting:
    def whole(logits: Tensor) -> Tensor:
        scores = logits.softmax(-1) if softmax_first else logits * 2
        return spread(scores, scores.topk(TOP)[1])

    graph = make_fx(whole, tracing_mode="fake", pre_dispatch=True)(torch.zeros(TOKENS, EXPERTS)).graph
    (logits,) = graph.find_nodes(op="placeholder")
    (experts,) = (n for n in graph.nodes if n.target is operator.getitem and n.args[1] == 1)
    (root,) = graph.output_node().all_input_nodes
    return weighting(Region(root, logits, experts, root, True, (), ()))


@pytest.mark.parametrize(("spread", "way"), [(masked, "as they are"), (divided, "divided by their sum")])
def test_finds_scores_and_what_is_done_to_them(spread: Spread, way: str) -> None:
    weights = found(spread)
    assert weights.way == way
    assert "softmax" in str(weights.scores.target)


def test_a_softmax_of_the_selected_logits() -> None:
    weights = found(softmax, softmax_first=False)
    assert (weights.way, weights.scores.name) == ("softmax of the selected", "mul")


@pytest.mark.parametrize("spread", [with_epsilon, unmasked])
def test_refuses_what_gives_other_weights(spread: Spread) -> None:
    with pytest.raises(Unselected, match="are not those that topk selected and zero elsewhere"):
        found(spread)
