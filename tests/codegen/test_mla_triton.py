"""Latent attention for b200: what is chosen, what is refused, and that DeepSeek's sizes build within every limit."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lowered import LoweredGraph
from torch import fx

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.evidence import evidence_row
from octavo.codegen.mla import HeadProduct, Latents
from octavo.codegen.mla_fp8_triton import fp8_refusal, mla_fp8_spec
from octavo.codegen.mla_triton import head_linear_spec, latent_write_spec, mla_spec
from octavo.codegen.select import select
from octavo.compiler.errors import CodegenError
from octavo.compiler.target import load_target

B200 = load_target("b200")
BF16 = torch.bfloat16


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("heads", [16, 128])
def test_deepseek_sizes_build_without_spills(heads: int) -> None:
    """Pages of 64 rows of 512 + 64; the products on the tensor core."""
    for kernel in build_kernels(
        mla_spec(Latents(heads, 512, 64, 64, "bf16", "bf16", 0.1), B200).launches, B200
    ):
        row = evidence_row(kernel)
        assert kernel.binary is not None and kernel.binary.startswith(b"\x7fELF")
        assert (row["spill_bytes"], row["refused"]) == (0, 0)
        if "mla" in kernel.spec.name and (heads == 128 or kernel.spec.when == "T > R"):
            assert "UTCHMMA" in str(row["key_opcodes"])


@pytest.mark.slow
@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("sizes", [(128, 512, 64), (40, 256, 32), (20, 512, 64), (4, 32, 8)], ids=str)
def test_every_size_has_a_form_that_builds(sizes: tuple[int, int, int], dtype: str, page_size: int) -> None:
    build_kernels(mla_spec(Latents(*sizes, page_size, dtype, dtype, 0.1, 1024, 50.0), B200).launches, B200)


@pytest.mark.usefixtures("empty_cache")
def test_products_and_writes_build_without_spills() -> None:
    specs = [
        *head_linear_spec(HeadProduct(128, 512, 128, "bf16", "bf16")).launches,
        *head_linear_spec(HeadProduct(4, 12, 32, "fp32", "fp32")).launches,
        latent_write_spec(512, 64, "bf16"),
    ]
    for kernel in build_kernels(specs, B200):
        row = evidence_row(kernel)
        assert (row["spill_bytes"], row["refused"]) == (0, 0)
        if kernel.spec.label.endswith("m128"):
            assert "UTCHMMA" in str(row["key_opcodes"])


def attention_node(rank: int = 512, heads: int = 16, cache_dtype: torch.dtype = BF16) -> fx.Node:
    graph = LoweredGraph()
    graph.input("input_ids")
    cache = graph.cache("k_cache_0", 1, 64, rank + 64, cache_dtype)
    queries = [
        graph.tokens(name, (heads, width), BF16) for name, width in (("q_latent", rank), ("q_rope", 64))
    ]
    step = [graph.input(name) for name in ("page_table", "seq_lens", "cu_seqlens_q")]
    return graph.call("paged_mla_attention", *queries, cache, *step, 0.1, 7, 2.0)


def test_selects_by_what_the_step_holds() -> None:
    selection = select(attention_node(heads=128), B200)
    decode, joined, prefill = selection.spec.launches
    assert [s.when for s in (decode, joined, prefill)] == ["T == R", "T == R", "T > R"]
    assert (dict(decode.params)["WINDOW"], dict(decode.params)["SOFTCAP"]) == (7, 2.0)
    # 64 of the 128 heads a tile; each reads a cached row once.
    assert (decode.grid[:2], prefill.grid[:2]) == (("R", "2"), ("T // 1 + R", "2"))
    assert decode.bytes.startswith(f"S * {2 * (512 + 64)} + ")


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        (attention_node(rank=1024), "a latent must have at most 512 elements, got 1024"),
        (
            attention_node(cache_dtype=torch.float32),
            "queries and cache must have one dtype, got bfloat16 and float32",
        ),
    ],
    ids=["rank", "dtype"],
)
def test_refuses(node: fx.Node, reason: str) -> None:
    with pytest.raises(CodegenError, match=reason):
        select(node, B200)


def test_fp8_pages_are_multiplied_natively_where_a_tile_has_the_rows() -> None:
    deepseek = Latents(128, 512, 64, 64, "bf16", "fp8", 0.1)
    wide = mla_fp8_spec(deepseek, B200).launches
    assert [spec.template.split("/")[1].split(".")[0] for spec in wide] == [
        "latent_queries_fp8", "paged_mla_fp8", "paged_attention_combine", "paged_mla_fp8",
    ]  # fmt: skip
    assert {"mma_fp8", "tma_load"} <= set(wide[1].features)
    assert [name for name, _, _ in wide[0].scratch] == ["q", "q_scale", "partial", "lse"]
    assert dict(wide[1].params)["PARTS"] == 2 and wide[1].grid[1] == "2"
    gathered = mla_fp8_spec(replace(deepseek, page_size=16), B200).launches[1]
    assert "tma_load" not in gathered.features
    small = mla_fp8_spec(deepseek, load_target("rtx_pro_6000")).launches
    assert "mma_fp8" not in small[0].features and dict(small[0].params)["BLOCK_M"] == 16


def test_what_fp8_pages_do_not_serve_is_refused() -> None:
    deepseek = Latents(128, 512, 64, 64, "bf16", "fp8", 0.1)
    assert fp8_refusal(deepseek, B200) is None
    assert "at most 512 elements, got 640" in (fp8_refusal(replace(deepseek, rank=640), B200) or "")
    assert "pages of fp32 serve" in (fp8_refusal(replace(deepseek, dtype="fp32"), B200) or "")
    assert "sm_89" in (fp8_refusal(deepseek, replace(B200, arch=89)) or "")


@pytest.mark.usefixtures("empty_cache")
def test_fp8_pages_of_deepseek_build_on_the_fp8_tensor_core() -> None:
    spec = mla_fp8_spec(Latents(128, 512, 64, 64, "bf16", "fp8", 0.1), B200).launches[1]
    row = evidence_row(build_kernels([spec], B200)[0])
    assert (row["spill_bytes"], row["refused"]) == (0, 0)
    assert "UTCQMMA" in str(row["key_opcodes"]) and "UTMALDG" in str(row["key_opcodes"])
