"""Norms, slices and joins of transposed tensors become transposes of norms, slices and joins; every bit is kept."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from stages import BF16, FP32, after, assert_idempotent, before, count, logits, tokens
from torch import Tensor, fx

from octavo.compiler.legality import op
from octavo.passes.hoist_transposes import hoist_transposes
from octavo.passes.pattern import aten
from octavo.passes.rule import run_pass

HEADS_FIRST = [0, 2, 1, 3]
Made = Callable[[LoweredGraph, fx.Node, fx.Node], fx.Node]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["gpt_neox", "gemma3"])  # partial rotations; norms of each head
def test_fires_and_keeps_every_bit(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("hoist_transposes", name, dtype)
    assert (report.exactness, report.matched > 3) == ("bitwise", True)
    unhoisted = before("hoist_transposes", name, dtype)
    assert count(graph_module, aten.permute.default) < count(unhoisted, aten.permute.default)
    for length in (7, 12):
        assert torch.equal(logits(graph_module, tokens(length)), logits(unhoisted, tokens(length)))


def hoisted(made: Made, order: list[int] = HEADS_FIRST) -> tuple[fx.GraphModule, fx.GraphModule]:
    """(graph before, graph after) of what `made` makes of transposes of x, y (1, T, 4, 8)."""
    graphs = []
    for _ in range(2):
        graph = LoweredGraph()
        x, y = (graph.tokens(name, (4, 8), FP32) for name in ("x", "y"))
        turned = [graph.function(aten.permute.default, t, order) for t in (x, y)]
        graphs.append(graph.finish(made(graph, *turned)))
    run_pass(hoist_transposes, graphs[1])
    for graph_module in graphs:
        graph_module.graph.eliminate_dead_code()
        graph_module.recompile()
    return graphs[0], graphs[1]


def ops_of(graph_module: fx.GraphModule) -> list[str]:
    return [op(n) for n in graph_module.graph.nodes if n.op == "call_function"]


def norm(graph: LoweredGraph, name: str, x: fx.Node) -> fx.Node:
    weight = graph.weight("w", torch.arange(8.0))
    return graph.call(name, x, weight, *([None] if name == "layer_norm" else []), 1e-6)


def sliced(graph: LoweredGraph, x: fx.Node, *args: Any) -> fx.Node:
    return graph.function(aten.slice.Tensor, x, *args)


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (lambda g, x, y: norm(g, "rms_norm", x), ["octavo::rms_norm"]),
        (lambda g, x, y: norm(g, "layer_norm", x), ["octavo::layer_norm"]),
        (lambda g, x, y: sliced(g, x, 3, 2, 6), ["aten::slice"]),
        (lambda g, x, y: sliced(g, x, 1, 1, 3), ["aten::slice"]),
        (lambda g, x, y: sliced(g, x, -1, 0, 8, 2), ["aten::slice"]),
        (lambda g, x, y: g.function(aten.cat.default, [x, y], -1), ["aten::cat"]),
        (lambda g, x, y: g.function(aten.cat.default, [x, y, x], 1), ["aten::cat"]),
        (lambda g, x, y: g.function(aten.mul.Tensor, x, 0.5), ["aten::mul"]),
        (lambda g, x, y: g.function(aten.sub.Tensor, x, y, alpha=2.0), ["aten::sub"]),
        (lambda g, x, y: g.function(aten.add.Tensor, x, x), ["aten::add"]),
        (lambda g, x, y: sliced(g, norm(g, "rms_norm", sliced(g, x, 1, 0, 2)), 3, 0, 4),
         ["aten::slice", "octavo::rms_norm", "aten::slice"]),
    ],
)  # fmt: skip
def test_the_transpose_ends_up_last(made: Made, left: list[str]) -> None:
    unhoisted, graph_module = hoisted(made)
    assert ops_of(graph_module) == [*left, "aten::permute"]
    x, y = torch.randn(2, 1, 5, 4, 8).unbind()
    expected: Tensor = unhoisted(x, y)[0]
    assert torch.equal(graph_module(x, y)[0], expected)


@pytest.mark.parametrize(
    ("made", "order"),
    [
        # the last axis of the norm is another one before the transpose
        (lambda g, x, y: g.call("rms_norm", x, g.weight("v", torch.ones(4)), 1e-6), [0, 1, 3, 2]),
        (lambda g, x, y: g.function(aten.cat.default, [x, y.all_input_nodes[0]], 3), [0, 1, 2, 3]),
        (lambda g, x, y: g.function(aten.neg.default, x), HEADS_FIRST),
        (lambda g, x, y: g.function(aten.mul.Tensor, x, g.weight("v", torch.ones(8))), HEADS_FIRST),
        # one head that is spread over the others
        (
            lambda g, x, y: g.function(
                aten.add.Tensor,
                g.function(aten.permute.default, sliced(g, y.all_input_nodes[0], 2, 0, 1), HEADS_FIRST),
                x,
            ),
            HEADS_FIRST,
        ),
    ],
)
def test_refuses(made: Made, order: list[int]) -> None:
    unhoisted, graph_module = hoisted(made, order)
    assert ops_of(graph_module) == ops_of(unhoisted)
    assert ops_of(graph_module)[-1] != "aten::permute"


def test_joins_of_two_orders_are_left() -> None:
    graph = LoweredGraph()
    square = [graph.weight(name, torch.ones(1, 4, 4, 8)) for name in ("p", "q")]
    graph.input("input_ids")
    turned = [
        graph.function(aten.permute.default, t, o)
        for t, o in zip(square, (HEADS_FIRST, [0, 1, 2, 3]), strict=True)
    ]
    graph_module = graph.finish(graph.function(aten.cat.default, turned, 3))
    assert run_pass(hoist_transposes, graph_module).matched == 0


@pytest.mark.parametrize("name", ["gpt_neox", "gemma3"])
def test_idempotent(name: str) -> None:
    assert_idempotent("hoist_transposes", name)
