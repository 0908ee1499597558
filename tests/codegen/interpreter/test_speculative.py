"""Speculative acceptance against the rule in fp64, draw by draw and as a law."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import chisquare
from torch import Tensor
from triton_interpreter import poisoned

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.sampling_triton import ACCEPT_STREAM, RESIDUAL_STREAM, sample_spec
from octavo.codegen.speculative_triton import Chains, greedy_spec, verify_spec
from octavo.compiler.target import load_target
from octavo.runtime.sampler import draw, probabilities
from octavo.runtime.sampling_params import SamplingParams

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
Row = NDArray[np.float64]
TARGET = replace(load_target("b200"), sm_count=12)  # a vocabulary in 3 parts


def records(launch: Launch, logits: Tensor, params: SamplingParams) -> tuple[Tensor, list[Row]]:
    """Records of rows, and the distributions that they stand for; a row of nan gives 0."""
    rows, vocab = logits.shape
    tensors = {
        "logits": logits, "temperature": torch.full((rows,), params.temperature),
        "top_k": torch.full((rows,), params.top_k, dtype=torch.int32), "top_p": torch.full((rows,), params.top_p),
        "min_p": torch.full((rows,), params.min_p), "point": torch.zeros(rows, dtype=torch.int64),
        "token": poisoned([rows], "i64"), "record": poisoned([rows, 5], "i64"),
    }  # fmt: skip
    launch(sample_spec(vocab, philox=False, block=64), tensors, {"L": rows})
    return tensors["record"], [law(row, params) for row in logits.numpy()]


def law(row: NDArray[np.float32], params: SamplingParams) -> Row:
    if np.isnan(row).any():
        return np.zeros(len(row))
    return np.eye(len(row))[row.argmax()] if params.is_greedy else probabilities(row, params)


def verified(p: list[Row], q: list[Row], drafts: list[int], u: list[float], v: float) -> list[int]:
    """The rule, for one request: p has a row more than drafts."""
    for i, (x, point) in enumerate(zip(drafts, u, strict=True)):
        inside = 0 <= x < len(p[i])
        if not inside or not point * q[i][x] < p[i][x]:
            left = np.maximum(p[i] - q[i], 0)
            return [*drafts[:i], draw(left if left.sum() else p[i], v) if p[i].any() else -1]
    return [*drafts, draw(p[-1], v)]


def run(launch: Launch, chains: Chains, tensors: dict[str, Tensor], requests: int) -> list[list[int]]:
    """Tokens of every request, without the -1 behind them."""
    held = {
        **tensors, "accepted": poisoned([requests], "i32"), "token": poisoned([requests, chains.max_drafts + 1], "i64"),
    }  # fmt: skip
    rows = int(tensors["cu_rows"][-1])
    launch(verify_spec(chains, TARGET, block=16), held, {"R": requests, "L": rows})
    accepted = held["accepted"].tolist()
    for row, count in zip(held["token"].tolist(), accepted, strict=True):
        assert row[count + 1 :] == [-1] * (chains.max_drafts - count)
    return [row[: count + 1] for row, count in zip(held["token"].tolist(), accepted, strict=True)]


@pytest.mark.parametrize(
    ("sampled", "vocab", "temperature"), [(True, 61, 1.0), (False, 61, 1.0), (True, 61, 0.0), (False, 5, 2.0)]
)
def test_chains_follow_the_rule(launch: Launch, sampled: bool, vocab: int, temperature: float) -> None:
    """Chains of 0 to 3 drafts, rows next to each other; a draft outside of the vocabulary; a row of nan."""
    generator = np.random.default_rng(vocab)
    counts = [3, 0, 1, 3, 2, 3]
    rows, drafts = sum(counts) + len(counts), sum(counts)
    params = SamplingParams(temperature=temperature, top_k=20, top_p=0.9)
    logits = torch.randn(rows, vocab) * 2
    owners = [row for row in range(rows) if row not in set(np.cumsum([c + 1 for c in counts]) - 1)]
    draft_logits = logits[owners] + 0.5 * torch.randn(drafts, vocab)
    logits[owners[-1]] = float("nan")
    record, p = records(launch, logits, params)
    draft_record, q = records(launch, draft_logits, SamplingParams(temperature=1.0))
    ids = [draw(row, generator.random()) for row in q]
    ids[4] = vocab
    if not sampled:
        q = [np.eye(vocab + 1)[x][:vocab] for x in ids]
    accept, points = (torch.from_numpy(generator.integers(0, 2**53, n)) for n in (drafts, len(counts)))
    starts = np.cumsum([0, *(count + 1 for count in counts)])
    tensors = {
        "logits": logits, "record": record, "draft": torch.tensor(ids), "accept_point": accept, "draw_point": points,
        "cu_rows": torch.from_numpy(starts.astype(np.int32)), "draft_logits": draft_logits,
        "draft_record": draft_record,
    }  # fmt: skip
    got = run(launch, Chains(vocab, 3, sampled, philox=False), tensors, len(counts))
    u = (accept.double() * 2.0**-53).tolist()
    for r, count in enumerate(counts):
        own = slice(starts[r] - r, starts[r] - r + count)
        expected = verified(
            p[starts[r] : starts[r + 1]], q[own], ids[own], u[own], float(points[r]) * 2.0**-53
        )
        assert got[r] == expected, f"request {r}"
    assert len({len(tokens) for tokens in got}) > 1


@dataclass(frozen=True)
class Draws:
    """Chains of two drafts from one pair of laws p (3 rows) and q (2 rows), and the numbers that judge them."""

    logits: Tensor
    draft_logits: Tensor
    p: list[Row]
    q: list[Row]
    ids: NDArray[np.int64]
    accept: NDArray[np.int64]
    points: NDArray[np.int64]

    def by_rule(self, told: list[Row]) -> list[list[int]]:
        """told: what the rule takes for q."""
        u, v = self.accept * 2.0**-53, self.points * 2.0**-53
        return [verified(self.p, told, ids.tolist(), u[i].tolist(), v[i]) for i, ids in enumerate(self.ids)]

    def by_kernel(self, launch: Launch, sampled: bool) -> list[list[int]]:
        draws = len(self.ids)
        record, _ = records(launch, self.logits, LAW)
        draft_record, _ = records(launch, self.draft_logits, PLAIN)
        tensors = {
            "logits": self.logits.repeat(draws, 1), "record": record.repeat(draws, 1),
            "draft": torch.from_numpy(self.ids.reshape(-1)), "draft_logits": self.draft_logits.repeat(draws, 1),
            "draft_record": draft_record.repeat(draws, 1),
            "cu_rows": torch.arange(0, 3 * draws + 1, 3, dtype=torch.int32),
            "accept_point": torch.from_numpy(self.accept.reshape(-1)), "draw_point": torch.from_numpy(self.points),
        }  # fmt: skip
        return run(launch, Chains(self.logits.shape[1], 2, sampled, philox=False), tensors, draws)


LAW, PLAIN = SamplingParams(temperature=1.0, top_k=5), SamplingParams(temperature=1.0)


def drawn(count: int, sampled: bool) -> Draws:
    generator = np.random.default_rng(5)
    vocab = 6
    logits, draft_logits = torch.randn(3, vocab), torch.randn(2, vocab)
    p, q = [law(row, LAW) for row in logits.numpy()], [law(row, PLAIN) for row in draft_logits.numpy()]
    if not sampled:
        q = [np.eye(vocab)[row.argmax()] for row in q]
    ids = np.stack([generator.choice(vocab, count, p=row) for row in q], 1)
    accept, points = (generator.integers(0, 2**53, size) for size in ((count, 2), count))
    return Draws(logits, draft_logits, p, q, ids, accept, points)


def is_of_law(draws: Draws, tokens: list[list[int]]) -> bool:
    """Chi-square at 1e-6 of how often each (number accepted, token behind them) and each first token came.

    Places with less than 5 expected are merged; nothing may come where nothing is expected.
    """
    vocab = len(draws.p[0])
    both = [np.minimum(a, b).sum() for a, b in zip(draws.p, draws.q, strict=False)]
    left = [np.maximum(a - b, 0) for a, b in zip(draws.p, draws.q, strict=False)]
    laws = np.stack([left[0], both[0] * left[1], both[0] * both[1] * draws.p[2]]).reshape(-1), draws.p[0]
    ends = [vocab * (len(row) - 1) + row[-1] for row in tokens]
    for places, expected in zip((ends, [row[0] for row in tokens]), laws, strict=True):
        seen, expected = np.bincount(places, minlength=len(expected)), expected * len(tokens)
        few = expected < 5
        merged = np.append(seen[~few], seen[few].sum()), np.append(expected[~few], expected[few].sum())
        used = merged[1] > 0
        if seen[expected == 0].any() or chisquare(merged[0][used], merged[1][used]).pvalue <= 1e-6:
            return False
    return True


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "point_mass"])
def test_the_rule_has_the_law_of_the_target(sampled: bool) -> None:
    draws = drawn(6000, sampled)
    assert is_of_law(draws, draws.by_rule(draws.q))


@pytest.mark.parametrize("told", ["hotter", "point_mass", "target"])
def test_a_wrong_draft_distribution_shows(told: str) -> None:
    draws = drawn(6000, sampled=True)
    hotter = [law(row, SamplingParams(temperature=2.0)) for row in draws.draft_logits.numpy()]
    wrong = {
        "hotter": hotter,
        "point_mass": [np.eye(6)[row.argmax()] for row in draws.q],
        "target": draws.p[:2],
    }
    assert not is_of_law(draws, draws.by_rule(wrong[told]))


@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "point_mass"])
def test_draws_of_the_kernel_are_those_of_the_rule(launch: Launch, sampled: bool) -> None:
    draws = drawn(24, sampled)
    assert draws.by_kernel(launch, sampled) == draws.by_rule(draws.q)


@pytest.mark.slow
@pytest.mark.parametrize("sampled", [True, False], ids=["sampled", "point_mass"])
def test_the_kernel_has_the_law_of_the_target(launch: Launch, sampled: bool) -> None:
    draws = drawn(3000, sampled)
    assert is_of_law(draws, draws.by_kernel(launch, sampled))


def test_greedy_chains(launch: Launch) -> None:
    best = torch.tensor([3, 5, 7, 9, 4, 2, -1, 1, 8])
    drafts = torch.tensor([3, 5, 6, 2, -1, 1])
    cu_rows = torch.tensor([0, 4, 5, 9], dtype=torch.int32)
    tensors = {
        "best": best, "draft": drafts, "cu_rows": cu_rows, "accepted": poisoned([3], "i32"),
        "token": poisoned([3, 4], "i64"),
    }  # fmt: skip
    launch(greedy_spec(3), tensors, {"R": 3, "L": 9})
    assert tensors["accepted"].tolist() == [2, 0, 1]
    assert tensors["token"].tolist() == [[3, 5, 7, -1], [4, -1, -1, -1], [2, -1, -1, -1]]


def test_random_numbers_of_a_chain_are_those_of_its_key(launch: Launch) -> None:
    """Of (seed, request), at (position, stream, round): two streams, apart from the sampler's, as numpy draws them."""
    counts, vocab = [2, 0, 3], 5
    rows, drafts = sum(counts) + 3, sum(counts)
    logits = torch.randn(rows, vocab) * 0.3
    record, _ = records(launch, logits, SamplingParams(temperature=1.0))
    key = torch.tensor([[2**63 - 1, 0], [5, 1], [-3, 2**40]])
    place = torch.tensor([[100, 0], [7, 1], [2**33, 9]])
    points = [
        [random(key[r], int(place[r, 0]) + i, stream, int(place[r, 1])) for i in range(count + 1)]
        for stream in (ACCEPT_STREAM, RESIDUAL_STREAM)
        for r, count in enumerate(counts)
    ]
    tensors = {
        "logits": logits, "record": record, "draft": torch.tensor([0, 1, 2, 3, 4]), "key": key, "place": place,
        "cu_rows": torch.tensor([0, 3, 4, 8], dtype=torch.int32),
        "accept_point": torch.tensor([u for chain in points[:3] for u in chain[:-1]]),
    }  # fmt: skip
    assert len(tensors["accept_point"]) == drafts
    made = run(launch, Chains(vocab, 3, sampled=False), tensors, 3)
    accepted = [len(tokens) - 1 for tokens in made]
    draws = [points[3 + r][count] for r, count in enumerate(accepted)]
    given = {**tensors, "draw_point": torch.tensor(draws)}
    assert run(launch, Chains(vocab, 3, sampled=False, philox=False), given, 3) == made


def random(key: Tensor, position: int, stream: int, turn: int) -> int:
    counter = np.array([0, position, stream, turn], np.uint64)
    return int(np.random.Philox(key=key.numpy().view(np.uint64), counter=counter).random_raw()) >> 11
