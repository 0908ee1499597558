"""What both families read off the nodes of latent attention: sizes, dtypes and costs."""

from dataclasses import dataclass

from torch import fx

from octavo.codegen.row import arguments, static_size, tensor
from octavo.compiler.dims import ITEM_BYTES, dtype_name


@dataclass(frozen=True)
class Latents:
    """One paged latent attention; rank and rope_dim are the widths of a cached row's two parts."""

    heads: int
    rank: int
    rope_dim: int
    page_size: int
    dtype: str
    cache_dtype: str
    scale: float
    window: int = 0
    softcap: float = 0.0

    @property
    def width(self) -> int:
        return self.rank + self.rope_dim

    @property
    def label(self) -> str:
        marks = [f"w{self.window}"] * bool(self.window) + ["cap"] * bool(self.softcap)
        return "_".join((self.dtype, f"h{self.heads}_r{self.rank}_{self.rope_dim}", *marks))

    @property
    def bytes(self) -> str:
        """Queries and results of T tokens, and S cached rows, each read once for all heads."""
        rows = self.heads * (self.width + self.rank) * ITEM_BYTES[self.dtype]
        return f"T * {rows} + S * {self.width * ITEM_BYTES[self.cache_dtype]}"

    @property
    def flops_of_key(self) -> int:
        """Operations of one query token, all heads, on one key."""
        return 2 * self.heads * (self.width + self.rank)


def read_latents(node: fx.Node) -> Latents:
    given = arguments(node)
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


@dataclass(frozen=True)
class HeadProduct:
    """One head_linear: (tokens, heads, k) by (heads, n, k)."""

    heads: int
    n: int
    k: int
    dtype: str

    @property
    def label(self) -> str:
        return f"{self.dtype}_h{self.heads}_n{self.n}_k{self.k}"

    @property
    def bytes(self) -> str:
        item = ITEM_BYTES[self.dtype]
        return f"T * {self.heads * (self.n + self.k) * item} + {self.heads * self.n * self.k * item}"

    @property
    def flops(self) -> str:
        return f"T * {2 * self.heads * self.n * self.k}"


def read_head_product(node: fx.Node) -> HeadProduct:
    heads, n, k = (static_size(node, "weight", axis) for axis in range(3))
    return HeadProduct(heads, n, k, dtype_name(tensor(node, "x")))
