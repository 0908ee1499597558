"""Selection rows of the cpp family for latent attention; rows_cpp has all others."""

from collections.abc import Callable

from torch import fx

from octavo.codegen.kernel import Arg, KernelSpec, pointer
from octavo.codegen.mla_nodes import read_head_product, read_latents
from octavo.codegen.row import Row, has_tree, static_size, tensor, tree_argument
from octavo.codegen.rows_cpp import MAX_CHUNK, QUERY_ROWS, floats, scalar
from octavo.compiler.dims import dtype_name
from octavo.compiler.legality import named_arguments
from octavo.compiler.program import ITEM_BYTES
from octavo.compiler.target import Target


def head_linear(node: fx.Node, target: Target) -> KernelSpec:
    product = read_head_product(node)
    chunks = -(-product.k // MAX_CHUNK)
    return KernelSpec(
        op="head_linear",
        template="cpp/head_linear.cpp.jinja",
        params=(
            ("dtype", product.dtype), ("out_dtype", product.out_dtype), ("HEADS", product.heads), ("N", product.n),
            ("K", product.k),
            ("CHUNK", -(-product.k // (64 * chunks)) * 64),
        ),
        args=(
            pointer("x", product.dtype), pointer("weight", product.dtype), pointer("out", product.out_dtype),
            scalar("num_tokens", product.rows),
        ),
        bytes=product.bytes,
        flops=product.flops,
        label=product.label,
    )  # fmt: skip


def latent_write(node: fx.Node, target: Target) -> KernelSpec:
    rank, rope_dim = (static_size(node, name, -1) for name in ("latent", "k_rope"))
    dtype, cache_dtype = (dtype_name(tensor(node, name)) for name in ("latent", "cache"))
    return KernelSpec(
        op="latent_write",
        template="cpp/latent_write.cpp.jinja",
        params=(
            ("dtype", dtype), ("cache_dtype", cache_dtype), ("RANK", rank), ("ROPE_DIM", rope_dim),
            ("PAGE_SIZE", static_size(node, "cache", 2)),
        ),
        args=(
            pointer("latent", dtype), pointer("k_rope", dtype), pointer("cache", cache_dtype),
            pointer("slot_mapping", "i64"), *_multiplier(cache_dtype),
            scalar("num_tokens", "T"), scalar("num_pages", "num_pages"),
        ),
        bytes=f"T * {(rank + rope_dim) * (ITEM_BYTES[dtype] + ITEM_BYTES[cache_dtype]) + 8}",
        label=f"{dtype}_{cache_dtype}_r{rank}_{rope_dim}",
    )  # fmt: skip


def paged_mla_attention(node: fx.Node, target: Target) -> KernelSpec:
    latents = read_latents(node)
    group = min(latents.heads, QUERY_ROWS)
    return KernelSpec(
        op="paged_mla_attention",
        template="cpp/paged_mla_attention.cpp.jinja",
        params=(
            ("dtype", latents.dtype), ("cache_dtype", latents.cache_dtype), ("HEADS", latents.heads),
            ("GROUP", group), ("QUERY_TOKENS", QUERY_ROWS // group), ("RANK", latents.rank),
            ("ROPE_DIM", latents.rope_dim), ("PAGE_SIZE", latents.page_size), ("SCALE", latents.scale),
            ("WINDOW", latents.window), ("SOFTCAP", latents.softcap), ("tree", has_tree(node)),
        ),
        args=(
            pointer("q_latent", latents.dtype), pointer("q_rope", latents.dtype),
            pointer("cache", latents.cache_dtype),
            *(pointer(name, "i32") for name in ("page_table", "seq_lens", "cu_seqlens_q")),
            *_multiplier(latents.cache_dtype), *tree_argument(node), pointer("out", latents.dtype),
            *(scalar(name, name) for name in ("T", "R", "P", "num_pages")),
        ),
        bytes=latents.bytes,
        flops=f"S * {latents.flops_of_key}",
        label=latents.label,
    )  # fmt: skip


def latent_dtypes(names: str) -> Callable[[fx.Node, Target], str | None]:
    """Takes pages of E4M3 with a multiplier, or floats without."""

    def reject(node: fx.Node, target: Target) -> str | None:
        if named_arguments(node)["multiplier"] is None:
            return floats(names, "cache")(node, target)
        if (dtype := dtype_name(tensor(node, "cache"))) != "fp8":
            return f"expected pages of fp8 beside a multiplier, got {dtype}"
        return floats(names)(node, target)

    return reject


ROWS: tuple[Row, ...] = (
    Row("head_linear", "head_linear", floats("x weight"), head_linear),
    Row("latent_write", "latent_write", latent_dtypes("latent k_rope"), latent_write),
    Row("paged_mla_attention", "paged_mla_attention", latent_dtypes("q_latent q_rope"), paged_mla_attention),
)


def _multiplier(cache_dtype: str) -> tuple[Arg, ...]:
    return (pointer("multiplier", "fp32"),) if cache_dtype == "fp8" else ()
