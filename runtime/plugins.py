"""Dispatchers of other libraries, for memory of GPUs: DeepEP and FlashInfer. They are imported only when chosen.

Both move rows of bytes here, there and back, and sums stay ours: so results are those of every other dispatcher, bit
for bit. Limits are data, checked before a step runs. Nothing of this was run on a GPU yet: tests have stand-ins for the
libraries, written from their documentation (DeepEP 1.2 deep_ep/buffer.py and csrc/kernels/launch.cuh, FlashInfer 0.7
comm/trtllm_moe_alltoall.py and moeAlltoAllKernels.h).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.compiler.errors import MissingDependencyError, OptionError
from octavo.runtime.dispatchers import NOBODY, Dispatcher, Peers, of_each

KEY_BYTES = 8  # rank and token that a row is of, i32 each, behind its payload


@dataclass(frozen=True)
class Traffic:
    """What a program sends. row_bytes: of the longest row, there or back; max_tokens: of a rank in a step."""

    device: str
    ranks: int
    top_k: int
    row_bytes: int
    max_tokens: int


@dataclass(frozen=True)
class Limits:
    """What a library can do; None: anything. module: what is imported of it."""

    module: str
    device: str
    ranks: tuple[int, ...]
    top_ks: tuple[int, ...] | None = None
    row_multiple: int = 16  # rows are padded to it


LIMITS: Mapping[str, Limits] = {
    # 2, 4 or 8 GPUs of a node over NVLink; 2, 4, 8 or 16 nodes of 8 over RDMA.
    "deepep": Limits("deep_ep", "cuda", (2, 4, 8, 16, 32, 64, 128)),
    # Each number of experts of a token is a kernel of its own; ranks that share NVLink.
    "flashinfer": Limits("flashinfer.comm", "cuda", tuple(range(2, 65)), (1, 2, 4, 6, 8, 10, 16, 22)),
}


class Exchange(Peers, Protocol):
    """process_group.AxisGroup."""

    def gather_objects(self, value: Any) -> list[Any]: ...


class Communicator:
    """The ranks of an axis, by the names that mpi4py gave these calls, as both libraries take them."""

    def __init__(self, peers: Exchange) -> None:
        self._peers = peers

    def Get_rank(self) -> int:
        return self._peers.coordinate

    def Get_size(self) -> int:
        return self._peers.size

    def allgather(self, value: Any) -> list[Any]:
        return self._peers.gather_objects(value)

    def bcast(self, value: Any, root: int) -> Any:
        return self._peers.gather_objects(value)[root]

    def barrier(self) -> None:
        self._peers.gather_objects(None)

    def Split(self, color: int, key: int) -> "Communicator":
        return self


def check_limits(name: str, traffic: Traffic) -> None:
    """OptionError that names the first limit that the program does not keep."""
    limits = LIMITS[name]
    for what, got, allowed in (
        ("memory", traffic.device, (limits.device,)),
        ("ranks", traffic.ranks, limits.ranks),
        ("experts of a token", traffic.top_k, limits.top_ks),
    ):
        if allowed is not None and got not in allowed:
            raise OptionError(
                f"dispatcher {name}: {what}: it has {', '.join(map(str, allowed))}, the program {got}; "
                "choose all_to_all or padded"
            )


def open_plugin(name: str, peers: Exchange, traffic: Traffic) -> Dispatcher:
    """Raises OptionError for a limit, MissingDependencyError if the library is not installed."""
    check_limits(name, traffic)
    module = LIMITS[name].module
    try:
        library = import_module(module)
    except ImportError as error:
        raise MissingDependencyError(f"dispatcher {name}: {module} is not installed: {error}") from None
    return PLUGINS[name](peers, library, traffic)


class Carrier(Protocol):
    """Moves rows to ranks, in no order."""

    def __call__(self, rows: Tensor, wanted: Tensor, most: int) -> Tensor:
        """All rows (M, bytes) that came here. rows (T, bytes) u8; wanted (T, D) bool; most: rows of any rank."""
        ...


class ByCarrier:
    """A dispatcher over rows that come in any order: they carry whose they are."""

    def __init__(self, peers: Peers, carry: Carrier) -> None:
        self._peers = peers
        self._carry = carry

    def send(self, payload: Tensor, wanted: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self._sorted(payload, wanted, max(counts))

    def send_back(self, parts: Tensor, source: Tensor, wanted: Tensor) -> list[Tensor]:
        ranks = torch.arange(self._peers.size, device=source.device)
        payload = parts.contiguous().view(torch.uint8)
        rows, owner = self._sorted(payload, source[:, None] == ranks, len(parts))
        sizes = of_each(owner, self._peers.size).tolist()
        return list(rows.contiguous().view(parts.dtype).split(sizes))

    def _sorted(self, payload: Tensor, wanted: Tensor, most: int) -> tuple[Tensor, Tensor]:
        index = torch.arange(len(payload), device=payload.device, dtype=torch.int32)
        key = torch.stack((torch.full_like(index, self._peers.coordinate), index), -1)
        width = payload.shape[-1] + KEY_BYTES
        padding = payload.new_zeros((len(payload), -width % 16))
        came = self._carry(torch.cat((payload, key.view(torch.uint8), padding), -1), wanted, most)
        keys = came[:, payload.shape[-1] : width].contiguous().view(torch.int32).long()
        order = torch.argsort(keys[:, 0] * 2**31 + keys[:, 1])
        return came[order, : payload.shape[-1]], keys[order, 0]


def deepep(peers: Exchange, library: Any, traffic: Traffic) -> Dispatcher:
    """DeepEP's kernels of high throughput. They take rows of bf16, which here are bytes, and the ranks of each."""
    size = traffic.row_bytes + KEY_BYTES + 16
    config = library.Buffer.get_dispatch_config(peers.size)
    hints = [
        int(hint(size, peers.size))
        for hint in (config.get_nvl_buffer_size_hint, config.get_rdma_buffer_size_hint)
    ]
    buffer = library.Buffer(None, *hints, comm=Communicator(peers))
    ranks = peers.size  # the library counts by experts too: each rank stands for one

    def carry(rows: Tensor, wanted: Tensor, most: int) -> Tensor:
        places = torch.where(wanted, torch.arange(ranks, device=rows.device), NOBODY)
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(places, ranks)
        came, *_ = buffer.dispatch(
            rows.view(torch.bfloat16), num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        )  # fmt: skip
        found: Tensor = came.view(torch.uint8)
        return found

    return ByCarrier(peers, carry)


