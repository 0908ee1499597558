"""Angles and learned rows become tables by position; what looks at other positions is refused."""

import functools
import operator
from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from models import HEAD_DIM, LONGEST
from stages import BF16, FP32, SETTINGS, after, assert_idempotent, assert_same_numbers, calls, count
from torch import fx

from octavo.compiler.errors import PassError
from octavo.compiler.verify import prove_report
from octavo.passes.fold_position_tables import fold_position_tables
from octavo.passes.pattern import aten
from octavo.passes.rewrite import held, set_meta
from octavo.passes.rule import PassReport, run_pass

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama", "softmax", "latent"])  # positions given; counted inside; pairs
def test_fires_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("fold_position_tables", name, dtype)
    assert len(report.notes) == 2
    assert count(graph_module, aten.cos.default, aten.sin.default, aten.arange.default) == 0
    for weight in report.notes:
        table = held(graph_module, weight)
        assert (table.shape, table.dtype) == ((LONGEST, HEAD_DIM), dtype)
    assert_same_numbers(graph_module, name, dtype)


def test_rows_are_the_angles_of_their_positions() -> None:
    graph_module, report = after("fold_position_tables")
    cos = held(graph_module, next(name for name in report.notes if "cos" in name))
    inverse = 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    expected = (torch.arange(LONGEST)[:, None] * inverse).cos().repeat(1, 2)
    assert torch.allclose(cos, expected, atol=1e-6)


def test_learned_rows_are_looked_up_as_they_are() -> None:
    graph_module, report = after("fold_position_tables", "fused")
    assert report.notes == {}
    rows = [
        n for n in calls(graph_module, octavo.embedding.default) if str(n.args[1]) == "embed_positions_weight"
    ]
    assert [str(n.args[0]) for n in rows] == ["position_ids"]


def tables(of: str) -> tuple[fx.GraphModule, PassReport]:
    """x plus rows made of the positions, by what a row looks at."""
    graph = LoweredGraph()
    positions = graph.placeholder("position_ids", torch.zeros(1, 11, dtype=torch.int64), [1])
    x = graph.tokens("x", (8,), FP32)
    wide = graph.function(aten._to_copy.default, positions, dtype=FP32)
    if of == "others":
        longest = graph.function(aten.max.default, wide)
        wide = graph.function(aten.div.Tensor, wide, longest)
    column = graph.function(aten.reshape.default, wide, [1, -1, 1])
    rows = graph.function(aten.mul.Tensor, column, graph.weight("steps", torch.arange(8.0)))
    if of == "integers":
        rows = graph.function(aten._to_copy.default, rows, dtype=torch.int64)
    graph_module = graph.finish(graph.function(aten.mul.Tensor, x, rows))
    return graph_module, fold_position_tables(graph_module, SETTINGS.max_model_len)


def test_hand_made_rows_fire() -> None:
    _, report = tables("own")
    assert report.notes == {"positions.mul_tensor": "(48, 8) torch.float32"}
    assert [site.table for site in report.sites] == ["positions_mul_tensor"]


@pytest.mark.parametrize("of", ["others", "integers"])
def test_refuses(of: str) -> None:
    graph_module, report = tables(of)
    assert {r.reason for r in report.rejected} == {"a row depends on more than its own position"}
    assert count(graph_module, octavo.embedding.default) == 0


def test_an_arange_that_is_not_the_positions_stays() -> None:
    graph = LoweredGraph()
    positions = graph.placeholder("position_ids", torch.zeros(1, 11, dtype=torch.int64), [1])
    length = graph.function(aten.sym_size.int, positions, 1)
    end = graph.graph.call_function(operator.add, (length, 1))
    set_meta(end, graph.mode)
    late = graph.function(aten.arange.start, 1, end)  # as long as the positions, but from one
    graph_module = graph.finish(graph.function(aten.arange.default, length), late)
    fold_position_tables(graph_module, SETTINGS.max_model_len)
    assert (count(graph_module, aten.arange.default), count(graph_module, aten.arange.start)) == (0, 1)
    assert count(graph_module, aten.reshape.default) == 1


def test_idempotent() -> None:
    assert_idempotent("fold_position_tables", "softmax")


def test_learned_rows_counted_from_two_get_a_table_of_their_own() -> None:
    graph = LoweredGraph()
    positions = graph.input("positions")
    positions.name, positions.target = "position_ids", "position_ids"
    table = graph.weight("learned", torch.randn(20, 8))
    moved = graph.function(aten.add.Tensor, positions, 2)
    x = graph.tokens("x", (8,), FP32)
    row = graph.function(octavo.embedding.default, moved, table)
    graph_module = graph.finish(graph.function(aten.add.Tensor, x, row))
    report = run_pass(functools.partial(fold_position_tables, max_model_len=16), graph_module)
    prove_report(report, {})
    (name,) = report.notes
    assert torch.equal(held(graph_module, name), held(graph_module, "learned")[2:18])
    (lookup,) = calls(graph_module, octavo.embedding.default)
    assert lookup.args[0] is positions


@pytest.mark.parametrize("moved", [0, 2])
def test_rows_that_end_before_the_longest_sequence_are_an_error(moved: int) -> None:
    graph = LoweredGraph()
    positions = graph.input("positions")
    positions.name, positions.target = "position_ids", "position_ids"
    ids = graph.function(aten.add.Tensor, positions, moved) if moved else positions
    row = graph.function(octavo.embedding.default, ids, graph.weight("learned", torch.randn(16, 8)))
    graph_module = graph.finish(graph.function(aten.mul.Tensor, graph.tokens("x", (8,), FP32), row))
    with pytest.raises(
        PassError, match=r"the 20 positions of the longest sequence \(node \w+\); pass a max_model"
    ):
        fold_position_tables(graph_module, 20)


@pytest.mark.parametrize(("fill", "row"), [((aten.zeros.default,), 0), ((aten.full.default, 3), 3)])
def test_the_same_row_for_every_token_is_looked_up_by_position(fill: tuple[Any, ...], row: int) -> None:
    graph = LoweredGraph()
    positions = graph.input("positions")
    positions.name, positions.target = "position_ids", "position_ids"
    length = graph.function(aten.sym_size.int, positions, 1)
    kinds = graph.function(fill[0], [1, length], *fill[1:], dtype=torch.int64)
    rows = graph.function(octavo.embedding.default, kinds, graph.weight("kinds", torch.randn(4, 8)))
    graph_module = graph.finish(graph.function(aten.add.Tensor, graph.tokens("x", (8,), FP32), rows))
    report = run_pass(functools.partial(fold_position_tables, max_model_len=16), graph_module)
    prove_report(report, {})
    (name,) = report.notes
    assert torch.equal(held(graph_module, name), held(graph_module, "kinds")[row].expand(16, 8))
