"""What the kernels of mixtures of experts with quantised weights are of: padded places, products, layers."""

from dataclasses import dataclass

from octavo.codegen.quantize_triton import scale_tiles
from octavo.codegen.specs_triton import ceil_div
from octavo.compiler.expression import at_most
from octavo.compiler.program import Dim

# Rows of a tile where experts have few and many, and pairs for each expert, on average, up to which they have few.
FEW_TILE, MANY_TILE, FEW_PAIRS = 16, 128, 32
# Rows of a tall tile of the weight-only kernel, whose weights pass through registers.
WEIGHT_ONLY_TILE = 64


@dataclass(frozen=True)
class Places:
    """The order by expert: every pair of a token and an expert has a row, every expert begins a tile of rows.

    count  tokens of the step; limit: the most pairs in which this order is used, 0 without
    """

    count: Dim
    experts: int
    top_k: int
    tile: int
    limit: int = 0

    @property
    def pairs(self) -> str:
        return f"({self.count}) * {self.top_k}"

    @property
    def _held(self) -> str:
        return f"({at_most(self.pairs, self.limit)})" if self.limit else self.pairs

    @property
    def reached(self) -> str:
        """Experts that the tokens can reach."""
        return f"({at_most(self._held, self.experts)})"

    @property
    def tiles(self) -> str:
        """A bound on the tiles: every expert that is reached may have one that is not full."""
        return f"({self._held} // {self.tile} + {self.reached})"

    @property
    def rows(self) -> str:
        return f"{self.tiles} * {self.tile}"

    @property
    def scale_tiles(self) -> str:
        """Tiles of 128 rows of scales."""
        return scale_tiles(self.rows)


@dataclass(frozen=True)
class Unit:
    """sigmoid(alpha gate) gate (up + offset), gate at most limit and up within it unless that is 0: SwiGLU as it is.

    gpt-oss: limit 7, alpha 1.702, offset 1
    """

    limit: float = 0.0
    alpha: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True)
class Grouped:
    """y[r, :] = x[r, :] @ w[e].T, then a unit over pairs of columns if there is one; e is the expert of row r.

    x, weight, out  names of arguments; their scales have the same with _scale behind it, alphas _alpha, biases _bias
    n               rows of w of an expert: with a unit two for each column of y, gate and up in turn
    bias            its dtype, empty without one
    by_row          an alpha for every row of w, not for every expert (with a unit: for its gates and for its ups)
    rounded         dtype to which the unit's result is rounded before it is quantised; empty for fp32
    """

    places: Places
    x: str
    weight: str
    out: str
    n: int
    k: int
    unit: Unit | None = None
    bias: str = ""
    by_row: bool = False
    rounded: str = ""

    @property
    def width(self) -> int:
        """Columns of y."""
        return self.n // 2 if self.unit else self.n

    @property
    def flops(self) -> str:
        return f"{self.places.pairs} * {2 * self.n * self.k}"

    def bytes(self, x_bits: float, weight_bits: float, out_bits: float) -> str:
        """Rows in and out and once the weights that are reached; bits of an element with its share of a scale's."""
        row, weight = self.k * x_bits + self.width * out_bits, self.n * self.k * weight_bits
        return f"{self.places.pairs} * {int(row // 8)} + {self.places.reached} * {int(weight // 8)}"

    def iterations(self, block_n: int, block_k: int) -> str:
        return f"{self.places.tiles} * {ceil_div(self.n, block_n) * ceil_div(self.k, block_k)}"

    @property
    def label(self) -> str:
        return f"{self.weight}_e{self.places.experts}_n{self.n}_k{self.k}"


@dataclass(frozen=True)
class Experts:
    """A mixture of experts whose weights are quantised: tokens (count, hidden) to tokens, top_k experts each.

    bias    dtype of the biases of both products, empty without; shared: an addend, the shared expert's result
    by_row  alphas of both products are for every row
    """

    count: Dim
    dtype: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    unit: Unit = Unit()
    bias: str = ""
    shared: bool = False
    by_row: bool = False

    @property
    def limit(self) -> int:
        """Pairs up to which tiles are short."""
        return FEW_PAIRS * self.experts

    def places(self, tile: int) -> Places:
        return Places(self.count, self.experts, self.top_k, tile, self.limit if tile == FEW_TILE else 0)
