"""What the collective steps of a program compute, on tensors: octavo::all_reduce, all_gather, reduce_scatter, dispatch
and combine. Sums are in the order of ranks, so that results are equal bit for bit from run to run and on all ranks.
"""

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from octavo.compiler.errors import ExecutionError
from octavo.compiler.program import Step
from octavo.runtime.dispatchers import NOBODY, Dispatcher, Peers
from octavo.runtime.regions import Region
from octavo.runtime.wire import pack_rows, row_bytes, unpack_rows

DTYPES = {
    "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn,
    "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64,
}  # fmt: skip
# From here on an all_reduce sends each rank a part to add up, and the sums to all: fewer bytes, one message more.
TWO_PHASE_BYTES = 1 << 16


class Collectives:
    """Runs the collective steps of a program on this rank.

    axes        the ranks along each axis of the mesh
    dispatcher  of tokens to experts, along the axis that has one
    """

    def __init__(self, axes: Mapping[str, Peers], dispatcher: Dispatcher | None = None) -> None:
        self._axes = axes
        self._dispatcher = dispatcher

    def run(self, step: Step, inputs: Sequence[Region | None], outputs: Sequence[Region]) -> None:
        """Take part in a step's collective; see regions.Collectives."""
        given = [None if region is None else tensor_of(region) for region in inputs]
        self.run_on(step, given, [tensor_of(region) for region in outputs])
        if any(region.device == "cuda" for region in outputs):
            torch.cuda.synchronize()  # the runner's stream is another

    def run_on(self, step: Step, inputs: Sequence[Tensor | None], outputs: Sequence[Tensor]) -> None:
        """Fill the outputs. Values of tokens are (T, ...), with or without the 1 that graphs have in front."""
        results = self._results(step.kernel, self._axes[step.axis], [*inputs, *step.options])
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result.view(output.shape))

    def _results(self, kernel: str, peers: Peers, given: list[Any]) -> Sequence[Tensor]:
        if kernel == "dispatch":
            x, experts, weights, row_ranks, outer, num_local, wire = given
            x, experts, weights = _rows(x), _rows(experts), _rows(weights)
            counts = torch.bincount(row_ranks, minlength=peers.size).tolist()
            return dispatch(self._of_tokens(), peers, x, experts, weights, counts, outer, num_local, wire)
        if kernel == "combine":
            parts, source, experts, num_local = given
            return [combine(self._of_tokens(), peers, _rows(parts), source, _rows(experts), num_local)]
        if kernel == "all_reduce":
            return [all_reduce(peers, given[0])]
        if kernel == "all_gather":
            return [all_gather(peers, given[0], given[1])]
        assert kernel == "reduce_scatter", kernel
        return [reduce_scatter(peers, given[0], given[1])]

    def _of_tokens(self) -> Dispatcher:
        assert self._dispatcher is not None, "a program that dispatches needs a dispatcher"
        return self._dispatcher


def use_gpu(ordinal: int) -> None:
    """From here on tensors on "cuda" lie on this GPU of the machine. ExecutionError if torch sees none."""
    if not torch.cuda.is_available():
        raise ExecutionError(
            f"ranks: expected a torch that sees GPUs, as ranks on GPUs meet through its NCCL; got {torch.__version__}, "
            "which sees none: install a build with CUDA for this driver"
        )
    torch.cuda.set_device(ordinal)


def ordered_sum(parts: Sequence[Tensor]) -> Tensor:
    """The sum in the order given, in fp32 (fp64 for fp64), rounded once to their dtype."""
    total = parts[0].to(_wide(parts[0]))
    for part in parts[1:]:
        total = total + part
    return total.to(parts[0].dtype)


