"""What ranks do together, with all ranks in one process: the meaning of the ops in ops/collectives.py.

Every function takes the arguments of each rank of a group, in the order of their coordinates, and returns the results
of each. It is the reference that the runtime's collectives are compared with, and what graphs are simulated with.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.compiler import nvfp4
from octavo.compiler.ops.op import accumulator
from octavo.compiler.ops.quantize import quantize

Ranks = Sequence[tuple[Any, ...]]  # arguments of each rank


def all_reduce(ranks: Ranks) -> list[Tensor]:
    """(x, axis): every rank gets the sum, in the order of coordinates, rounded once."""
    total = _sum([x for x, _ in ranks]).to(ranks[0][0].dtype)
    return [total.clone() for _ in ranks]


def all_gather(ranks: Ranks) -> list[Tensor]:
    """(x, dim, axis, size)"""
    joined = torch.cat([x for x, *_ in ranks], ranks[0][1])
    return [joined.clone() for _ in ranks]


def reduce_scatter(ranks: Ranks) -> list[Tensor]:
    """(x, dim, axis, size)"""
    x, dim, *_ = ranks[0]
    total = _sum([x for x, *_ in ranks]).to(x.dtype)
    return [part.contiguous() for part in total.chunk(len(ranks), dim)]


def _sum(values: Sequence[Tensor]) -> Tensor:
    total = values[0].to(accumulator(values[0]))
    for value in values[1:]:
        total = total + value.to(total.dtype)
    return total


def dispatch(ranks: Ranks) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """(x, experts, weights, row_ranks, outer, num_local, wire, axis)"""
    results = []
    for own, (x, experts, weights, row_ranks, _, num_local, *_) in enumerate(ranks):
        count, slots = row_ranks.shape[0], experts.shape[-1]
        rows = x.new_zeros((1, count, x.shape[-1]))
        local = experts.new_full((1, count, slots), -1)
        row_weights = weights.new_zeros((1, count, slots))
        source = row_ranks.new_full((count,), -1)
        row = 0
        for coordinate, (sent, wanted, shares, _, outer, _, wire, _) in enumerate(ranks):
            carried = _carried(sent, outer, wire)
            mine = (wanted >= 0) & (wanted // num_local == own)
            for token in range(sent.shape[1]):
                if mine[0, token].any():
                    rows[0, row] = carried[0, token]
                    local[0, row] = torch.where(mine[0, token], wanted[0, token] % num_local, -1)
                    row_weights[0, row] = torch.where(mine[0, token], shares[0, token], 0.0)
                    source[row] = coordinate
                    row += 1
        results.append((rows, local, row_weights, source))
    return results


def _carried(x: Tensor, outer: Tensor | None, wire: str) -> Tensor:
    """Rows after they went over the wire."""
    if wire == "model" or not x.numel():
        return x
    codes, *parts = quantize(x, outer, wire)
    step = parts[-1] if outer is None else outer.float().reshape(())
    if wire == "fp8":
        return (codes.float() * step).to(x.dtype)
    return nvfp4.dequantize(codes, parts[0], step).to(x.dtype)


def combine(ranks: Ranks) -> list[Tensor]:
    """(parts, source, experts, num_local, axis)"""
    totals = [
        parts.new_zeros((1, experts.shape[1], parts.shape[-1]), dtype=accumulator(parts))
        for parts, _, experts, *_ in ranks
    ]
    for owner, (parts, source, _, num_local, _) in enumerate(ranks):
        for coordinate, (_, _, experts, *_) in enumerate(ranks):
            rows = torch.nonzero(source == coordinate)[:, 0]
            sent = ((experts >= 0) & (experts // num_local == owner)).any(-1)[0]
            totals[coordinate][0, sent] += parts[0, rows].to(totals[coordinate].dtype)
    return [total.to(parts.dtype) for total, (parts, *_) in zip(totals, ranks, strict=True)]


def arrived(ranks: Ranks) -> list[tuple[Tensor, ...]]:
    """(rows, local, row_weights, source, sent, axis): here nothing travels."""
    return [tuple(given[:4]) for given in ranks]


COLLECTIVES: dict[str, Callable[[Ranks], list[Any]]] = {
    "all_reduce": all_reduce,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "dispatch": dispatch,
    "arrived": arrived,
    "combine": combine,
}
