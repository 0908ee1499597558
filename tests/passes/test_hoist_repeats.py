"""Repeats of heads move behind what is done to each head; expands go where arithmetic spreads by itself."""

from collections.abc import Callable

import pytest
import torch
from lowered import LoweredGraph
from models import LAYERS
from stages import (
    BF16,
    FP32,
    after,
    assert_idempotent,
    assert_same_numbers,
    before,
    calls,
    count,
    logits,
    tokens,
)
from torch import fx

from octavo.compiler.legality import op
from octavo.compiler.verify import prove_report
from octavo.passes.hoist_repeats import EXPANDS, hoist_repeats
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass

repeat = aten.repeat_interleave.self_int
rope, attention = torch.ops.octavo.rope.default, torch.ops.octavo.attention.default
Made = Callable[[LoweredGraph, fx.Node, fx.Node], fx.Node]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_keys_are_rotated_once_and_not_for_every_query_head(dtype: torch.dtype) -> None:
    graph_module, report = after("hoist_repeats", "falcon_grouped", dtype)
    assert report.matched > 0 == count(graph_module, *EXPANDS)
    assert [n.meta["val"].shape[2] for n in calls(graph_module, rope)] == [4, 2] * LAYERS
    for length in (7, 12):
        unhoisted = before("hoist_repeats", "falcon_grouped", dtype)
        assert torch.equal(logits(graph_module, tokens(length)), logits(unhoisted, tokens(length)))


def test_attention_takes_the_heads_before_the_repeat() -> None:
    graph_module, _ = after("fuse_attention", "falcon_grouped")
    assert [n.args[1].meta["val"].shape[2] for n in calls(graph_module, attention)] == [2] * LAYERS  # type: ignore[union-attr]
    assert count(graph_module, repeat) == 0
    assert_same_numbers(graph_module, "falcon_grouped")


def test_idempotent() -> None:
    assert_idempotent("hoist_repeats", "falcon_grouped")


def hoisted(made: Made) -> tuple[list[str], PassReport]:
    """Ops left of what `made` makes of x (1, T, 2, 8) and y (1, T, 6, 8); what was rewritten is proven."""
    graph = LoweredGraph()
    x, y = graph.tokens("x", (2, 8), FP32), graph.tokens("y", (6, 8), FP32)
    graph_module = graph.finish(made(graph, x, y))
    report = run_pass(hoist_repeats, graph_module)
    prove_report(report, {})
    return [op(n).split("::")[1] for n in graph_module.graph.nodes if n.op == "call_function"], report


def repeated(graph: LoweredGraph, x: fx.Node, axis: int = 2) -> fx.Node:
    return graph.function(repeat, x, 3, axis)


def grouped(
    graph: LoweredGraph, x: fx.Node, lead: bool = False, target: object = aten.expand.default
) -> fx.Node:
    """Every head of x three times, or with `lead` all heads three times over."""
    narrow = graph.function(aten.reshape.default, x, [1, -1, 1, 2, 8] if lead else [1, -1, 2, 1, 8])
    sizes = [1, graph.function(aten.sym_size.int, x, 1), *((3, 2) if lead else (2, 3)), 8]
    return graph.function(aten.reshape.default, graph.function(target, narrow, sizes), [1, -1, 6, 8])


def normed(graph: LoweredGraph, x: fx.Node) -> fx.Node:
    return graph.call("rms_norm", x, graph.weight("w", torch.arange(8.0)), 1e-6)


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (lambda g, x, y: grouped(g, x), ["reshape", "reshape", "repeat_interleave"]),
        (lambda g, x, y: grouped(g, x, target=aten.broadcast_to.default), ["reshape", "reshape", "repeat_interleave"]),
        (lambda g, x, y: g.function(aten.permute.default, repeated(g, x), [0, 2, 1, 3]),
         ["permute", "repeat_interleave"]),
        (lambda g, x, y: normed(g, repeated(g, x)), ["rms_norm", "repeat_interleave"]),
        (lambda g, x, y: g.call("attention", y, repeated(g, x), repeated(g, x), None, 0.5), ["attention"]),
        (lambda g, x, y: g.function(aten.add.Tensor, y, g.function(
            aten.expand_as.default, g.weight("b", torch.arange(8.0)), y)), ["add"]),
        (lambda g, x, y: g.function(aten.sub.Tensor, g.function(
            aten.expand_as.default, g.weight("b", torch.arange(8.0)), y), y), ["sub"]),
        (lambda g, x, y: g.function(aten.add.Tensor, x, g.function(aten.reshape.default, x, [-1, 2, 8])),
         ["reshape", "reshape", "add"]),
    ],
)  # fmt: skip
def test_hand_made_repeats_move(made: Made, left: list[str]) -> None:
    ops, report = hoisted(made)
    assert [name for name in ops if name != "sym_size"] == left
    assert report.matched > 0


@pytest.mark.parametrize(
    "made",
    [
        lambda g, x, y: grouped(g, x, lead=True),  # heads 0 1 0 1 0 1 belong to other queries than 0 0 0 1 1 1
        lambda g, x, y: g.call("rms_norm", repeated(g, x, axis=3), g.weight("w", torch.ones(24)), 1e-6),
        lambda g, x, y: g.call("attention", y, repeated(g, x), y, None, 0.5),
        # the sum would have one head without the expand
        lambda g, x, y: g.function(aten.add.Tensor, g.function(aten.slice.Tensor, y, 2, 0, 1), g.function(
            aten.expand.default, g.weight("b", torch.ones(1, 1, 1, 8)), [1, 1, 6, 8])),
    ],
)  # fmt: skip
def test_leaves(made: Made) -> None:
    assert hoisted(made)[1].matched == 0