def all_reduce(peers: Peers, x: Tensor) -> Tensor:
    """The sum of x over the ranks, equal on all."""
    if x.numel() * x.itemsize < TWO_PHASE_BYTES:
        return ordered_sum(peers.all_gather(x).unbind(0))
    flat = x.flatten()
    padded = flat.new_zeros(-(-flat.numel() // peers.size) * peers.size)
    padded[: flat.numel()] = flat
    own = reduce_scatter(peers, padded, -1)
    return peers.all_gather(own).flatten()[: flat.numel()].view(x.shape)


def all_gather(peers: Peers, x: Tensor, dim: int) -> Tensor:
    """x of all ranks, joined along dim."""
    return torch.cat(peers.all_gather(x).unbind(0), dim)


def reduce_scatter(peers: Peers, x: Tensor, dim: int) -> Tensor:
    """This rank's equal part along dim of the sum of x over the ranks."""
    parts = torch.stack(x.chunk(peers.size, dim))
    return ordered_sum(peers.exchange(parts).unbind(0))


def dispatch(
    dispatcher: Dispatcher, peers: Peers, x: Tensor, experts: Tensor, weights: Tensor, counts: Sequence[int],
    outer: Tensor | None, num_local: int, wire: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """octavo::dispatch of x (T, H), experts and weights (T, K). counts: tokens of each rank, N in all."""
    hidden, slots, rows = x.shape[-1], experts.shape[-1], sum(counts)
    packed, own = pack_rows(x, wire, outer)
    fields = [packed, _as_bytes(experts.to(torch.int32)), _as_bytes(weights)]
    payload = torch.cat([*fields, *([] if own is None else [_as_bytes(own)])], -1)
    came, source = dispatcher.send(payload, wanted(experts, num_local, peers.size), counts)
    order = torch.argsort(source == NOBODY, stable=True)[:rows]  # what holds something goes first
    came, source = _padded(came[order], rows, 0), _padded(source[order], rows, NOBODY)
    widths = [row_bytes(wire, hidden, x.dtype), slots * 4, slots * 4, 0 if own is None else 4]
    body, ids, shares, outers = came.split(widths, -1)
    scale = outer if own is None else outers.contiguous().view(torch.float32)
    physical = ids.contiguous().view(torch.int32).long()
    here = (source != NOBODY)[:, None] & (physical // num_local == peers.coordinate)
    local = torch.where(here, physical % num_local, NOBODY)
    row_weights = torch.where(here, shares.contiguous().view(torch.float32), 0)
    return unpack_rows(body, scale, wire, hidden, x.dtype), local, row_weights, source


def combine(
    dispatcher: Dispatcher, peers: Peers, parts: Tensor, source: Tensor, experts: Tensor, num_local: int
) -> Tensor:
    """octavo::combine of parts (N, H), source (N,) and experts (T, K): (T, H)."""
    owners = wanted(experts, num_local, peers.size)
    came = dispatcher.send_back(parts, source, owners)
    place = (torch.cumsum(owners, 0) - 1).clamp(min=0)
    total = torch.zeros((len(owners), parts.shape[-1]), dtype=_wide(parts), device=parts.device)
    for rank, rows in enumerate(came):
        if len(rows):
            total = total + torch.where(owners[:, rank, None], rows[place[:, rank]].to(total.dtype), 0)
    return total.to(parts.dtype)


def wanted(experts: Tensor, num_local: int, size: int) -> Tensor:
    """Which rank gets which token (T, size) bool: those that hold one of its experts (T, K)."""
    owner = torch.where(experts < 0, size, experts // num_local)
    marks = torch.zeros((len(experts), size + 1), dtype=torch.bool, device=experts.device)
    return marks.scatter_(1, owner, True)[:, :size]


class DeviceBytes:
    """Memory of a GPU as torch takes it, without a copy."""

    def __init__(self, region: Region) -> None:
        size = math.prod(region.shape) * DTYPES[region.dtype].itemsize
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (region.address, False), "version": 3,
        }  # fmt: skip


def tensor_of(region: Region) -> Tensor:
    """A view of the memory."""
    dtype = DTYPES[region.dtype]
    count = math.prod(region.shape)
    if not count:
        return torch.empty(region.shape, dtype=dtype, device=region.device)
    if region.device == "cuda":
        return torch.as_tensor(DeviceBytes(region), device="cuda").view(dtype).view(region.shape)
    memory = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(region.address)
    return torch.frombuffer(memory, dtype=dtype).view(region.shape)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _as_bytes(x: Tensor) -> Tensor:
    """(T, n) -> (T, n * bytes of an element) u8."""
    return x.contiguous().view(torch.uint8)


def _padded(x: Tensor, rows: int, value: int) -> Tensor:
    result = x.new_full((rows, *x.shape[1:]), value)
    result[: len(x)] = x
    return result
