"""Dispatchers of other libraries, over stand-ins that do what their documentation says; and their limits."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rank_threads import ThreadPeers, on_ranks
from torch import Tensor

from octavo.compiler.errors import MissingDependencyError, OptionError
from octavo.runtime import plugins
from octavo.runtime.collectives import combine, dispatch
from octavo.runtime.dispatchers import AllGather
from octavo.runtime.plugins import LIMITS, PLUGINS, Traffic, check_limits, open_plugin

HIDDEN, SLOTS, LOCAL, COUNTS = 16, 4, 2, (3, 0, 5, 4)
TRAFFIC = Traffic("cuda", len(COUNTS), SLOTS, HIDDEN * 4 + 8 * SLOTS, max(COUNTS))


class ThreadExchange(ThreadPeers):
    def gather_objects(self, value: Any) -> list[Any]:
        raise AssertionError("the stand-ins need no objects")


def deep_ep(peers: ThreadPeers) -> Any:
    """Rows come in the order of ranks, but those of a rank backwards."""

    class Buffer:
        def __init__(self, group: None, num_nvl_bytes: int, num_rdma_bytes: int, comm: Any) -> None:
            assert (comm.Get_rank(), comm.Get_size()) == (peers.coordinate, peers.size)

        @staticmethod
        def get_dispatch_config(size: int) -> Any:
            return SimpleNamespace(
                get_nvl_buffer_size_hint=int.__mul__, get_rdma_buffer_size_hint=lambda *_: 0
            )

        def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> Any:
            in_rank = torch.stack([(topk_idx == rank).any(-1) for rank in range(num_experts)], -1)
            counts = in_rank.sum(0).int()
            return counts, None, counts, in_rank, None

        def dispatch(
            self, x: Tensor, *, is_token_in_rank: Tensor, num_tokens_per_rank: Tensor, **_: Any
        ) -> Any:
            assert x.dtype == torch.bfloat16 and x.shape[1] * 2 % 16 == 0
            rows = x.view(torch.uint8)[torch.where(is_token_in_rank.T)[1]]
            receives = peers.exchange(num_tokens_per_rank.long())
            came = peers.exchange(rows, num_tokens_per_rank.tolist(), receives.tolist())
            return torch.cat([part.flip(0) for part in came.split(receives.tolist())]).view(
                torch.bfloat16
            ), None

    return SimpleNamespace(Buffer=Buffer)


def flashinfer(peers: ThreadPeers) -> Any:
    """Rows come into a place for each rank, backwards, with rubbish behind them."""
    sizes: set[int] = set()
    counts: dict[int, list[int]] = {}

    class MoeAlltoAll:
        def __init__(
            self, mapping: Any, most: int, top_k: int, experts: int, *, workspace_size_per_rank: int, **_: Any
        ):
            assert top_k in (LIMITS["flashinfer"].top_ks or ()) and workspace_size_per_rank not in sizes
            sizes.add(workspace_size_per_rank)
            self.workspace, self.metainfo = workspace_size_per_rank, None

    def moe_a2a_dispatch(
        targets: Tensor,
        payloads: list[Tensor],
        space: int,
        meta: None,
        most: int,
        rank: int,
        size: int,
        k: int,
        e: int,
    ) -> Any:
        assert (
            targets.dtype == torch.int32 and targets.shape[1] == k and ((targets >= 0) & (targets < e)).all()
        )
        tokens = [torch.where((targets == r).any(-1))[0].flip(0) for r in range(size)]
        results = []
        for payload in payloads:
            buffer = torch.full((size, most, payload.shape[1]), 77, dtype=payload.dtype)
            for r, own in enumerate(tokens):
                buffer[r, : len(own)] = payload[own]
            results.append(peers.exchange(buffer.flatten(0, 1)).unflatten(0, (size, most)))
        counts[space] = peers.exchange(torch.tensor([len(own) for own in tokens])).tolist()
        return results, 0, None

    def sanitize(ids: Tensor, space: int, meta: None, rank: int, invalid: int) -> None:
        for source, count in enumerate(counts[space]):
            ids[source, count:] = invalid

    return SimpleNamespace(
        MoeAlltoAll=MoeAlltoAll, moe_a2a_dispatch=moe_a2a_dispatch, moe_a2a_sanitize_expert_ids=sanitize,
        moe_a2a_get_workspace_size_per_rank=lambda size, most, there, back: size * most * (there + back),
        Mapping=SimpleNamespace, MnnvlConfig=SimpleNamespace,
    )  # fmt: skip


@pytest.mark.parametrize(("name", "library"), [("deepep", deep_ep), ("flashinfer", flashinfer)])
@pytest.mark.parametrize("wire", ["model", "nvfp4"])
def test_results_are_those_of_the_reference(name: str, library: Any, wire: str) -> None:
    def work(thread: ThreadPeers) -> list[Tensor]:
        peers = ThreadExchange(thread._board, thread.coordinate)
        generator = torch.Generator().manual_seed(peers.coordinate)
        count = COUNTS[peers.coordinate]
        x = torch.randn(count, HIDDEN, generator=generator)
        experts = torch.randint(-1, LOCAL * peers.size, (count, SLOTS), generator=generator)
        weights = torch.rand(count, SLOTS, generator=generator)
        results = []
        for way in (AllGather(peers), PLUGINS[name](peers, library(peers), TRAFFIC)):
            for _ in range(2):  # workspaces are used again
                came = dispatch(way, peers, x, experts, weights, COUNTS, None, LOCAL, wire)
                results.append([*came, combine(way, peers, came[0] * 3, came[3], experts, LOCAL)])
        assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))
        return results[0]

    results = on_ranks(len(COUNTS), work)
    assert sum(int((result[3] >= 0).sum()) for result in results) > 10


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        (
            "deepep",
            {"device": "cpu"},
            "dispatcher deepep: memory: it has cuda, the program cpu; choose all_to_all",
        ),
        ("deepep", {"ranks": 6}, "deepep: ranks: it has 2, 4, 8, 16, 32, 64, 128, the program 6"),
        ("flashinfer", {"top_k": 3}, "experts of a token: it has 1, 2, 4, 6, 8, 10, 16, 22, the program 3"),
        ("flashinfer", {"ranks": 72}, "64, the program 72"),
    ],
)
def test_a_limit_is_named(name: str, change: dict[str, Any], said: str) -> None:
    check_limits(name, TRAFFIC)
    with pytest.raises(OptionError, match=said):
        check_limits(name, Traffic(**{**vars(TRAFFIC), **change}))


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    peers: Any = None
    with pytest.raises(MissingDependencyError, match="dispatcher deepep: deep_ep is not installed"):
        open_plugin("deepep", peers, TRAFFIC)
    monkeypatch.setattr(plugins, "import_module", lambda name: name)
    monkeypatch.setattr(plugins, "PLUGINS", {"deepep": lambda peers, library, traffic: library})
    opened: Any = open_plugin("deepep", peers, TRAFFIC)
    assert opened == "deep_ep"
