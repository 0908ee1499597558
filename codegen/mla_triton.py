"""Latent attention of the Triton family: the launches of each op, and their tiles."""

from dataclasses import replace
from typing import Any

from octavo.codegen.attention_triton import Attention, combine_spec, num_splits, parts_scratch, splits_for
from octavo.codegen.kernel import Arg, KernelSpec, Param, pointer
from octavo.codegen.linear_triton import with_param, with_stages
from octavo.codegen.mla import HeadProduct, Latents
from octavo.codegen.specs_triton import Heads, ceil_div, in_order, number, power_of_2, warps_for
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target

# A tile's sums are as wide as the latent: 512 of them in fp32 for each row fill the registers or the tensor memory.
MAX_RANK = 512
MAX_ROWS = {"bf16": 64, "fp32": 16}
# (keys per tile, warps, tiles in flight), best first.
FORMS = {
    "bf16": ((64, 8, 2), (32, 8, 2), (32, 8, 1), (16, 8, 1), (32, 4, 2), (16, 4, 1)),
    "fp32": ((16, 8, 2), (16, 8, 1), (16, 16, 1)),
}


def mla_spec(latents: Latents, target: Target) -> KernelSpec:
    """A split context where every request has one token: T == R says so, as none comes without."""
    most = max_rows(latents, target)
    block_m = min(power_of_2(latents.heads, 16), most)
    splits = splits_for(ceil_div(latents.heads, min(latents.heads, block_m)), target)
    decode = replace(decode_spec(latents, block_m, splits), when="T == R")
    joined = replace(joining_spec(latents, splits), when="T == R")
    # Heads that do not fill the rows of a tile cost registers for finding each row's token: smaller tiles then.
    rows = most if most % min(latents.heads, most) == 0 else block_m
    return in_order(decode, joined, replace(prefill_spec(latents, rows), when="T > R"))


def max_rows(latents: Latents, target: Target) -> int:
    """Rows of the tallest tile: 16 where shared memory does not hold the queries of more and 32 keys."""
    most = MAX_ROWS[latents.dtype]
    needed = (most + 32) * latents.width * ITEM_BYTES[latents.dtype]
    return 16 if target.smem_bytes and needed > target.smem_bytes else most


def decode_spec(latents: Latents, block_m: int, splits: int) -> KernelSpec:
    parts = num_splits(splits)
    heads = min(latents.heads, block_m)
    written = (pointer("partial", "fp32"), pointer("lse", "fp32"), number("num_splits", parts))
    row_bytes = latents.heads * (latents.width * ITEM_BYTES[latents.dtype] + latents.rank * 4)
    return _spec(
        latents, block_m, True, written,
        grid=("R", str(ceil_div(latents.heads, heads)), parts),
        bytes=f"S * {latents.width * ITEM_BYTES[latents.cache_dtype]} + R * {row_bytes}",
        flops=f"S * {latents.flops_of_key}",
        scratch=parts_scratch("R", latents.heads, parts, latents.rank),
    )  # fmt: skip


def joining_spec(latents: Latents, splits: int) -> KernelSpec:
    """paged_attention's kernel, with twice the warps for a row of a whole latent."""
    heads = Heads(latents.heads, 1, latents.width, latents.rank, latents.page_size)
    spec = combine_spec(Attention(heads, latents.dtype, latents.scale), splits)
    return replace(spec, op="paged_mla_attention", num_warps=8)


def prefill_spec(latents: Latents, block_m: int) -> KernelSpec:
    """flops are those of T queries that see S keys between them; a causal square needs half."""
    heads = min(latents.heads, block_m)
    written = (pointer("cu_seqlens_q", "i32"), pointer("out", latents.dtype), number("num_requests", "R"))
    return _spec(
        latents, block_m, False, written,
        grid=(f"T // {block_m // heads} + R", str(ceil_div(latents.heads, heads)), "1"),
        bytes=latents.bytes,
        flops=f"T * S * {latents.flops_of_key}",
    )  # fmt: skip


