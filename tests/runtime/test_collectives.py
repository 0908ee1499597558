"""Collective steps on ranks that are threads: rows and order as the ops say, sums bit for bit, ways equal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from rank_threads import ThreadPeers, on_ranks
from torch import Tensor

from octavo.compiler.errors import ExecutionError
from octavo.compiler.program import Step
from octavo.runtime import collectives
from octavo.runtime.collectives import Collectives
from octavo.runtime.dispatchers import DISPATCHERS, Dispatcher, Padded, Peers
from octavo.runtime.regions import Region, read_and_filled
from octavo.runtime.wire import pack_rows, unpack_rows

HIDDEN, SLOTS, LOCAL = 32, 3, 2


@dataclass
class Tokens:
    """Of one rank: x (1, T, H), experts and weights (1, T, K)."""

    x: Tensor
    experts: Tensor
    weights: Tensor


def tokens_of(
    counts: Sequence[int], dtype: torch.dtype, choose: Callable[..., Tensor] | None = None
) -> list[Tokens]:
    """Of each rank, with experts of all ranks; about a third of the slots go to nobody."""
    generator = torch.Generator().manual_seed(sum(counts) + len(counts))
    found = []
    for count in counts:
        shape = (1, count, SLOTS)
        experts = torch.randint(0, len(counts) * LOCAL, shape, generator=generator)
        experts = (
            choose(experts)
            if choose
            else experts.masked_fill(torch.rand(shape, generator=generator) < 0.3, -1)
        )
        x = torch.randn(1, count, HIDDEN, generator=generator).to(dtype)
        found.append(Tokens(x, experts, torch.rand(shape, generator=generator)))
    return found


def sent_to(rank: int, tokens: Sequence[Tokens]) -> list[tuple[int, int, list[int], list[float]]]:
    """(source, token, local experts, weights) of each row of a rank, from the words of the op alone."""
    rows = []
    for source, own in enumerate(tokens):
        for t in range(own.x.shape[1]):
            pairs = zip(own.experts[0, t].tolist(), own.weights[0, t].tolist(), strict=True)
            slots = [(e % LOCAL, w) if e >= 0 and e // LOCAL == rank else (-1, 0.0) for e, w in pairs]
            if any(local >= 0 for local, _ in slots):
                rows.append((source, t, [local for local, _ in slots], [w for _, w in slots]))
    return rows


def run_step(
    peers: Peers, dispatcher: Dispatcher | None, step: Step, inputs: list[Any], like: list[Tensor]
) -> list[Tensor]:
    outputs = [torch.full_like(each, 77) for each in like]
    Collectives({step.axis: peers}, dispatcher).run_on(step, inputs, outputs)
    return outputs


def dispatched(
    peers: ThreadPeers, dispatcher: Dispatcher, tokens: Sequence[Tokens], wire: str, outer: Tensor | None
) -> list[Tensor]:
    own, counts = tokens[peers.coordinate], [each.x.shape[1] for each in tokens]
    row_ranks = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    n = sum(counts)
    like = [
        own.x.new_empty(1, n, HIDDEN),
        torch.empty(1, n, SLOTS, dtype=torch.int64),
        torch.empty(1, n, SLOTS),
        row_ranks,
    ]
    step = Step("dispatch", (), axis="dp", options=(LOCAL, wire))
    return run_step(peers, dispatcher, step, [own.x, own.experts, own.weights, row_ranks, outer], like)


def combined(
    peers: ThreadPeers, dispatcher: Dispatcher, parts: Tensor, source: Tensor, own: Tokens
) -> Tensor:
    step = Step("combine", (), axis="dp", options=(LOCAL,))
    return run_step(peers, dispatcher, step, [parts, source, own.experts], [own.x])[0]


CASES: dict[str, tuple[Sequence[int], Callable[..., Tensor] | None]] = {
    "uneven": ((5, 1, 7), None),
    "some ranks without tokens": ((0, 4, 0, 2), None),
    "all ranks for many tokens": ((6, 6, 6, 6), lambda e: (e.cumsum(-1) * 2 + torch.arange(3) * 2) % 8),
    "no tokens": ((0, 0), None),
    "one rank": ((3,), None),
    "one hot expert": ((4, 3, 2), lambda e: torch.full_like(e, 3)),
    "all experts of one rank": ((4, 0, 2), lambda e: 4 + e % LOCAL),
    "nobody wanted": ((2, 3), lambda e: torch.full_like(e, -1)),
}


@pytest.mark.parametrize("name", DISPATCHERS)
@pytest.mark.parametrize("case", CASES)
def test_dispatch_and_combine(case: str, name: str) -> None:
    counts, choose = CASES[case]
    dtype = torch.float32 if len(counts) > 3 else torch.bfloat16
    tokens = tokens_of(counts, dtype, choose)

    def work(peers: ThreadPeers) -> tuple[list[Tensor], Tensor, Tensor]:
        dispatcher = DISPATCHERS[name](peers)
        came = dispatched(peers, dispatcher, tokens, "model", None)
        # What experts make of a row: something that depends on the row, the rank and the weights.
        parts = (came[0].float() * (peers.coordinate + 1) + came[2].sum(-1, keepdim=True)).to(dtype)
        parts[:, came[3] < 0] = float("nan")  # rows of nobody never count
        return came, parts, combined(peers, dispatcher, parts, came[3], tokens[peers.coordinate])

    results = on_ranks(len(counts), work)
    for rank, ((rows, local, weights, source), _, _) in enumerate(results):
        expected = sent_to(rank, tokens)
        used = len(expected)
        assert source.tolist() == [row[0] for row in expected] + [-1] * (sum(counts) - used)
        assert local[0, :used].tolist() == [row[2] for row in expected]
        assert weights[0, :used].tolist() == [row[3] for row in expected]
        for row, (owner, t, _, _) in enumerate(expected):
            assert torch.equal(rows[0, row], tokens[owner].x[0, t])
        assert (
            (rows[0, used:] == 0).all() and (local[0, used:] == -1).all() and (weights[0, used:] == 0).all()
        )
    for rank, (_, _, total) in enumerate(results):
        assert torch.equal(total, total_by_hand(rank, tokens, [parts for _, parts, _ in results]))


def total_by_hand(rank: int, tokens: Sequence[Tokens], parts: Sequence[Tensor]) -> Tensor:
    """For each token the sum of the rows that it became, rank by rank in fp32, then one rounding."""
    total = np.zeros(tokens[rank].x.shape[1:], np.float32)
    for owner, part in enumerate(parts):
        for row, (source, t, _, _) in enumerate(sent_to(owner, tokens)):
            if source == rank:
                total[t] = total[t] + part[0, row].float().numpy()
    return torch.from_numpy(total).to(tokens[rank].x.dtype)[None]


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("wire", ["fp8", "nvfp4"])
def test_rows_on_a_narrow_wire_are_what_it_holds(wire: str, given: bool) -> None:
    tokens = tokens_of((3, 4), torch.float32)
    outer = torch.tensor([0.004]) if given else None
    results = on_ranks(
        2, lambda peers: dispatched(peers, DISPATCHERS["all_to_all"](peers), tokens, wire, outer)
    )
    for rank, (rows, *_) in enumerate(results):
        for row, (source, t, _, _) in enumerate(sent_to(rank, tokens)):
            payload, own = pack_rows(tokens[source].x[0, t : t + 1], wire, outer)
            expected = unpack_rows(payload, outer if given else own, wire, HIDDEN, torch.float32)
            assert torch.equal(rows[0, row], expected[0])


def test_a_capacity_that_is_too_small_is_refused() -> None:
    tokens = tokens_of((3, 5), torch.float32)
    with pytest.raises(ExecutionError, match="expected at most 4 tokens a rank, got 5"):
        on_ranks(2, lambda peers: dispatched(peers, Padded(peers, 4), tokens, "model", None))
    on_ranks(2, lambda peers: dispatched(peers, Padded(peers, 5), tokens, "model", None))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("two_phases", [False, True])
def test_all_reduce(monkeypatch: pytest.MonkeyPatch, size: int, dtype: torch.dtype, two_phases: bool) -> None:
    monkeypatch.setattr(collectives, "TWO_PHASE_BYTES", 0 if two_phases else 1 << 30)
    xs = [
        (torch.randn(1, 5, 7, dtype=torch.float64) * 10 ** torch.randint(-4, 4, (1, 5, 7))).to(dtype)
        for _ in range(size)
    ]
    step = Step("all_reduce", (), axis="ep")
    results = on_ranks(size, lambda peers: run_step(peers, None, step, [xs[peers.coordinate]], [xs[0]])[0])
    wide = np.float64 if dtype == torch.float64 else np.float32
    total = xs[0].to(torch.float64).numpy().astype(wide)
    for x in xs[1:]:
        total = total + x.to(torch.float64).numpy().astype(wide)
    expected = torch.from_numpy(total).to(dtype)
    assert all(torch.equal(result, expected) for result in results)


def test_gather_and_scatter() -> None:
    xs = [torch.randn(1, 4, 6) for _ in range(2)]
    gather = Step("all_gather", (), axis="tp", options=(-1, "tp", 2)[:1])
    scatter = Step("reduce_scatter", (), axis="tp", options=(-2,))
    like = [torch.empty(1, 4, 12), torch.empty(1, 2, 6)]
    results = on_ranks(
        2,
        lambda peers: [
            run_step(peers, None, step, [xs[peers.coordinate]], [out])[0]
            for step, out in zip((gather, scatter), like, strict=True)
        ],
    )
    for rank, (gathered, scattered) in enumerate(results):
        assert torch.equal(gathered, torch.cat(xs, -1))
        assert torch.equal(scattered, (xs[0] + xs[1])[:, 2 * rank : 2 * rank + 2])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_regions_are_read_and_filled_in_place(dtype: str) -> None:
    kind = collectives.DTYPES[dtype]
    xs, results = (
        [torch.randn(3, 5).to(kind) for _ in range(2)],
        [torch.zeros(3, 5, dtype=kind) for _ in range(2)],
    )

    def work(peers: ThreadPeers) -> None:
        own = xs[peers.coordinate], results[peers.coordinate]
        x, result = (Region(dtype, (3, 5), each.data_ptr()) for each in own)
        Collectives({"tp": peers}).run(Step("all_reduce", (), axis="tp"), [x], [result])
        empty = Region(dtype, (0, 5), 0)
        Collectives({"tp": peers}).run(Step("all_reduce", (), axis="tp"), [empty], [empty])

    on_ranks(2, work)
    expected = (xs[0].float() + xs[1].float()).to(kind)
    assert torch.equal(results[0], expected) and torch.equal(results[1], expected)


def test_an_axis_is_that_of_the_result_whatever_the_axes_of_the_buffer_that_is_read() -> None:
    """Heads of attention, (T, 2, 16) in memory, are channels (T, 32) where they are gathered."""
    heads, channels = Region("fp32", (3, 2, 16), 64), Region("fp32", (3, 64), 128)
    gather = Step("all_gather", (), axis="tp", options=(-1, 2))
    assert read_and_filled(gather, [heads, channels]) == ([Region("fp32", (3, 32), 64)], [channels])
    scatter = Step("reduce_scatter", (), axis="tp", options=(-2, 3))
    wide = Region("fp32", (9, 64), 64)
    assert read_and_filled(scatter, [replace(wide, shape=(9, 4, 16)), channels]) == ([wide], [channels])
    total = Step("all_reduce", (), axis="tp")
    assert read_and_filled(total, [heads, channels]) == ([heads], [channels])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a torch without GPUs is refused")
def test_gpus_that_torch_does_not_see() -> None:
    with pytest.raises(ExecutionError, match=r"expected a torch that sees GPUs"):
        collectives.use_gpu(0)
