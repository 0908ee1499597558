"""What ranks of a mesh do together, and the numbering of experts on them.

A collective needs all ranks of its axis, so its eager kernel only says where it runs: in compiler/simulate.py, which
has the ranks in one process, and in the runtime, which has one of them.
"""

from typing import NoReturn

import torch
from torch import Tensor

from octavo.compiler.ops.op import Op

WIRES = ("model", "fp8", "nvfp4")


def _alone(*_: object) -> NoReturn:
    raise RuntimeError(
        "a collective was called on one rank: run the graph of every rank with octavo.compiler.simulate, "
        "or the artifact under torchrun"
    )


def map_experts(experts: Tensor, table: Tensor) -> Tensor:
    """Experts (1, T, K) i64 by other numbers: table[e] of the table (E,) i64, and -1 (nobody) where e is -1."""
    return torch.where(experts < 0, -1, table[experts.clamp(min=0)])


def _gathered(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] * size
    return x.new_empty(shape)


def _scattered(x: Tensor, dim: int, axis: str, size: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = shape[dim] // size
    return x.new_empty(shape)


def _dispatched(
    x: Tensor, experts: Tensor, weights: Tensor, row_ranks: Tensor, outer: Tensor | None, num_local: int,
    wire: str, axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rows, slots = row_ranks.shape[0], experts.shape[-1]
    return (
        x.new_empty((1, rows, x.shape[-1])), experts.new_empty((1, rows, slots)),
        weights.new_empty((1, rows, slots)), row_ranks.new_empty((rows,)),
    )  # fmt: skip


MAP_EXPERTS = Op(
    "map_experts(Tensor experts, Tensor table) -> Tensor",
    map_experts,
    lambda experts, table: experts.new_empty(experts.shape),
    "y = table[experts], -1 where experts is -1",
)
ALL_REDUCE = Op(
    "all_reduce(Tensor x, str axis) -> Tensor",
    _alone,
    lambda x, axis: x.new_empty(x.shape),
    "y = sum of x over the ranks of the axis, in their order, in fp32, rounded once",
)
ALL_GATHER = Op(
    "all_gather(Tensor x, int dim, str axis, int size) -> Tensor",
    _alone,
    _gathered,
    "y = x of all `size` ranks of the axis, joined along dim",
)
REDUCE_SCATTER = Op(
    "reduce_scatter(Tensor x, int dim, str axis, int size) -> Tensor",
    _alone,
    _scattered,
    "y = this rank's part along dim of the sum of x over the `size` ranks of the axis",
)
DISPATCH = Op(
    "dispatch(Tensor x, Tensor experts, Tensor weights, Tensor row_ranks, Tensor? outer, int num_local, str wire, "
    "str axis) -> (Tensor, Tensor, Tensor, Tensor)",
    _alone,
    _dispatched,
    "each token once to every rank of the axis that has an expert of it; rows, local experts, weights, source",
)
ARRIVED = Op(
    "arrived(Tensor rows, Tensor local, Tensor row_weights, Tensor source, Tensor[] sent, str axis) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _alone,
    lambda rows, local, row_weights, source, sent, axis: tuple(
        x.new_empty(x.shape) for x in (rows, local, row_weights, source)
    ),
    "the results of a dispatch once they are there; until then what was sent stays as it is",
)
COMBINE = Op(
    "combine(Tensor parts, Tensor source, Tensor experts, int num_local, str axis) -> Tensor",
    _alone,
    lambda parts, source, experts, num_local, axis: parts.new_empty((1, experts.shape[1], parts.shape[-1])),
    "y = sum over the ranks of what they made of the token, in their order, in fp32, rounded once",
)
