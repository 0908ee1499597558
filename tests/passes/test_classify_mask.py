"""Masks are known by what they do to every pair of positions; what cannot be paged is refused by what it is."""

from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.passes import classify_mask
from octavo.passes.classify_mask import Mask, Refused, classify
from octavo.passes.pattern import aten

LENGTH, HEADS = 16, 4
ROW, COLUMN = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
CAUSAL = COLUMN <= ROW
SLOPES = torch.tensor([0.5, 0.25, 0.3, 2.0**-0.35])


def weight(value: Tensor) -> tuple[GraphModule, Node]:
    graph = LoweredGraph()
    graph.input("input_ids")
    node = graph.weight("mask", value)
    return graph.finish(node), node


def classified(*masks: tuple[Tensor, str]) -> Mask:
    graph = LoweredGraph()
    graph.input("input_ids")
    nodes = [graph.weight(f"mask_{i}", value) for i, (value, _) in enumerate(masks)]
    graph_module = graph.finish(*nodes)
    kinds = [kind for _, kind in masks]
    return classify(graph_module, list(zip(nodes, kinds, strict=True)), HEADS, LENGTH)


def additive(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, float("-inf"))


@pytest.mark.parametrize("kind", ["add", "keep", "drop"])
@pytest.mark.parametrize(
    ("allowed", "causal", "window"),
    [
        (CAUSAL, True, 0),
        (CAUSAL & (ROW - COLUMN < 5), True, 5),
        (CAUSAL & (ROW - COLUMN < 1), True, 1),
        (torch.ones(LENGTH, LENGTH).bool(), False, 0),
    ],
)
def test_predicates_in_every_spelling(kind: str, allowed: Tensor, causal: bool, window: int) -> None:
    value = {"add": additive(allowed), "keep": allowed, "drop": ~allowed}[kind]
    for lead in ((), (1, 1), (1, HEADS)):
        assert classified((value.expand(*lead, LENGTH, LENGTH), kind)) == Mask(causal, window)


@pytest.mark.parametrize(
    "bias",
    [
        SLOPES[:, None, None] * (COLUMN - ROW),
        SLOPES[:, None, None] * COLUMN.expand(LENGTH, LENGTH),
        -SLOPES[:, None, None] * (COLUMN - ROW).abs(),
        SLOPES[:, None, None] * COLUMN[:, None].expand(1, 1, LENGTH),  # one row for all queries
    ],
)
def test_multiples_of_the_distance_are_slopes(bias: Tensor) -> None:
    for masks in ([(bias, "add"), (CAUSAL, "keep")], [(bias + additive(CAUSAL), "add")]):
        mask = classified(*masks)
        assert (mask.causal, mask.window) == (True, 0) and mask.slopes is not None
        torch.testing.assert_close(mask.slopes, SLOPES, rtol=1e-6, atol=0)


def test_one_slope_for_all_heads_and_a_constant_that_cancels() -> None:
    mask = classified((0.5 * (COLUMN - ROW).float() + 3.0, "add"), (CAUSAL, "keep"))
    assert mask.slopes is not None and mask.slopes.tolist() == [0.5] * HEADS
    mask = classified((torch.full((LENGTH, LENGTH), 0.25), "add"), (CAUSAL, "keep"))
    assert mask.slopes is not None and mask.slopes.tolist() == [0.0] * HEADS


def test_slopes_within_a_window() -> None:
    window = CAUSAL & (ROW - COLUMN < 5)
    mask = classified((SLOPES[:, None, None] * (COLUMN - ROW), "add"), (window, "keep"))
    assert mask.window == 5 and mask.slopes is not None
    torch.testing.assert_close(mask.slopes, SLOPES, rtol=1e-6, atol=0)


BIAS = torch.randn(HEADS, 2 * LENGTH, generator=torch.Generator().manual_seed(0))
REFUSALS: dict[str, tuple[Any, str]] = {
    "prefix": (
        additive(CAUSAL | (COLUMN < 3)),
        "the mask mask_0 is prefix-LM: query i sees key j > i for j < 3, which a causal page cache cannot serve",
    ),
    "chunked": (
        additive(CAUSAL & (COLUMN // 6 == ROW // 6)),
        "the mask mask_0 is chunked: a query sees the keys of its own chunk of 6 positions only",
    ),
    "arbitrary": (
        additive(CAUSAL & ((COLUMN + ROW) % 3 != 1)),
        "the mask mask_0 is neither causal nor a sliding window: over 16 positions it allows",
    ),
    "learned": (
        BIAS[:, (ROW - COLUMN).clamp(min=0)] + additive(CAUSAL),
        "that depends on the distance but is no multiple of it (learned or bucketed relative positions)",
    ),
    "absolute": (
        SLOPES[:, None, None] * COLUMN**2 + additive(CAUSAL),
        "other than a multiple of the distance to the key",
    ),
    "heads differ": (
        additive(torch.stack([CAUSAL, CAUSAL, CAUSAL, CAUSAL & (ROW - COLUMN < 3)])),
        "the mask mask_0 hides other keys from other heads, shape (4, 16, 16)",
    ),
    "bias of a group": (
        torch.rand(2, LENGTH, LENGTH) + additive(CAUSAL),
        "is neither one for all heads nor one for each of 4",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSALS)
def test_refuses_by_what_it_is(kind: str) -> None:
    value, reason = REFUSALS[kind]
    with pytest.raises(Refused) as raised:
        classified((value, "add"))
    assert reason in str(raised.value)


def test_refuses_masks_of_tokens_and_weights_without_values() -> None:
    graph = LoweredGraph()
    padding = graph.function(aten.eq.Scalar, graph.input("input_ids"), 0)
    with pytest.raises(Refused, match="depends on tokens, not on positions alone"):
        classify(graph.finish(padding), [(padding, "drop")], HEADS, LENGTH)
    graph_module, node = weight(torch.zeros(LENGTH, LENGTH, device="meta"))
    with pytest.raises(Refused, match="made of weights that have no values here"):
        classify(graph_module, [(node, "add")], HEADS, LENGTH)


def test_long_biases_are_looked_at_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classify_mask, "LARGEST_BIAS", HEADS * 9 * 9)
    graph = LoweredGraph()
    length = graph.function(aten.sym_size.int, graph.input("input_ids"), 1)
    row = graph.function(aten.reshape.default, graph.function(aten.arange.default, length), [1, 1, -1])
    bias = graph.function(aten.mul.Tensor, graph.weight("slopes", SLOPES[:, None, None]), row)
    sizes = []
    evaluate = classify_mask._evaluate

    def spy(graph_module: GraphModule, node: Node, length: int) -> Tensor:
        sizes.append(length)
        return evaluate(graph_module, node, length)

    monkeypatch.setattr(classify_mask, "_evaluate", spy)
    mask = classify(graph.finish(bias), [(bias, "add")], HEADS, LENGTH)
    assert sizes == [9] and not mask.causal
    torch.testing.assert_close(mask.slopes, SLOPES, rtol=1e-6, atol=0)


def test_refuses_masks_that_end_before_the_longest_sequence() -> None:
    graph_module, node = weight(torch.zeros(1, HEADS, 1, LENGTH))
    with pytest.raises(Refused, match=r"is \(1, 4, 1, 16\) for 32 positions: choose a max_model_len"):
        classify(graph_module, [(node, "add")], HEADS, 2 * LENGTH)
