"""Chains of arithmetic become octavo.pointwise, plain sums octavo.add; what the grammar cannot say is refused."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from stages import BF16, FP32, SETTINGS, assert_same_numbers, before, calls, count, step_of
from torch import fx

from octavo.compiler.pipeline import apply_step
from octavo.compiler.pointwise import MAX_DEPTH, parse
from octavo.compiler.verify import prove_report
from octavo.passes.lower_elementwise import lower_elementwise
from octavo.passes.pattern import aten
from octavo.passes.rule import PassReport, run_pass

add, pointwise = torch.ops.octavo.add.default, torch.ops.octavo.pointwise.default
Made = Callable[[LoweredGraph, fx.Node, fx.Node], Any]


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_sums_fire_with_the_same_numbers(dtype: torch.dtype) -> None:
    # Before fuse_add_norm, which leaves it nothing in this model.
    graph_module = before("fuse_add_norm", "llama", dtype)
    report = apply_step(step_of("lower_elementwise"), graph_module, SETTINGS)[0]
    assert report.matched == count(graph_module, add) == 4
    assert count(graph_module, aten.add.Tensor) == 0
    assert_same_numbers(graph_module, "llama", dtype)
    assert run_pass(lower_elementwise, graph_module).changed is False


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_chains_fire_with_the_same_numbers(dtype: torch.dtype) -> None:
    graph_module = before("lower_elementwise", "gpt2", dtype)
    apply_step(step_of("lower_elementwise"), graph_module, SETTINGS)
    texts = [str(n.args[4]) for n in calls(graph_module, pointwise)]
    assert len(texts) == 2 and all("tanh(" in text for text in texts)  # a gelu in eight ops
    assert_same_numbers(graph_module, "gpt2", dtype)


def lowered(
    made: Made, dtype: torch.dtype = FP32
) -> tuple[list[str], fx.GraphModule, fx.GraphModule, PassReport]:
    """(calls left, graph before, graph after, report) of what `made` makes of x, y (1, T, 8)."""
    graphs = []
    for _ in range(2):
        graph = LoweredGraph()
        x, y = (graph.tokens(name, (8,), dtype) for name in ("x", "y"))
        made_of = made(graph, x, y)
        graphs.append(graph.finish(*(made_of if isinstance(made_of, tuple) else (made_of,))))
    report = run_pass(lower_elementwise, graphs[1])
    graphs[1].graph.eliminate_dead_code()
    graphs[1].recompile()
    left = []
    for node in graphs[1].graph.nodes:
        if node.target is pointwise:
            left.append(
                ", ".join(re.sub(r"_\d+$", "", str(value)) for value in node.args if value is not None)
            )
        elif node.op == "call_function":
            left.append(f"{str(node.target).removesuffix('.default')}({', '.join(map(str, node.args))})")
    return left, graphs[0], graphs[1], report


def f(target: Any) -> Callable[..., fx.Node]:
    return lambda graph, *args, **kwargs: graph.function(target, *args, **kwargs)


ADD, SUB, MUL, DIV = (f(getattr(aten, name).Tensor) for name in ("add", "sub", "mul", "div"))
TANH, NEG, GELU, COPY = (
    f(aten.tanh.default),
    f(aten.neg.default),
    f(aten.gelu.default),
    f(aten._to_copy.default),
)
POW = f(aten.pow.Tensor_Scalar)


def vector(graph: LoweredGraph, name: str = "v", size: int = 8) -> fx.Node:
    return graph.weight(name, torch.linspace(0.5, 2.0, size))


@pytest.mark.parametrize(
    ("made", "left"),
    [
        (lambda g, x, y: ADD(g, x, y), ["octavo.add(x, y)"]),
        (lambda g, x, y: MUL(g, x, 2), ["x, (a * 2.0), fp32"]),
        (lambda g, x, y: MUL(g, TANH(g, DIV(g, x, 30.0)), 30.0), ["x, (tanh((a / 30.0)) * 30.0), fp32"]),
        (lambda g, x, y: SUB(g, x, MUL(g, y, x)), ["x, y, (a - (b * a)), fp32"]),
        (lambda g, x, y: SUB(g, NEG(g, y), x), ["y, x, ((-a) - b), fp32"]),
        (lambda g, x, y: ADD(g, x, vector(g)), ["x, v, (a + b), fp32"]),
        (lambda g, x, y: SUB(g, vector(g), x), ["x, v, (b - a), fp32"]),  # the vector is never first
        (lambda g, x, y: MUL(g, x, g.weight("s", torch.tensor(0.25))), ["x, (a * 0.25), fp32"]),
        (lambda g, x, y: MUL(g, x, g.weight("s", torch.tensor([-0.25]))), ["x, (a * -0.25), fp32"]),
        (lambda g, x, y: GELU(g, x, approximate="tanh"), ["x, gelu_tanh(a), fp32"]),
        (lambda g, x, y: GELU(g, x), ["x, gelu(a), fp32"]),
        (lambda g, x, y: POW(g, ADD(g, x, 1e-5), 3), ["x, ((a + 1e-05) * (a + 1e-05) * (a + 1e-05)), fp32"]),
        (lambda g, x, y: COPY(g, MUL(g, x, y), dtype=BF16), ["x, y, (a * b), bf16"]),
    ],
)  # fmt: skip
def test_writes_one_expression(made: Made, left: list[str]) -> None:
    got, unlowered, graph_module, report = lowered(made)
    assert (got, report.matched) == (left, 1)
    x, y = torch.randn(2, 1, 3, 8).unbind()
    torch.testing.assert_close(graph_module(x, y)[0], unlowered(x, y)[0])
    assert run_pass(lower_elementwise, graph_module).changed is False


def test_a_sum_of_two_dtypes_is_no_plain_sum() -> None:
    got, *_ = lowered(lambda g, x, y: ADD(g, x, g.tokens("z", (8,), BF16)))
    assert got == ["x, z, (a + b), fp32"]


def test_a_value_with_two_readers_is_computed_once() -> None:
    def made(graph: LoweredGraph, x: fx.Node, y: fx.Node) -> tuple[fx.Node, fx.Node]:
        shared = TANH(graph, x)
        return MUL(graph, shared, y), NEG(graph, shared)

    got, unlowered, graph_module, report = lowered(made)
    assert got == ["x, tanh(a), fp32", "pointwise, y, (a * b), fp32", "pointwise, (-a), fp32"]
    assert report.matched == 3
    x, y = torch.randn(2, 1, 3, 8).unbind()
    assert all(torch.equal(a, b) for a, b in zip(graph_module(x, y), unlowered(x, y), strict=True))


def test_more_than_four_tensors_are_split() -> None:
    def made(graph: LoweredGraph, x: fx.Node, y: fx.Node) -> fx.Node:
        total = MUL(graph, x, y)
        for name in ("p", "q", "r"):
            total = MUL(graph, total, graph.tokens(name, (8,), FP32))
        return SUB(graph, total, graph.weight("s", torch.tensor(0.5)))

    got, unlowered, graph_module, report = lowered(made)
    assert report.matched == 2
    assert got == ["x, y, p, q, (((a * b) * c) * d), fp32", "pointwise, r, ((a * b) - 0.5), fp32"]
    inputs = torch.randn(5, 1, 3, 8).unbind()
    torch.testing.assert_close(graph_module(*inputs)[0], unlowered(*inputs)[0])


def test_one_value_for_each_row_is_an_operand() -> None:
    def made(graph: LoweredGraph, x: fx.Node, y: fx.Node) -> fx.Node:
        gate = f(aten.sigmoid.default)(graph, graph.tokens("z", (1,), FP32))
        return ADD(graph, x, MUL(graph, gate, y))

    _, unlowered, graph_module, report = lowered(made)
    prove_report(report, {})
    gate, whole = calls(graph_module, pointwise)
    assert [gate.args[4], whole.args[4]] == ["sigmoid(a)", "(a + (c * b))"]
    assert whole.args[2] is gate  # its rows are one value wide, so it is not computed for every element
    values = torch.randn(1, 3, 8), torch.randn(1, 3, 8), torch.randn(1, 3, 1)
    torch.testing.assert_close(graph_module(*values)[0], unlowered(*values)[0])


def test_long_chains_are_cut_where_the_grammar_ends() -> None:
    def made(graph: LoweredGraph, x: fx.Node, y: fx.Node) -> fx.Node:
        for _ in range(4 * MAX_DEPTH):
            x = MUL(graph, TANH(graph, x), -1.5)
        return x

    _, unlowered, graph_module, report = lowered(made)
    assert 8 <= report.matched <= 24
    for node in calls(graph_module, pointwise):
        parse(str(node.args[4]))
    x = torch.randn(1, 3, 8)
    torch.testing.assert_close(graph_module(x, x)[0], unlowered(x, x)[0])


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (lambda g, x, y: ADD(g, x, g.weight("z", torch.ones(1, 1, 8))), "z has shape (1, 1, 8), expected (1, s"),
        (lambda g, x, y: MUL(g, g.input("input_ids"), 2), "the result is torch.int64"),
        (lambda g, x, y: MUL(g, x, g.weight("i", torch.ones(8).long())), "i is torch.int64, expected fp32 or bf16"),
        (lambda g, x, y: ADD(g, x, y, alpha=2), "scaled sums are not in the grammar"),
        (lambda g, x, y: f(aten.add.Scalar)(g, x, 2, 3), "scaled sums are not in the grammar"),
        (lambda g, x, y: MUL(g, x, float("inf")), "inf is not in the grammar"),
        (lambda g, x, y: MUL(g, x, g.weight("n", torch.tensor(float("nan")))), "nan is not in the grammar"),
    ],
)  # fmt: skip
def test_refuses(made: Made, reason: str) -> None:
    _, _, _, report = lowered(made)
    assert report.matched == 0
    assert reason in report.rejected[0].reason
