"""Ops that pick or combine whole rows."""

from torch import Tensor

from octavo.compiler.ops.op import Op


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """ids (B, T) i64 in 0..rows-1; weight (rows, width); returns (B, T, width)."""
    return weight[ids]


def gather_logits(hidden: Tensor, logit_rows: Tensor) -> Tensor:
    """hidden (1, T, H); logit_rows (L,) i64: the rows of which logits are wanted; returns (1, L, H)."""
    return hidden[:, logit_rows]


def add(x: Tensor, y: Tensor) -> Tensor:
    """Two tensors of one shape and dtype."""
    return x + y


EMBEDDING = Op(
    "embedding(Tensor ids, Tensor weight) -> Tensor",
    embedding,
    lambda ids, weight: weight.new_empty((*ids.shape, weight.shape[1])),
    "y = weight[ids]",
)
GATHER_LOGITS = Op(
    "gather_logits(Tensor hidden, Tensor logit_rows) -> Tensor",
    gather_logits,
    lambda hidden, logit_rows: hidden.new_empty((1, logit_rows.shape[0], hidden.shape[2])),
    "y = hidden[:, logit_rows]",
)
ADD = Op("add(Tensor x, Tensor y) -> Tensor", add, lambda x, y: x.new_empty(x.shape), "z = x + y")
