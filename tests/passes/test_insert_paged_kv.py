"""Attention reads pages, one pair of caches a layer, and logits are computed for the wanted rows only."""

import pytest
import torch
from heads import head_of
from models import HEAD_DIM, KV_HEADS, LAYERS
from stages import (
    BF16,
    FP32,
    SETTINGS,
    after,
    assert_idempotent,
    assert_same_numbers,
    before,
    calls,
    count,
    step_of,
)

from octavo.compiler.capture import capture
from octavo.compiler.pipeline import PIPELINE, apply_step
from octavo.compiler.program import STEP_INPUTS
from octavo.passes.insert_paged_kv import insert_paged_kv
from octavo.passes.rule import run_pass

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama", "window"])
def test_fires_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("insert_paged_kv", name, dtype)
    assert report.matched == LAYERS + 1  # and the gather
    assert count(graph_module, octavo.paged_attention.default) == LAYERS
    assert count(graph_module, octavo.attention.default) == 0
    assert_same_numbers(graph_module, name, dtype)


def test_adds_the_inputs_of_a_step_and_the_caches_in_order() -> None:
    graph_module, _ = after("insert_paged_kv")
    inputs = [n for n in graph_module.graph.nodes if n.op == "placeholder"]
    caches = [f"{kind}_cache_{i}" for i in range(LAYERS) for kind in "kv"]
    assert [n.name for n in inputs] == [*(n for n in STEP_INPUTS if n not in ("row_ranks", "tree")), *caches]
    shapes = {tuple(n.meta["val"].shape[1:]) for n in inputs if n.name in caches}
    assert shapes == {(KV_HEADS, SETTINGS.page_size, HEAD_DIM)}
    symbols = [
        n.meta["val"].shape[0]
        for n in inputs
        if n.name in ("seq_lens", "logit_rows", "slot_mapping", "k_cache_0")
    ]
    assert len({str(size) for size in symbols}) == 4


def test_every_layer_writes_before_it_reads_its_own_caches() -> None:
    graph_module, _ = after("insert_paged_kv")
    pairs = zip(
        calls(graph_module, octavo.kv_write.default),
        calls(graph_module, octavo.paged_attention.default),
        strict=True,
    )
    for layer, (write, read) in enumerate(pairs):
        assert write < read
        assert [str(n) for n in write.args[2:4]] == [f"k_cache_{layer}", f"v_cache_{layer}"]
        assert read.args[1:3] == write.args[2:4]


def test_gathers_before_the_last_product() -> None:
    graph_module, _ = after("insert_paged_kv")
    (gather,) = calls(graph_module, octavo.gather_logits.default)
    (head,) = gather.users
    assert (head.target, head.args[0]) == (octavo.linear.default, gather)
    assert head in graph_module.graph.output_node().all_input_nodes


def test_keeps_the_window() -> None:
    graph_module, _ = after("insert_paged_kv", "window")
    assert [n.args[8] for n in calls(graph_module, octavo.paged_attention.default)] == [5] * LAYERS


def test_refuses_attention_that_is_not_causal() -> None:
    graph_module = before("insert_paged_kv", "bidirectional")
    report = insert_paged_kv(graph_module, 4)
    expected = "attention is not causal: later tokens would change the pages of earlier ones"
    assert [r.reason for r in report.rejected] == [expected] * LAYERS
    assert count(graph_module, octavo.paged_attention.default) == 0


def test_idempotent() -> None:
    assert_idempotent("insert_paged_kv")


def test_does_nothing_without_attention() -> None:
    graph_module, _ = after("insert_paged_kv")
    report = run_pass(lambda g: insert_paged_kv(g, 4), graph_module)
    assert report.changed is False


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_are_gathered_before_what_is_done_to_each_logit(dtype: torch.dtype) -> None:
    graph_module, _ = after("insert_paged_kv", "gemma2", dtype)  # soft-capped logits
    (gather,) = calls(graph_module, octavo.gather_logits.default)
    assert [user.target for user in gather.users] == [octavo.linear.default]
    assert_same_numbers(graph_module, "gemma2", dtype)


def test_of_a_head_without_attention_only_the_wanted_rows_are_computed() -> None:
    graph_module = capture(head_of("medusa")).graph_module
    for step in PIPELINE[: [step.run for step in PIPELINE].index(insert_paged_kv)]:
        apply_step(step, graph_module, SETTINGS)
    report = apply_step(step_of("insert_paged_kv"), graph_module, SETTINGS)[0]
    (site,) = report.sites
    assert {n.target for n in site.after.graph.nodes} > {octavo.head_linear.default}  # and so it is proven
    (gather,) = calls(graph_module, octavo.gather_logits.default)
    assert [str(n) for n in gather.args] == ["features", "logit_rows"]
    (features,) = [n for n in graph_module.graph.nodes if n.name == "features"]
    assert list(features.users) == [gather]
