"""Every spelling of the same value ends as one, bit for bit."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from stages import BF16, FP32, after, assert_idempotent, before, calls, count, logits, tokens
from torch import fx

from octavo.compiler.legality import REMOVED, op
from octavo.compiler.verify import prove_report
from octavo.passes.canonicalize import canonicalize
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass

octavo = torch.ops.octavo
Made = Callable[[LoweredGraph, fx.Node], Any]


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama", "einsum"])
def test_fires_and_keeps_every_bit(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("canonicalize", name, dtype)
    assert report.exactness == "bitwise"
    assert report.matched > 30
    assert not {op(n) for n in graph_module.graph.nodes if n.op == "call_function"} & REMOVED
    for length in (7, 12):
        unchanged = logits(before("canonicalize", name, dtype), tokens(length))
        assert torch.equal(logits(graph_module, tokens(length)), unchanged)


def canonical(
    made: Made, shape: tuple[int, ...] = (4, 6), dtype: torch.dtype = FP32
) -> tuple[list[str], PassReport]:
    """Calls that are left of what `made` makes of x (1, T, *shape)."""
    graph = LoweredGraph()
    graph_module = graph.finish(made(graph, graph.tokens("x", shape, dtype)))
    report = run_pass(canonicalize, graph_module)
    texts = [f"{op(n)}{tuple(n.args[1:])}" for n in graph_module.graph.nodes if n.op == "call_function"]
    return texts, report


@pytest.mark.parametrize(
    "made",
    [
        lambda g, x: g.function(aten.alias.default, x),
        lambda g, x: g.function(aten.clone.default, x),
        lambda g, x: g.function(aten.contiguous.default, x),
        lambda g, x: g.function(aten.dropout.default, x, 0.0, False),
        lambda g, x: g.function(aten._to_copy.default, x, dtype=FP32),
        lambda g, x: g.function(aten.mul.Tensor, x, 1.0),
        lambda g, x: g.function(aten.div.Tensor, x, 1),
        lambda g, x: g.function(aten.add.Tensor, x, 0),
        lambda g, x: g.function(aten.slice.Tensor, x, 2, 0, 9223372036854775807),
        lambda g, x: g.function(aten.expand.default, x, [1, -1, 4, 6]),
        lambda g, x: g.function(aten.permute.default, x, [0, 1, 2, 3]),
        lambda g, x: g.function(aten.transpose.int, g.function(aten.transpose.int, x, 2, 3), -1, -2),
        lambda g, x: g.function(aten.squeeze.dim, g.function(aten.unsqueeze.default, x, 1), 1),
    ],
)
def test_removes_what_changes_nothing(made: Made) -> None:
    assert canonical(made)[0] == []


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (lambda g, x: g.function(aten.view.default, x, [1, -1, 24]), ["aten::reshape([1, -1, 24],)"]),
        (lambda g, x: g.function(aten.flatten.using_ints, x, 2), ["aten::reshape([1, -1, 24],)"]),
        (lambda g, x: g.function(aten.unsqueeze.default, x, 2), ["aten::reshape([1, -1, 1, 4, 6],)"]),
        (lambda g, x: g.function(aten.transpose.int, x, 1, 2), ["aten::permute([0, 2, 1, 3],)"]),
        (lambda g, x: g.function(aten.permute.default, x, [0, -2, 1, -1]), ["aten::permute([0, 2, 1, 3],)"]),
        (lambda g, x: g.function(aten.mul.Tensor, x, x), ["aten::pow(2,)"]),
        (lambda g, x: g.function(aten.mul.Tensor, x, 2.0), ["aten::mul(2.0,)"]),
        (lambda g, x: g.function(aten.slice.Tensor, x, 2, 1, 3), ["aten::slice(2, 1, 3)"]),
        (lambda g, x: g.function(aten.to.dtype, x, BF16), ["aten::_to_copy()"]),
        (
            lambda g, x: g.function(aten.expand.default, x, [2, -1, -1, -1, -1]),
            ["aten::reshape([1, 1, -1, 4, 6],)", "aten::expand([2, -1, -1, -1, -1],)"],
        ),
    ],
)
def test_one_spelling(made: Made, left: list[str]) -> None:
    assert canonical(made)[0] == left


def test_a_part_of_a_chunk_is_a_slice() -> None:
    def made(graph: LoweredGraph, x: fx.Node) -> fx.Node:
        return graph.function(
            torch.ops.aten.neg.default, part(graph, graph.function(aten.chunk.default, x, 3, -1), 1)
        )

    assert canonical(made)[0] == ["aten::slice(3, 2, 4)", "aten::neg()"]


def part(graph: LoweredGraph, parts: fx.Node, index: int) -> fx.Node:
    node = graph.graph.call_function(__import__("operator").getitem, (parts, index))
    node.meta["val"] = parts.meta["val"][index]
    return node


def test_a_chunk_of_the_tokens_is_left_alone() -> None:
    def made(graph: LoweredGraph, x: fx.Node) -> fx.Node:
        return part(graph, graph.function(aten.split.Tensor, x, 3, 1), 1)

    assert [text.split("(")[0] for text in canonical(made)[0]] == ["aten::split", "getitem"]


def weight(graph: LoweredGraph, *sizes: int) -> fx.Node:
    return graph.weight(
        "w" + "x".join(map(str, sizes)), torch.arange(float(torch.Size(sizes).numel())).view(sizes)
    )


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (lambda g, x: g.function(aten.matmul.default, x, weight(g, 6, 5)), ["permute", "linear"]),
        (lambda g, x: g.function(aten.mm.default, flat(g, x), weight(g, 6, 5)), ["reshape", "permute", "linear"]),
        (lambda g, x: g.function(aten.addmm.default, weight(g, 5), flat(g, x), weight(g, 6, 5)),
         ["reshape", "permute", "linear"]),
        (lambda g, x: g.function(aten.reshape.default, g.function(
            aten.addmm.default, weight(g, 5), flat(g, x), weight(g, 6, 5)), [1, -1, 4, 5]), ["permute", "linear"]),
        # not by a weight, scaled, or with a bias for each row
        (lambda g, x: g.function(aten.matmul.default, x, g.tokens("y", (6, 5), FP32)), ["matmul"]),
        (lambda g, x: g.function(aten.addmm.default, weight(g, 5), flat(g, x), weight(g, 6, 5), beta=2),
         ["reshape", "addmm"]),
        (lambda g, x: g.function(aten.addmm.default, weight(g, 1, 5), flat(g, x), weight(g, 6, 5)),
         ["reshape", "addmm"]),
        (lambda g, x: g.function(aten.addmm.default, weight(g, 5), flat(g, x), g.function(
            aten.neg.default, weight(g, 6, 5))), ["reshape", "neg", "addmm"]),
        # other rows than those that were flattened
        (lambda g, x: g.function(aten.reshape.default, g.call("linear", flat(g, x), weight(g, 6, 6)), [1, -1, 24]),
         ["reshape", "linear", "reshape"]),
    ],
)  # fmt: skip
def test_products_by_a_weight_are_linears_of_the_rows_as_they_were(made: Made, left: list[str]) -> None:
    assert [text.split("(")[0].split("::")[1] for text in canonical(made)[0]] == left


def flat(graph: LoweredGraph, x: fx.Node) -> fx.Node:
    return graph.function(aten.reshape.default, x, [-1, 6])


def test_linears_keep_their_numbers() -> None:
    graph = LoweredGraph()
    product = graph.function(
        aten.addmm.default,
        weight(graph, 5),
        flat(graph, graph.tokens("x", (4, 6), FP32)),
        weight(graph, 6, 5),
    )
    graph_module = graph.finish(graph.function(aten.reshape.default, product, [1, -1, 4, 5]))
    x = torch.randn(1, 3, 4, 6)
    expected = graph_module(x)[0]
    run_pass(canonicalize, graph_module)
    graph_module.recompile()
    torch.testing.assert_close(graph_module(x)[0], expected)


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (lambda g, x: g.function(aten.cat.default, [x, weight(g, 1, 11, 4, 0)], -1), []),
        (lambda g, x: g.function(aten.cat.default, [weight(g, 0), x], -2), []),
        (lambda g, x: g.function(aten.cat.default, [x, weight(g, 0), x], 3), ["aten::cat(3,)"]),
        (lambda g, x: g.function(aten.cat.default, [x, x], 3), ["aten::cat(3,)"]),
        (lambda g, x: g.function(aten.cat.default, [x, x]), ["aten::cat()"]),
        # a part without elements can still widen the others
        (lambda g, x: g.function(aten.cat.default, [weight(g, 0), g.function(aten._to_copy.default, x, dtype=BF16)], 3),
         ["aten::_to_copy()", "aten::cat(3,)"]),
    ],
)  # fmt: skip
def test_joins_drop_parts_without_elements(made: Made, left: list[str]) -> None:
    assert canonical(made)[0] == left


def test_einsum_is_a_product_of_transposes() -> None:
    def made(graph: LoweredGraph, x: fx.Node) -> fx.Node:
        return graph.function(aten.einsum.default, "bqhd,bkhd->bhqk", [x, graph.tokens("y", (4, 6), FP32)])

    left, _ = canonical(made)
    assert [text.split("(")[0] for text in left] == ["aten::permute", "aten::permute", "aten::matmul"]
    assert left[0].endswith("([0, 2, 1, 3],)") and left[1].endswith("([0, 2, 3, 1],)")


def test_einsum_that_is_no_product_of_two_is_left_alone() -> None:
    left, _ = canonical(lambda g, x: g.function(aten.einsum.default, "bqhd->bhqd", [x]))
    assert [text.split("(")[0] for text in left] == ["aten::einsum"]


def test_equal_calls_are_one_and_assertions_none() -> None:
    graph = LoweredGraph()
    x = graph.tokens("x", (8,), FP32)
    graph.function(aten._assert_tensor_metadata.default, x, None, None, FP32)
    twice = [graph.function(aten.neg.default, x) for _ in range(2)]
    graph_module = graph.finish(graph.function(aten.mul.Tensor, *twice))
    run_pass(canonicalize, graph_module)
    assert count(graph_module, aten._assert_tensor_metadata.default) == 0
    assert count(graph_module, aten.neg.default) == 1
    assert count(graph_module, aten.pow.Tensor_Scalar) == 1


def test_framework_ops_become_the_dialect() -> None:
    graph_module, _ = after("canonicalize")
    assert count(graph_module, octavo.linear.default) == 15
    (embedding,) = calls(graph_module, octavo.embedding.default)
    assert [str(n) for n in embedding.args] == ["input_ids", "model_embed_tokens_weight"]


@pytest.mark.parametrize("name", ["llama", "einsum", "fused", "gpt2"])
def test_idempotent(name: str) -> None:
    assert_idempotent("canonicalize", name)


@pytest.mark.parametrize("spelling", ["unbind", "select"])
def test_pairs_taken_apart_are_every_second_element(spelling: str) -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (64,), FP32)
    pairs = graph.function(aten.view.default, x, [1, -1, 4, 8, 2])
    if spelling == "unbind":
        both = graph.function(aten.unbind.int, pairs, -1)
        parts = [graph.function(operator.getitem, both, i) for i in (0, 1)]
    else:
        parts = [graph.function(aten.select.int, pairs, 4, i) for i in (0, 1)]
    graph_module = graph.finish(graph.function(aten.sub.Tensor, *parts))
    prove_report(run_pass(canonicalize, graph_module), {})
    slices = [n for n in graph_module.graph.nodes if n.target is aten.slice.Tensor]
    assert [n.args[1:3] for n in slices] == [(3, 0), (3, 1)] and {n.args[4] for n in slices} == {2}


def test_squares_have_one_spelling() -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (4,), FP32)
    square = graph.function(aten.square.default, x)
    graph_module = graph.finish(
        graph.function(aten.add.Tensor, square, graph.function(aten.mul.Tensor, x, x))
    )
    prove_report(run_pass(canonicalize, graph_module), {})
    assert [n.args[1] for n in graph_module.graph.nodes if n.target is aten.pow.Tensor_Scalar] == [2]


def test_an_element_of_a_fixed_axis_is_a_part() -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    parts = graph.function(aten.view.default, graph.tokens("x", (48,), FP32), [1, -1, 4, 3, 4])
    graph_module = graph.finish(graph.function(aten.select.int, parts, -2, -1))
    prove_report(run_pass(canonicalize, graph_module), {})
    (part,) = [n for n in graph_module.graph.nodes if n.target is aten.slice.Tensor]
    assert part.args[1:] == (3, 2, 3)


def test_a_constant_index_of_one_element_is_a_part() -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    parts = graph.function(aten.view.default, graph.tokens("x", (48,), FP32), [1, -1, 6, 8])
    last = graph.weight("last", torch.tensor([-1]))
    graph_module = graph.finish(graph.function(aten.index.Tensor, parts, [None, None, last]))
    prove_report(run_pass(canonicalize, graph_module), {})
    (part,) = [n for n in graph_module.graph.nodes if n.target is aten.slice.Tensor]
    assert part.args[1:] == (2, 5, 6)