def _spec(latents: Latents, block_m: int, split: bool, written: tuple[Arg, ...], **rest: Any) -> KernelSpec:
    names = ("q_latent", "q_rope", "cache")
    indices = (pointer("page_table", "i32"), pointer("seq_lens", "i32"))
    params: tuple[tuple[str, Param], ...] = (
        ("dtype", latents.dtype), ("split", split), ("softcap", latents.softcap > 0.0), ("SCALE", latents.scale),
        ("SOFTCAP", latents.softcap), ("WINDOW", latents.window), ("NUM_HEADS", latents.heads),
        ("RANK", latents.rank), ("ROPE_DIM", latents.rope_dim), ("PAGE_SIZE", latents.page_size),
        ("HEADS", min(latents.heads, block_m)), ("BLOCK_M", block_m), ("BLOCK_R", power_of_2(latents.rank, 16)),
        ("BLOCK_E", power_of_2(latents.rope_dim, 16)),
    )  # fmt: skip
    spec = KernelSpec(
        op="paged_mla_attention",
        template="triton/paged_mla_attention.py.jinja",
        params=params,
        args=(
            *(pointer(name, latents.dtype) for name in names), *indices, *written, number("max_pages", "P"),
        ),
        label=f"{latents.label}_{'decode' if split else 'prefill'}",
        **rest,
    )  # fmt: skip
    # 64 queries and two tiles of 64 keys of a whole latent exceed any shared memory
    is_large = block_m * latents.rank > 16 * MAX_RANK
    forms = [form for form in FORMS[latents.dtype] if form[0] < 64 or not is_large]
    first, *others = (_form(spec, *form) for form in forms)
    return replace(first, alternatives=tuple(others))


def _form(spec: KernelSpec, block_n: int, num_warps: int, stages: int) -> KernelSpec:
    sized = with_param(with_param(spec, "BLOCK_N", block_n), "STAGES", stages)
    return replace(sized, num_warps=num_warps, num_stages=stages)


def head_linear_spec(product: HeadProduct) -> KernelSpec:
    """Kernels for up to 16 tokens and for more."""
    block_k = 64 if product.dtype == "bf16" else 32
    few, many = head_tiles(product, 16, 64, block_k), head_tiles(product, 64, 64, block_k // 2)
    if product.dtype == "bf16" and product.k % 8 == 0:
        many = head_tiles(product, 128, 128, 64)
    wanted = (
        "" if product.rows == "T" else f"{product.rows} > 0 and "
    )  # a step has tokens, but not always rows
    return in_order(
        replace(few, when=f"{wanted}{product.rows} <= 16"), replace(many, when=f"{product.rows} > 16")
    )


def head_tiles(product: HeadProduct, block_m: int, block_n: int, block_k: int) -> KernelSpec:
    numbers = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": block_k, "STAGES": 3}
    turns = product.heads * ceil_div(product.n, block_n) * ceil_div(product.k, block_k)
    spec = KernelSpec(
        op="head_linear",
        template="triton/head_linear.py.jinja",
        params=(
            ("dtype", product.dtype), ("NUM_HEADS", product.heads), ("N", product.n), ("K", product.k),
            *numbers.items(),
        ),
        args=(
            pointer("x", product.dtype), pointer("weight", product.dtype), pointer("out", product.out_dtype),
            number("num_tokens", product.rows),
        ),
        grid=(str(ceil_div(product.n, block_n)), f"({product.rows} + {block_m - 1}) // {block_m}", str(product.heads)),
        iterations=f"({product.rows} + {block_m - 1}) // {block_m} * {turns}",
        narrow_loads=product.k % 8 > 0,
        bytes=product.bytes,
        flops=product.flops,
        num_warps=4 if block_m < 128 else 8,
        num_stages=3,
        label=f"{product.label}_m{block_m}",
    )  # fmt: skip
    return with_stages(spec, 2, 1)


def latent_write_spec(rank: int, rope_dim: int, dtype: str) -> KernelSpec:
    return KernelSpec(
        op="latent_write",
        template="triton/latent_write.py.jinja",
        params=(
            ("dtype", dtype), ("pages", ""), ("RANK", rank), ("ROPE_DIM", rope_dim),
            ("BLOCK_R", power_of_2(rank, 16)), ("BLOCK_E", power_of_2(rope_dim, 16)),
        ),
        args=(*(pointer(name, dtype) for name in ("latent", "k_rope", "cache")), pointer("slot_mapping", "i64")),
        grid=("T", "1", "1"),
        bytes=f"T * {2 * (rank + rope_dim) * ITEM_BYTES[dtype] + 8}",
        num_warps=warps_for(power_of_2(rank, 16)),
        label=f"{dtype}_r{rank}_{rope_dim}",
        waits=True,
    )  # fmt: skip
