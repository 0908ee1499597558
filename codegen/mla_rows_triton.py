"""Selection rows of the Triton family for latent attention; rows_triton has all others."""

from torch import fx

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.kv_quantize_triton import latent_write_quantize_spec
from octavo.codegen.mla_fp8_triton import fp8_refusal, mla_fp8_spec
from octavo.codegen.mla_nodes import read_head_product, read_latents
from octavo.codegen.mla_triton import MAX_RANK, head_linear_spec, latent_write_spec, mla_spec
from octavo.codegen.row import Row, always, has_tree, static_size, tensor
from octavo.compiler.dims import dtype_name
from octavo.compiler.target import Target


def latent_write(node: fx.Node, target: Target) -> KernelSpec:
    rank, rope_dim = (static_size(node, name, -1) for name in ("latent", "k_rope"))
    make = latent_write_quantize_spec if _has_fp8_pages(node) else latent_write_spec
    return make(rank, rope_dim, dtype_name(tensor(node, "latent")))


def paged_mla_attention(node: fx.Node, target: Target) -> KernelSpec:
    make = mla_fp8_spec if _has_fp8_pages(node) else mla_spec
    return make(read_latents(node), target)


def _has_fp8_pages(node: fx.Node) -> bool:
    return dtype_name(tensor(node, "cache")) == "fp8"


def latent_refusal(node: fx.Node, target: Target) -> str | None:
    if has_tree(node):
        return "trees of drafts are served over keys and values, not over latents; compile without trees"
    if _has_fp8_pages(node):
        return fp8_refusal(read_latents(node), target)
    rank = static_size(node, "q_latent", 3)
    return (
        f"a latent must have at most {MAX_RANK} elements, got {rank}" if rank > MAX_RANK else one_dtype(node)
    )


def one_dtype(node: fx.Node) -> str | None:
    dtypes = [str(tensor(node, name).dtype).removeprefix("torch.") for name in ("q_latent", "cache")]
    return (
        f"queries and cache must have one dtype, got {' and '.join(dtypes)}" if len(set(dtypes)) > 1 else None
    )


ROWS: tuple[Row, ...] = (
    Row("head_linear", "head_linear", always, lambda n, target: head_linear_spec(read_head_product(n))),
    Row("latent_write", "latent_write", always, latent_write),
    Row("paged_mla_attention", "paged_mla_attention", latent_refusal, paged_mla_attention),
)
