"""What both families read off the nodes of latent attention."""

from torch import fx

from octavo.codegen.mla import HeadProduct, Latents
from octavo.codegen.row import result_dtype, static_size, tensor, token_count
from octavo.compiler.dims import dtype_name
from octavo.compiler.legality import named_arguments


def read_latents(node: fx.Node) -> Latents:
    given = named_arguments(node)
    return Latents(
        heads=static_size(node, "q_latent", 2),
        rank=static_size(node, "q_latent", 3),
        rope_dim=static_size(node, "q_rope", 3),
        page_size=static_size(node, "cache", 2),
        dtype=dtype_name(tensor(node, "q_latent")),
        cache_dtype=dtype_name(tensor(node, "cache")),
        scale=float(given["scale"]),
        window=int(given["window"]),
        softcap=float(given["softcap"]),
    )


def read_head_product(node: fx.Node) -> HeadProduct:
    heads, n, k = (static_size(node, "weight", axis) for axis in range(3))
    return HeadProduct(heads, n, k, dtype_name(tensor(node, "x")), result_dtype(node), str(token_count(node)))
