"""The Triton rows of quantised pages: which kernel is chosen, that its arguments bind by name, and what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from torch import fx

from octavo.codegen.select import Selection, select
from octavo.compiler.dims import dtype_name
from octavo.compiler.errors import CodegenError
from octavo.compiler.legality import named_arguments
from octavo.compiler.target import load_target

B200 = load_target("b200")
BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
HEADS, KV_HEADS, DIMS, PAGE_SIZE = 4, 2, {"k": 64, "v": 32}, 16


def node(op: str, pages: str, dtype: torch.dtype = BF16) -> fx.Node:
    graph = LoweredGraph()
    graph.input("input_ids")
    slots, positions = graph.input("slot_mapping"), graph.input("positions")
    pack, page_dtype = (2, torch.uint8) if pages == "nvfp4" else (1, E4M3)
    caches = [
        graph.cache(f"{n}_cache_0", KV_HEADS, PAGE_SIZE, d // pack, page_dtype) for n, d in DIMS.items()
    ]
    extra: dict[str, Any] = {"multipliers": graph.weight("multipliers", torch.ones(2))}
    if pages == "nvfp4":
        for n, d in DIMS.items():
            extra[f"{n}_scales"] = graph.cache(f"{n}_scales_0", KV_HEADS, PAGE_SIZE, d // 16, E4M3)
    if op == "paged_attention":
        batch = [graph.input(name) for name in ("page_table", "seq_lens", "cu_seqlens_q")]
        q = graph.tokens("q", (HEADS, DIMS["k"]), dtype)
        return graph.call(op, q, *caches, *batch, None, 0.125, 0, 0.0, **extra)
    if op == "kv_write":
        rows = [graph.tokens(n, (KV_HEADS, d), dtype) for n, d in DIMS.items()]
        return graph.call(op, *rows, *caches, slots, **extra)
    qkv = graph.tokens("qkv", ((HEADS + KV_HEADS) * DIMS["k"] + KV_HEADS * DIMS["v"],), dtype)
    tables = [graph.weight(n, torch.zeros(50, 64, dtype=dtype)) for n in ("cos", "sin")]
    return graph.call(op, qkv, *tables, positions, slots, *caches, HEADS, **extra)


def latent(op: str, dtype: torch.dtype = BF16) -> fx.Node:
    graph = LoweredGraph()
    graph.input("input_ids")
    cache, multiplier = graph.cache("k_cache_0", 1, 64, 576, E4M3), graph.weight("multiplier", torch.ones(1))
    if op == "latent_write":
        parts = graph.tokens("latent", (512,), dtype), graph.tokens("k_rope", (64,), dtype)
        return graph.call(op, *parts, cache, graph.input("slot_mapping"), multiplier=multiplier)
    batch = [graph.input(name) for name in ("page_table", "seq_lens", "cu_seqlens_q")]
    queries = graph.tokens("q_latent", (16, 512), dtype), graph.tokens("q_rope", (16, 64), dtype)
    return graph.call(op, *queries, cache, *batch, 0.1, multiplier=multiplier)


def choose(node: fx.Node, arch: int = 100) -> Selection:
    return select(node, replace(B200, arch=arch))


@pytest.mark.parametrize("arch", [90, 100, 120])
@pytest.mark.parametrize(
    ("op", "pages"),
    [
        *(
            (op, pages)
            for op in ("kv_write", "rope_kv_write", "paged_attention")
            for pages in ("fp8", "nvfp4")
        ),
        ("latent_write", "fp8"),
        ("paged_mla_attention", "fp8"),
    ],
)
def test_arguments_are_those_of_the_op(op: str, pages: str, arch: int) -> None:
    """Every pointer is an argument of the op, of that dtype, a result, or scratch."""
    chosen = latent(op) if "latent" in op or "mla" in op else node(op, pages)
    spec = choose(chosen, arch).spec
    given, scratch = named_arguments(chosen), {name: dtype for name, dtype, _ in spec.scratch}
    seen = set()
    for arg in (arg for launch in spec.launches for arg in launch.args if arg.kind != "scalar"):
        name = arg.name.removesuffix("_ptr").removesuffix("_desc")
        seen.add(name)
        if name in scratch or name == "out":
            assert scratch.get(name, "bf16") == arg.dtype
        else:
            assert dtype_name(given[name].meta["val"]) == arg.dtype
    tensors = {name for name, value in given.items() if isinstance(value, fx.Node)}
    assert tensors <= seen


@pytest.mark.parametrize("pages", ["fp8", "nvfp4"])
def test_sizes_are_counted_in_elements(pages: str) -> None:
    for op in ("kv_write", "rope_kv_write", "paged_attention"):
        params = dict(choose(node(op, pages)).spec.params)
        assert (params["HEAD_DIM"], params["VALUE_DIM"], params["pages"]) == (64, 32, pages)


def test_refuses_what_has_no_kernel() -> None:
    with pytest.raises(CodegenError, match="E4M3 needs sm_90 or newer, b200 is sm_80; pages of bf16 serve"):
        choose(node("kv_write", "fp8"), 80)
    with pytest.raises(CodegenError, match="queries of fp32 would be multiplied in fp16"):
        choose(node("paged_attention", "nvfp4", FP32))
    with pytest.raises(CodegenError, match="queries must be bf16 or fp16 for FP8 pages, got fp32"):
        choose(latent("paged_mla_attention", FP32))
