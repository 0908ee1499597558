"""What the Triton rows read off nodes, what they refuse, and which launches a node gets."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from lowered import LoweredGraph
from torch import fx

from octavo.codegen.attention_triton import num_splits
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.rows_triton import MAX_ROW
from octavo.codegen.select import TABLE, Selection, select
from octavo.compiler.expression import evaluate, holds, validate, validate_condition
from octavo.compiler.ops import OPS
from octavo.compiler.program import COLLECTIVES, DIMS
from octavo.compiler.target import load_target

B200 = load_target("b200")
BF16, FP32 = torch.bfloat16, torch.float32


def choose(node: fx.Node, arch: int = 100) -> Selection:
    return select(node, replace(B200, arch=arch))


def linear(n: int, k: int, dtype: torch.dtype = BF16, rows: str = "T", bias: bool = False) -> fx.Node:
    graph = LoweredGraph()
    graph.input("input_ids")
    graph.input("logit_rows")
    x = graph.tokens("x", (k,), dtype, rows)
    shift = [graph.weight("b", torch.zeros(n, dtype=dtype))] if bias else []
    return graph.call("linear", x, graph.weight("w", torch.zeros(n, k, dtype=dtype)), *shift)


def attention(heads: int, kv_heads: int, dim: int, page_size: int, sinks: bool = False) -> fx.Node:
    graph = LoweredGraph()
    graph.input("input_ids")
    q = graph.tokens("q", (heads, dim), BF16)
    caches = [graph.cache(f"{name}_cache_0", kv_heads, page_size, dim, BF16) for name in "kv"]
    batch = [graph.input(name) for name in ("page_table", "seq_lens", "cu_seqlens_q")]
    sink = graph.weight("s", torch.zeros(heads, dtype=BF16)) if sinks else None
    return graph.call("paged_attention", q, *caches, *batch, sink, 0.125, 0, 0.0)


# Their nodes are in tests of their own: test_quantized_rows_triton and those of experts.
QUANTIZED = {op.name for op in OPS if op.name.startswith(("nvfp4_", "fp8_")) or op.name.endswith("quantize")}
# Ops that passes replace before kernels are chosen, and those that ranks do together.
BEFORE_LOWERING = {"attention", "gated_mlp", "mla_attention", "latent_attention", *COLLECTIVES}


def every_op() -> list[fx.Node]:
    """One node for each op of a lowered graph, in the shapes of SmolLM2-135M."""
    graph = LoweredGraph()
    ids, rows = graph.input("input_ids"), graph.input("logit_rows")
    positions, slots = graph.input("positions"), graph.input("slot_mapping")
    x, y, w = (
        graph.tokens("x", (576,), BF16),
        graph.tokens("y", (576,), BF16),
        graph.weight("w", torch.zeros(576)),
    )
    heads = graph.tokens("heads", (3, 64), BF16)
    qkv, gate_up = graph.tokens("qkv", (960,), BF16), graph.tokens("gate_up", (3072,), BF16)
    tables = [graph.weight(name, torch.zeros(2048, 64, dtype=BF16)) for name in ("cos", "sin")]
    angles = [graph.tokens(name, (64,), BF16) for name in ("c", "s")]
    caches = [graph.cache(f"{name}_cache_0", 3, 64, 64, BF16) for name in "kv"]
    return [
        graph.call("embedding", ids, graph.weight("table", torch.zeros(49152, 576, dtype=BF16))),
        graph.call("rms_norm", x, w, 1e-5),
        graph.call("add_rms_norm", x, y, w, 1e-5),
        graph.call("rope", heads, *angles),
        graph.call("kv_write", heads, heads, *caches, slots),
        graph.call("rope_kv_write", qkv, *tables, positions, slots, *caches, 9),
        graph.call("act_mul", gate_up, "silu"),
        graph.call("gather_logits", x, rows),
        graph.call("add", x, y),
        graph.call("layer_norm", x, w, None, 1e-5),
        graph.call("pointwise", x, y, w, None, "silu(a) * b - c", "bf16"),
        linear(960, 576),
        linear(49153, 576),
        attention(9, 3, 64, 64),
        *experts(graph),
        *latents(graph),
    ]


def latents(graph: LoweredGraph) -> list[fx.Node]:
    """Attention over latents of 64 with rotated parts of 16, and what surrounds it."""
    latent, k_rope = graph.tokens("latent", (64,), BF16), graph.tokens("k_rope", (16,), BF16)
    q_latent, q_rope = graph.tokens("q_latent", (16, 64), BF16), graph.tokens("q_rope", (16, 16), BF16)
    cache = graph.cache("k_cache_1", 1, 64, 80, BF16)
    batch = [graph.input(name) for name in ("page_table", "seq_lens", "cu_seqlens_q")]
    slots = next(n for n in graph.graph.nodes if n.name == "slot_mapping")
    weight = graph.weight("w_uk", torch.zeros(16, 64, 64, dtype=BF16))
    return [
        graph.call("head_linear", q_latent, weight),
        graph.call("latent_write", latent, k_rope, cache, slots),
        graph.call("paged_mla_attention", q_latent, q_rope, cache, *batch, 0.1, 0, 0.0),
    ]


def experts(graph: LoweredGraph) -> list[fx.Node]:
    """A router, its experts by other numbers, and a mixture of experts."""
    x, logits = graph.tokens("tokens", (64,), BF16), graph.tokens("logits", (8,), FP32)
    slots, weights = graph.tokens("slots", (2,), torch.int64), graph.tokens("weights", (2,), FP32)
    gate_up = graph.weight("gate_up_experts", torch.zeros(8, 96, 64, dtype=BF16))
    down = graph.weight("down_experts", torch.zeros(8, 64, 48, dtype=BF16))
    return [
        graph.call("map_experts", slots, graph.weight("table", torch.zeros(8, dtype=torch.int64))),
        graph.call("router", logits, None, 2, "softmax", True, 1, 1, "max", 1.0),
        graph.call("moe", x, slots, weights, gate_up, None, down, None, "silu", 0.0, 0.0),
    ]


def test_every_op_of_a_lowered_graph_has_a_row() -> None:
    served = {row.op for row in TABLE["triton"]}
    assert served == {op.name for op in OPS} - BEFORE_LOWERING
    assert {choose(node).spec.op for node in every_op()} == served - QUANTIZED


@pytest.mark.parametrize("node", every_op(), ids=str)
def test_expressions_of_a_spec_are_about_sizes_of_a_step(node: fx.Node) -> None:
    for kernel in choose(node).spec.launches:
        validate_condition(kernel.when, DIMS)
        shapes = [size for arg in kernel.args for size in (*arg.shape, arg.value) if size != ""]
        shapes += [size for _, _, shape in kernel.scratch for size in shape]
        for expression in (*kernel.grid, *shapes):
            assert isinstance(expression, int | str)
            validate(expression, DIMS)
        for expression in (kernel.bytes, kernel.flops):
            validate(expression, (*DIMS, "S"))
            assert evaluate(expression, dict.fromkeys((*DIMS, "S"), 3)) >= 0
        for other in kernel.choices:
            assert (other.op, other.when, other.scratch) == (kernel.op, kernel.when, kernel.scratch)


def launched(spec: KernelSpec, **dims: int) -> list[str]:
    stems = [(kernel.template.split("/")[1].split(".")[0], kernel.when) for kernel in spec.launches]
    return [stem for stem, when in stems if holds(when, dims)]


def test_a_linear_has_one_kernel_for_each_number_of_rows() -> None:
    spec = choose(linear(576, 576)).spec
    for rows, stem in (
        (1, "linear_few_rows"),
        (16, "linear_few_rows"),
        (64, "linear_few_rows"),
        (65, "linear"),
    ):
        assert launched(spec, T=rows) == [stem]
    (narrow,) = [kernel for kernel in spec.launches if holds(kernel.when, {"T": 16})]
    assert dict(narrow.params)["BLOCK_M"] == 16
    logits = choose(linear(49152, 576, rows="L")).spec
    assert launched(logits, T=1000, L=1) == ["linear_few_rows"]


def test_the_last_linear_writes_fp32() -> None:
    node = linear(49152, 576)
    node.graph.output((node,))
    params = [dict(kernel.params) for kernel in choose(node).spec.launches]
    assert {(p["dtype"], p["out_dtype"]) for p in params} == {("bf16", "fp32")}


@pytest.mark.parametrize(
    ("node", "arch", "reason"),
    [
        (linear(64, 100), 100, "TMA needs rows of a multiple of 16 bytes, got k 100 (200 bytes)"),
        (linear(50257, 64), 100, "TMA needs rows of a multiple of 16 bytes, got n 50257 (100514 bytes)"),
        (linear(64, 64, FP32), 100, "dtype must be bf16 or fp8, got fp32"),
        (linear(64, 64), 80, "TMA needs sm_90 or newer, b200 is sm_80"),
    ],
    ids=["odd_k", "odd_n", "fp32", "sm_80"],
)
def test_tma_row_refuses_with_the_numbers(node: fx.Node, arch: int, reason: str) -> None:
    chosen = choose(node, arch=arch)
    assert (chosen.row, chosen.skipped) == ("linear_pointer", (("linear_tma", reason),))


def test_a_step_of_one_token_per_request_decodes() -> None:
    spec = choose(attention(9, 3, 64, 64)).spec
    assert launched(spec, T=4, R=4) == ["paged_attention_decode", "paged_attention_combine"]
    assert launched(spec, T=5, R=4) == ["paged_attention_prefill"]
    assert [name for name, _, _ in spec.scratch] == ["partial", "lse"]


@pytest.mark.parametrize(("requests", "pages"), [(1, 1), (1, 100), (8, 2), (8, 4000), (1000, 5)])
def test_parts_of_a_context_are_neither_too_many_nor_too_few(requests: int, pages: int) -> None:
    parts = evaluate(num_splits(32), {"R": requests, "P": pages})
    assert 1 <= parts <= 32
    assert parts <= pages + 1
    assert requests * parts >= min(16, requests * pages // 2)


def test_rows_that_no_program_holds_are_refused() -> None:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (MAX_ROW + 1,), BF16)
    node = graph.call("rms_norm", x, graph.weight("w", torch.zeros(MAX_ROW + 1)), 1e-5)
    with pytest.raises(Exception, match=f"rows of x must have at most {MAX_ROW} elements, got {MAX_ROW + 1}"):
        choose(node)


def test_operands_of_a_pointwise_are_rows_or_vectors_of_their_own_dtypes() -> None:
    spec = next(choose(node).spec for node in every_op() if "pointwise" in node.name)
    assert [(arg.name, arg.dtype) for arg in spec.args] == [
        ("a", "bf16"),
        ("b", "bf16"),
        ("c", "fp32"),
        ("out", "bf16"),
    ]
    assert dict(spec.params)["operands"] == "a rows;b rows;c vector"


def test_weights_of_a_layer_norm_have_their_own_dtype() -> None:
    spec = next(choose(node).spec for node in every_op() if "layer_norm" in node.name)
    assert [(arg.name, arg.dtype) for arg in spec.args] == [
        ("x", "bf16"),
        ("weight", "fp32"),
        ("out", "bf16"),
    ]


def test_a_group_larger_than_a_tile_is_refused() -> None:
    with pytest.raises(Exception, match="at most 128 query heads may share a kv head, got 129"):
        choose(attention(129, 1, 64, 64))


def params_of(nodes: Sequence[fx.Node]) -> list[dict[str, object]]:
    return [dict(choose(node).spec.params) for node in nodes]


def test_shapes_reach_the_kernel() -> None:
    given = params_of([attention(20, 4, 80, 16, sinks=True), linear(960, 576, bias=True)])
    names = ("NUM_HEADS", "NUM_KV_HEADS", "HEAD_DIM", "BLOCK_D", "PAGE_SIZE")
    assert {name: given[0][name] for name in names} == {
        "NUM_HEADS": 20, "NUM_KV_HEADS": 4, "HEAD_DIM": 80, "BLOCK_D": 128, "PAGE_SIZE": 16,
    }  # fmt: skip
    combine = choose(attention(20, 4, 80, 16, sinks=True)).spec.launches[1]
    assert dict(combine.params)["sinks"] is True
    assert (given[1]["N"], given[1]["K"], given[1]["bias"]) == (960, 576, True)
