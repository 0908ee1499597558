"""Attention whose keys and values are products of one latent becomes latent attention, and nothing else does."""

from typing import Any

import pytest
import torch
from latent import RANK, ROPE
from lowered import LoweredGraph
from models import HEADS, LAYERS
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, calls, captured, count
from torch import fx

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import Settings, lower
from octavo.passes.fuse_mla import fuse_mla
from octavo.passes.pattern import arguments, aten
from octavo.passes.rule import PassReport, run_pass

octavo = torch.ops.octavo
mla = octavo.mla_attention.default


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["deepseek_v3_dense", "latent", "latent_complex"])
def test_fires_with_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    graph_module, report = after("fuse_mla", name, dtype)
    assert report.matched == count(graph_module, mla) == LAYERS
    assert count(graph_module, octavo.attention.default) == 0
    assert_same_numbers(graph_module, name, dtype)


def test_takes_the_parts_as_they_are() -> None:
    graph_module, _ = after("fuse_mla", "latent")
    _, q_rope, latent, k_rope, w_uk, w_uv, *_ = arguments(calls(graph_module, mla)[0])
    assert latent.target is octavo.rms_norm.default
    assert latent.meta["val"].shape[2] == RANK
    assert k_rope.meta["val"].shape[2] == ROPE == q_rope.meta["val"].shape[3]
    assert {w.op for w in (w_uk, w_uv)} == {"get_attr"}
    # The even-before-odd order of both rotated parts is gone.
    assert q_rope.target is octavo.rope.default
    assert count(graph_module, aten.cat.default) < 3


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("latent_biased", "the product that makes the plain part of k has a bias"),
        ("latent_two", "expected one latent"),
        (
            "latent_normed",
            r"the plain part of k is rms_norm\w* \(octavo.rms_norm\), expected a product of the latent",
        ),
    ],
)
def test_a_model_that_differs_is_refused_by_place(name: str, reason: str) -> None:
    with pytest.raises(
        IllegalGraphError, match=rf"fuse_mla left node \w+, layers.0.attention, latent.py:\d+: .*{reason}"
    ):
        lower(captured(name), CompileOptions(verify="off"), Settings(4, 48))


def handmade(
    heads: int = 4, kv_heads: int = 4, rope_first: bool = False, q_rope_first: bool = False, sinks: bool = False,
    q_joined: bool = True, ordered: str = "", window: int = 3,
) -> tuple[fx.GraphModule, PassReport]:  # fmt: skip
    """One attention over a latent (1, T, 8) with Dn 6, Dr 4, Dv 5. ordered: whose rotated part is even before odd."""
    graph = LoweredGraph()
    q_nope, q_rope = graph.tokens("q_nope", (heads, 6), FP32), graph.tokens("q_rope", (heads, 4), FP32)
    latent, k_rope = graph.tokens("latent", (8,), FP32), graph.tokens("k_rope", (1, 4), FP32)
    halves = {"q": q_rope, "k": k_rope}
    for name in ordered:
        parts = [graph.function(aten.slice.Tensor, halves[name], 3, i, (1 << 63) - 1, 2) for i in (0, 1)]
        halves[name] = graph.function(aten.cat.default, parts, 3)
    w_uk, w_uv = (graph.weight(n, torch.randn(kv_heads * w, 8)) for n, w in (("w_uk", 6), ("w_uv", 5)))
    made = [
        graph.function(aten.reshape.default, graph.call("linear", latent, w), [1, -1, kv_heads, width])
        for w, width in ((w_uk, 6), (w_uv, 5))
    ]
    shared = graph.function(aten.expand.default, halves["k"], [-1, -1, kv_heads, -1])
    k_parts, q_parts = [made[0], shared], [q_nope, halves["q"]]
    q = graph.function(aten.cat.default, q_parts[::-1] if q_rope_first else q_parts, 3)
    if not q_joined:
        q = graph.function(aten.neg.default, q)
    k = graph.function(aten.cat.default, k_parts[::-1] if rope_first else k_parts, 3)
    sink = graph.weight("sinks", torch.zeros(heads)) if sinks else None
    out = graph.call("attention", q, k, made[1], sink, 0.3, True, window, 2.0)
    graph_module = graph.finish(out)
    return graph_module, run_pass(fuse_mla, graph_module)


def test_keeps_the_options() -> None:
    graph_module, report = handmade()
    assert report.matched == 1
    assert calls(graph_module, mla)[0].args[6:] == (0.3, True, 3, 2.0)


@pytest.mark.parametrize(
    "condition",
    [{}, {"rope_first": True, "q_rope_first": True}, {"ordered": "qk"}],
    ids=["plain", "first", "even"],
)
def test_same_numbers_however_the_parts_lie(condition: dict[str, Any]) -> None:
    torch.manual_seed(0)
    values = [torch.randn(1, 5, *shape) for shape in ((4, 6), (4, 4), (8,), (1, 4))]
    graph_module, report = handmade(**condition)
    assert report.matched == 1
    site = report.sites[0]
    weights = [graph_module.get_buffer(name) for name in ("w_uk", "w_uv")]
    names = [n.name for n in site.before.graph.nodes if n.op == "placeholder"]
    given = dict(
        zip(("q_nope", "q_rope", "latent", "k_rope", "w_uk", "w_uv"), (*values, *weights), strict=True)
    )
    inputs = [given[name] for name in names]
    torch.testing.assert_close(site.after(*inputs), site.before(*inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("condition", "reason"),
    [
        ({"kv_heads": 2}, "4 query heads share 2 keys"),
        ({"sinks": True}, "latent attention with sinks"),
        ({"q_joined": False}, "q joins 0 parts and k 2, expected a plain part and a rotated one each"),
        ({"rope_first": True}, "the last part of q has 6 elements a head, that of k 4"),
    ],
    ids=["groups", "sinks", "whole q", "order"],
)
def test_refuses(condition: dict[str, Any], reason: str) -> None:
    graph_module, report = handmade(**condition)
    assert (report.matched, count(graph_module, mla)) == (0, 0)
    assert reason in [r.reason for r in report.rejected]


@pytest.mark.parametrize("ordered", ["q", "k"])
def test_an_order_of_one_side_stays(ordered: str) -> None:
    graph_module, report = handmade(ordered=ordered)
    assert report.matched == 1
    q_rope, k_rope = (arguments(calls(graph_module, mla)[0])[i] for i in (1, 3))
    below = [arguments(view)[0] for view in (q_rope, k_rope)]  # a transpose and a reshape that change nothing
    assert [n.target is aten.cat.default for n in below] == [ordered == "q", ordered == "k"]


def test_ordinary_attention_is_no_near_miss() -> None:
    _, report = after("fuse_mla", "llama")
    assert (report.matched, report.rejected, report.near_misses) == (0, [], [])


def test_idempotent() -> None:
    assert_idempotent("fuse_mla", "latent")


def test_heads_are_those_of_the_model() -> None:
    graph_module, _ = after("fuse_mla", "latent")
    assert {n.meta["val"].shape[2] for n in calls(graph_module, mla)} == {HEADS}
