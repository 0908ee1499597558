"""Latent attention as both families see it: sizes, dtypes and costs."""

from dataclasses import dataclass

from octavo.compiler.program import ITEM_BYTES


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


@dataclass(frozen=True)
class HeadProduct:
    """One head_linear: (rows, heads, k) by (heads, n, k). rows: how many, an expression in a step's sizes."""

    heads: int
    n: int
    k: int
    dtype: str
    out_dtype: str
    rows: str = "T"

    @property
    def label(self) -> str:
        to = "" if self.out_dtype == self.dtype else f"_to_{self.out_dtype}"
        return f"{self.dtype}_h{self.heads}_n{self.n}_k{self.k}{to}"

    @property
    def bytes(self) -> str:
        item = ITEM_BYTES[self.dtype]
        row = self.heads * (self.n * ITEM_BYTES[self.out_dtype] + self.k * item)
        return f"{self.rows} * {row} + {self.heads * self.n * self.k * item}"

    @property
    def flops(self) -> str:
        return f"{self.rows} * {2 * self.heads * self.n * self.k}"
