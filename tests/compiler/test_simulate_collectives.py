"""Collectives with all ranks in one process, against what the equations say, in Python numbers."""

import torch
from torch import Tensor

from octavo.compiler.simulate_collectives import all_gather, all_reduce, combine, dispatch, reduce_scatter

EXPERTS = [[[0, 5], [2, -1], [-1, -1]], [[3, 1]], []]  # of the tokens of three ranks, two experts each
LOCAL = 2


def test_sums_are_in_the_order_of_ranks_and_rounded_once() -> None:
    """1e8 + 1 - 1e8 is 0 in that order in fp32; four times 2^-9 moves a bf16 of 1, which one of them would not."""
    ranks = [(torch.tensor([value]), "tp") for value in (1e8, 1.0, -1e8)]
    assert [x.item() for x in all_reduce(ranks)] == [0.0, 0.0, 0.0]
    small = [(torch.tensor([value], dtype=torch.bfloat16), "tp") for value in (1.0, *[2**-9] * 4)]
    (first, *_) = all_reduce(small)
    assert first.item() == 1 + 2**-7


def test_parts_are_joined_and_sums_cut() -> None:
    ranks = [(torch.arange(4.0).reshape(1, 4) + 10 * r, -1, "tp", 2) for r in range(2)]
    assert all_gather(ranks)[1].tolist() == [[0, 1, 2, 3, 10, 11, 12, 13]]
    assert [x.tolist() for x in reduce_scatter(ranks)] == [[[10, 12]], [[14, 16]]]


def sent(wire: str = "model", width: int = 16) -> tuple[list[tuple[Tensor, ...]], list[Tensor], list[Tensor]]:
    """dispatch of EXPERTS; its results, the rows and the experts of each rank."""
    generator = torch.Generator().manual_seed(1)
    counts = [len(own) for own in EXPERTS]
    xs = [torch.randn(1, n, width, generator=generator) for n in counts]
    ids = [torch.tensor(own, dtype=torch.int64).reshape(1, -1, 2) for own in EXPERTS]
    weights = [torch.rand(1, n, 2, generator=generator) for n in counts]
    row_ranks = torch.tensor([r for r, n in enumerate(counts) for _ in range(n)])
    ranks = [(x, e, w, row_ranks, None, LOCAL, wire, "dp") for x, e, w in zip(xs, ids, weights, strict=True)]
    return [tuple(result) for result in dispatch(ranks)], xs, ids


def test_a_token_goes_once_to_each_rank_that_has_an_expert_of_it() -> None:
    results, xs, _ = sent()
    sources = [result[3].tolist() for result in results]
    assert sources == [[0, 1, -1, -1], [0, 1, -1, -1], [0, -1, -1, -1]]
    assert [result[1][0].tolist() for result in results] == [
        [[0, -1], [-1, 1], [-1, -1], [-1, -1]],
        [[0, -1], [1, -1], [-1, -1], [-1, -1]],
        [[-1, 1], [-1, -1], [-1, -1], [-1, -1]],
    ]
    assert torch.equal(results[0][0][0, 0], xs[0][0, 0]) and torch.equal(results[1][0][0, 0], xs[0][0, 1])
    assert not results[2][0][0, 1:].any(), "rows behind the last one sent are zero"


def test_results_come_back_to_their_tokens_in_the_order_of_ranks() -> None:
    results, _, ids = sent()
    made = [torch.full_like(result[0], 10.0**owner) for owner, result in enumerate(results)]
    back = combine([(made[r], results[r][3], ids[r], LOCAL, "dp") for r in range(3)])
    assert back[0][0, :, 0].tolist() == [101.0, 10.0, 0.0], "ranks 0 and 2; rank 1; nobody"
    assert back[1][0, :, 0].tolist() == [11.0]
    assert back[2].shape == (1, 0, 16)


def test_what_wires_lose_is_within_their_formats() -> None:
    _, xs, _ = sent()
    for wire, step in (("fp8", 2**-4), ("nvfp4", 2**-2)):
        results, *_ = sent(wire)
        row, exact = results[0][0][0, 0], xs[0][0, 0]
        assert 0 < (row - exact).abs().max() <= step * exact.abs().max()
