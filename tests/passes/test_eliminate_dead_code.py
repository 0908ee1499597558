"""Unused nodes and weights go; placeholders, effects and used weights stay."""

import pytest
import torch
from lowered import LoweredGraph
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, count

from octavo.passes.eliminate_dead_code import eliminate_dead_code
from octavo.passes.rule import run_pass

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_same_numbers(dtype: torch.dtype) -> None:
    graph_module, _ = after("eliminate_dead_code", "llama", dtype)
    assert_same_numbers(graph_module, "llama", dtype)


def test_fires_on_unused_nodes_and_weights() -> None:
    graph = LoweredGraph()
    x, unused = graph.tokens("x", (8,), FP32), graph.tokens("unused", (8,), FP32)
    kept, lost = (graph.weight(f"layer.{name}", torch.ones(8, 8)) for name in ("kept", "lost"))
    graph.call("linear", x, lost)
    graph_module = graph.finish(graph.call("linear", x, kept))
    report = run_pass(eliminate_dead_code, graph_module)
    assert (report.nodes_before, report.nodes_after, report.changed) == (7, 5, True)
    names = [n.name for n in graph_module.graph.nodes]
    assert unused.name in names
    assert "layer_lost" not in names


def test_keeps_writes() -> None:
    graph = LoweredGraph()
    k = graph.tokens("k", (2, 16), FP32)
    cache = graph.cache("k_cache_0", 2, 4, 16, FP32)
    graph.call("kv_write", k, k, cache, cache, graph.input("slot_mapping"))
    graph_module = graph.finish(k)
    run_pass(eliminate_dead_code, graph_module)
    assert count(graph_module, octavo.kv_write.default) == 1


def test_idempotent() -> None:
    assert_idempotent("eliminate_dead_code")