def flashinfer(peers: Exchange, library: Any, traffic: Traffic) -> Dispatcher:
    """FlashInfer's one-sided all-to-all over NVLink. Rows lie in memory that all ranks write, until the call after the
    next: there and back have a workspace each, so nobody writes to rows that somebody still reads.
    """
    ranks, slots, most_rows = peers.size, traffic.top_k, traffic.ranks * traffic.max_tokens
    width = traffic.row_bytes + KEY_BYTES + 16 + 4 * slots
    room = library.moe_a2a_get_workspace_size_per_rank(ranks, most_rows, width, 0)
    mapping = library.Mapping(world_size=ranks, rank=peers.coordinate, tp_size=ranks, moe_ep_size=ranks)
    config = library.MnnvlConfig(comm_backend=Communicator(peers))
    # Workspaces of one size are one to the library.
    both = [
        library.MoeAlltoAll(
            mapping, most_rows, slots, ranks, workspace_size_per_rank=room + 128 * extra, mnnvl_config=config
        )
        for extra in range(2)
    ]

    def carry(rows: Tensor, wanted: Tensor, most: int) -> Tensor:
        both.reverse()
        space, metainfo = both[0].workspace, both[0].metainfo
        is_sent = wanted.any(-1)
        rows, wanted = rows[is_sent].contiguous(), wanted[is_sent]
        # The ranks of a row, ascending; then the first of them again, which the library passes over.
        order = torch.argsort((~wanted).to(torch.int32), dim=-1, stable=True)[:, :slots]
        order = torch.nn.functional.pad(order, (0, slots - order.shape[1]))
        places = torch.arange(slots, device=rows.device)
        targets = torch.where(places < wanted.sum(-1, keepdim=True), order, order[:, :1]).to(torch.int32)
        (came, ids), *_ = library.moe_a2a_dispatch(
            targets, [rows, targets], space, metainfo, most, peers.coordinate, ranks, slots, ranks
        )
        library.moe_a2a_sanitize_expert_ids(ids, space, metainfo, peers.coordinate, NOBODY)
        found: Tensor = came[ids[..., 0] != NOBODY]
        return found

    return ByCarrier(peers, carry)


PLUGINS: Mapping[str, Callable[[Exchange, Any, Traffic], Dispatcher]] = {
    "deepep": deepep,
    "flashinfer": flashinfer,
}
