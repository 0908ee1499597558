"""Rules of single ops: where arguments must lie, and where results then do."""

from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from octavo.compiler import ops  # noqa: F401
from octavo.compiler.placement import Where
from octavo.compiler.placement_rules import outcome

octavo = torch.ops.octavo


def call(target: Any, *shapes: Any) -> Node:
    """A call on values of these shapes; what is no tuple is an argument as it is."""
    graph = Graph()
    args = []
    for i, shape in enumerate(shapes):
        if isinstance(shape, tuple):
            args.append(graph.placeholder(f"a{i}"))
            args[-1].meta["val"] = torch.empty(shape)
        else:
            args.append(shape)
    node = graph.call_function(target, tuple(args))
    node.meta["val"] = torch.empty(1)
    return node


def needs(node: Node, **at: Where) -> tuple[dict[str, Where], Any]:
    result = outcome(node, at)
    return {name: where for name, where in result.needs.items() if name in at}, result.gives


X, W = (1, 5, 8), (6, 8)


@pytest.mark.parametrize(
    ("at", "wanted", "gives"),
    [
        ({"x": None, "weight": None}, {"x": None, "weight": None}, None),
        ({"x": None, "weight": 0}, {"x": None, "weight": 0}, 2),
        ({"x": 2, "weight": 1}, {"x": 2, "weight": 1}, "partial"),
        ({"x": "partial", "weight": 1}, {"x": 2, "weight": 1}, "partial"),
        ({"x": 2, "weight": 0}, {"x": None, "weight": 0}, 2),
        ({"x": "partial", "weight": None}, {"x": None, "weight": None}, None),
    ],
)
def test_linear(at: dict[str, Where], wanted: dict[str, Where], gives: Where) -> None:
    assert needs(call(octavo.linear.default, X, W), **at) == (wanted, gives)


def test_a_bias_of_a_sum_is_needed_from_one_rank_only() -> None:
    wanted, gives = needs(call(octavo.linear.default, X, W, (6,)), x=2, weight=1, bias=None)
    assert (wanted["bias"], gives) == ("partial", "partial")


@pytest.mark.parametrize(
    ("x", "y", "wanted", "gives"),
    [
        ("partial", "partial", "partial", "partial"),
        ("partial", None, None, None),  # the whole would count once a rank
        (2, 2, 2, 2),
        (2, None, None, None),
    ],
)
def test_add(x: Where, y: Where, wanted: Where, gives: Where) -> None:
    assert needs(call(octavo.add.default, X, X), x=x, y=y) == ({"x": wanted, "y": wanted}, gives)


def test_norms_of_tokens_need_all_channels_and_norms_of_heads_do_not() -> None:
    assert needs(call(octavo.rms_norm.default, X, (8,), 1e-6), x=2, weight=None) == (
        {"x": None, "weight": None},
        None,
    )
    heads = call(octavo.rms_norm.default, (1, 5, 4, 8), (8,), 1e-6)
    assert needs(heads, x=2, weight=None) == ({"x": 2, "weight": None}, 2)


EXPERTS = ((1, 5, 8), (1, 5, 2), (1, 5, 2), (4, 12, 8), (4, 12), (4, 8, 6), (4, 8), "silu", 0.0, 1.0)


def test_spread_experts_leave_a_sum_and_so_do_cut_ones() -> None:
    node = call(octavo.moe.default, *EXPERTS)
    tokens: dict[str, Where] = {"x": None, "experts": None, "weights": None}
    spread: dict[str, Where] = dict.fromkeys(("gate_up", "gate_up_bias", "down", "down_bias"), 0)
    assert needs(node, **tokens, **spread) == ({**tokens, **spread}, "partial")
    cut: dict[str, Where] = {"gate_up": 1, "gate_up_bias": 1, "down": 2, "down_bias": "partial"}
    assert needs(node, **tokens, **cut) == ({**tokens, **cut}, "partial")


def test_what_has_no_rule_needs_everything_whole() -> None:
    assert needs(call(octavo.gather_logits.default, X, (3,)), x=2, rows="partial") == (
        {"x": None, "rows": None},
        None,
    )
