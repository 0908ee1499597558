"""Rotation and cache write become one op that reads the merged projection, or are left with a reason."""

import pytest
import torch
from models import HEADS, LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, before, calls, count
from torch.fx import GraphModule

from octavo.passes.fuse_rope_kv_write import fuse_rope_kv_write
from octavo.passes.pattern import aten
from octavo.passes.rule import run_pass

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_fires_with_the_same_numbers(dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_rope_kv_write", "llama", dtype)
    assert report.matched == count(graph_module, octavo.rope_kv_write.default) == LAYERS
    assert count(graph_module, octavo.rope.default, octavo.kv_write.default, aten.slice.Tensor) == 0
    assert {n.args[7:] for n in calls(graph_module, octavo.rope_kv_write.default)} == {(HEADS, False)}
    assert_same_numbers(graph_module, "llama", dtype)


def test_keeps_a_write_before_the_attention_that_reads_it() -> None:
    graph_module, _ = after("fuse_rope_kv_write")
    order = [n.target for n in graph_module.graph.nodes]
    ops = [t for t in order if t in (octavo.rope_kv_write.default, octavo.paged_attention.default)]
    assert ops == [octavo.rope_kv_write.default, octavo.paged_attention.default] * LAYERS


def reasons(graph_module: GraphModule) -> list[str]:
    report = run_pass(fuse_rope_kv_write, graph_module)
    assert report.matched == LAYERS - len(report.rejected)
    return [r.reason for r in report.rejected]


def test_refuses_separate_projections() -> None:
    expected = "q, k and v are not rotated parts of one projection"
    assert reasons(before("fuse_rope_kv_write", "fused")) == [expected] * LAYERS


def test_refuses_parts_that_do_not_follow_each_other() -> None:
    graph_module = before("fuse_rope_kv_write")
    first = calls(graph_module, aten.slice.Tensor)[0]
    first.args = (first.args[0], 2, 0, 60)
    assert reasons(graph_module) == ["the parts do not follow each other: q ends at 60, k at 96"]


def test_refuses_two_styles_of_rotation() -> None:
    graph_module = before("fuse_rope_kv_write")
    first = calls(graph_module, octavo.rope.default)[0]
    first.args = (*first.args, True)
    assert reasons(graph_module) == ["q and k are rotated in different styles"]


def test_refuses_different_tables() -> None:
    graph_module = before("fuse_rope_kv_write")
    first = calls(graph_module, octavo.rope.default)[0]
    first.args = (first.args[0], first.args[2], first.args[1])
    assert reasons(graph_module) == ["q and k do not share their projection and their tables"]


def test_idempotent() -> None:
    assert_idempotent("fuse_rope_kv_write")
