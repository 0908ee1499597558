"""Selection rows of the Triton family for latent attention; rows_triton has all others."""

from torch import fx

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.mla_nodes import read_head_product, read_latents
from octavo.codegen.mla_triton import MAX_RANK, head_linear_spec, latent_write_spec, mla_spec
from octavo.codegen.row import Row, always, static_size, tensor
from octavo.compiler.dims import dtype_name
from octavo.compiler.target import Target


def latent_write(node: fx.Node, target: Target) -> KernelSpec:
    rank, rope_dim = (static_size(node, name, -1) for name in ("latent", "k_rope"))
    return latent_write_spec(rank, rope_dim, dtype_name(tensor(node, "latent")))


def too_wide(node: fx.Node, target: Target) -> str | None:
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
    Row(
        "paged_mla_attention",
        "paged_mla_attention",
        too_wide,
        lambda n, target: mla_spec(read_latents(n), target),
    ),
)
