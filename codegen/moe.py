"""A router and a mixture of experts as both families see them: sizes, options and what they cost."""

from dataclasses import dataclass

from octavo.compiler.expression import at_most
from octavo.compiler.program import ITEM_BYTES, Dim


@dataclass(frozen=True)
class Router:
    """One router. bias_dtype is empty without a bias; group_score without groups."""

    count: Dim
    dtype: str
    bias_dtype: str
    experts: int
    top_k: int
    scoring: str
    renormalize: bool
    groups: int
    top_groups: int
    group_score: str
    scaling: float

    @property
    def bytes(self) -> str:
        return f"({self.count}) * {self.experts * ITEM_BYTES[self.dtype] + 12 * self.top_k}"

    @property
    def flops(self) -> str:
        return f"({self.count}) * {self.experts * (self.top_k + 4)}"


@dataclass(frozen=True)
class Numbering:
    """One table of other numbers for experts, applied to the choices of tokens. pairs: tokens times choices."""

    pairs: Dim
    experts: int

    @property
    def bytes(self) -> str:
        return f"({self.pairs}) * 16 + {8 * self.experts}"

    @property
    def label(self) -> str:
        return f"e{self.experts}"


@dataclass(frozen=True)
class Mixture:
    """One mixture of experts. Empty dtypes of biases stand for none."""

    count: Dim
    dtype: str
    gate_up_bias: str
    down_bias: str
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    out: int
    activation: str
    limit: float
    alpha: float

    @property
    def pairs(self) -> str:
        """Tokens times the experts of each."""
        return f"({self.count}) * {self.top_k}"

    @property
    def bytes(self) -> str:
        """Tokens in and out, and once the weights of as many experts as the tokens can reach."""
        weights = self.expert_elements * ITEM_BYTES[self.dtype]
        return f"({self.count}) * {self.token_bytes} + ({self.reached}) * {weights}"

    @property
    def token_bytes(self) -> int:
        """Of a token in and out, with its experts and their weights."""
        return (self.hidden + self.out) * ITEM_BYTES[self.dtype] + 12 * self.top_k

    @property
    def reached(self) -> str:
        """Experts that the tokens can reach."""
        return at_most(self.pairs, self.experts)

    @property
    def expert_elements(self) -> int:
        return self.intermediate * (2 * self.hidden + self.out)

    @property
    def flops(self) -> str:
        return f"{self.pairs} * {2 * self.expert_elements}"

    @property
    def label(self) -> str:
        return f"{self.dtype}_e{self.experts}_k{self.top_k}_d{self.hidden}_i{self.intermediate}"
