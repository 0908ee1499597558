import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from speculation import make_request

from octavo.runtime.request import Branch
from octavo.runtime.speculative.acceptance import path_rates
from octavo.runtime.speculative.draft import NO_DRAFT, ROOT, Draft, chain
from octavo.runtime.speculative.policy import Adaptive, FixedLength, Policy, choose, only

Rise = Callable[[int], float]


def seconds_of(table: Sequence[float]) -> Callable[[NDArray[np.float64]], NDArray[np.float64]]:
    """By counts from 0 on."""
    return lambda counts: np.array(table)[counts.astype(int)]


def closed(parents: Sequence[int]) -> list[tuple[int, ...]]:
    """All sets of nodes in which each has its parent."""
    nodes = range(len(parents))
    sets = [s for count in range(len(parents) + 1) for s in itertools.combinations(nodes, count)]
    return [s for s in sets if all(parents[node] in (ROOT, *s) for node in s)]


@pytest.mark.parametrize("others", [0, 3])
def test_no_choice_makes_more_tokens_a_second(others: int, seed: int = 7) -> None:
    random = np.random.default_rng(seed)
    for _ in range(60):
        trees = [
            [int(random.integers(ROOT, node)) for node in range(int(random.integers(1, 5)))] for _ in range(2)
        ]
        rates = [path_rates(random.random(len(tree)).tolist(), tree) for tree in trees]
        step = np.cumsum(random.random(20) ** 4).tolist()  # long flat parts, then jumps
        drafting = np.cumsum(random.random(9) * 0.05).tolist()
        drafting[0] = 0.0
        options = []
        for kept in itertools.product(*map(closed, trees)):
            count = sum(map(len, kept))
            tokens = 2 + sum(rates[i][node] for i in range(2) for node in kept[i])
            options.append(
                (tokens, step[2 + count] + drafting[count], step[2 + others + count] + drafting[count])
            )
        speed = max(tokens / alone for tokens, alone, _ in options)
        choice = choose(rates, seconds_of(step), seconds_of(drafting), others)
        assert choice.tokens_per_second == pytest.approx(speed)
        best = max(tokens - speed * seconds for tokens, _, seconds in options)
        count = sum(map(len, choice.nodes))
        tokens = 2 + sum(rates[i][node] for i in range(2) for node in choice.nodes[i])
        assert tokens - speed * (step[2 + others + count] + drafting[count]) == pytest.approx(best)
        assert all(tuple(nodes) in closed(tree) for nodes, tree in zip(choice.nodes, trees, strict=True))


def test_where_nothing_is_won_nothing_is_drafted() -> None:
    linear = seconds_of(np.arange(20.0).tolist())
    nothing = seconds_of([0.0] * 20)
    assert choose([[1.0, 1.0], [0.9]], linear, nothing).nodes == [[], []]
    flat = seconds_of([1.0] * 20)
    assert choose([[0.5, 0.1], [0.01]], flat, nothing).nodes == [[0, 1], [0]]


def test_some_nodes_of_a_tree_are_a_tree() -> None:
    one = np.ones(4)
    tree = Draft((5, 6, 7, 8), (ROOT, 0, ROOT, 2), (None, one, None, one), True, (0.1, 0.2, 0.3, 0.4))
    assert only(tree, [0, 1, 2, 3]) is tree
    assert only(tree, [2, 3]) == Draft((7, 8), (ROOT, 0), (None, one), True, (0.3, 0.4))
    assert only(chain([5, 6]), []) == NO_DRAFT


def test_a_fixed_length_is_always_asked_for() -> None:
    policy, branch = FixedLength(3), make_request([1]).branches[0]
    draft = chain([5], scores=[0.0])
    policy.drafted(6, 9.0)
    policy.timed(1, 1.0)
    policy.record(branch, draft, [9], False)
    assert policy.lengths([branch, branch], 2) == [3, 3]
    assert policy.trim([branch], [draft], 1) == [draft]


class Text:
    """What is accepted: each drafted token with a probability that may change as the text goes on."""

    def __init__(self, rate: Callable[[int], float], seed: int = 1) -> None:
        self.rate = rate
        self.random = np.random.default_rng(seed)
        self.length = 0

    def accepted(self, count: int) -> int:
        misses = (i for i in range(count) if self.random.random() >= self.rate(self.length))
        return next(misses, count)


def tokens_per_second(
    policy: Policy,
    text: Text,
    step: Rise,
    draft_each: float,
    scores: Callable[[int], list[float]] | None = None,
    num_steps: int = 2000,
) -> float:
    """Of a branch alone."""
    branch: Branch = make_request([1]).branches[0]
    noise = np.random.default_rng(0)
    seconds = 0.0
    for _ in range(num_steps):
        [length] = policy.lengths([branch], 1)
        draft = chain(list(range(length)), None if scores is None else scores(length))
        if length:
            policy.drafted(length, draft_each * length)
        [kept] = policy.trim([branch], [draft], 1)
        spent = step(1 + len(kept))
        policy.timed(
            1 + len(kept), spent * float(noise.lognormal(0, 0.05)) * (9 if noise.random() < 0.02 else 1)
        )
        seconds += spent + draft_each * length
        count = text.accepted(len(kept))
        if len(kept):
            policy.record(branch, kept, [*kept.token_ids[:count], -1], False)
        text.length += count + 1
    return text.length / seconds


def gpu(count: int) -> float:
    return 0.010 + 0.0001 * count


def cpu(count: int) -> float:
    return 0.006 + 0.004 * count


@pytest.mark.parametrize("step", [gpu, cpu])
@pytest.mark.parametrize(
    ("draft_each", "rate"),
    [
        pytest.param(
            each, rate, marks=() if (each, rate) in ((1e-5, 0.02), (1e-3, 0.75)) else pytest.mark.slow
        )
        for each in (1e-5, 1e-3)
        for rate in (0.02, 0.5, 0.75, 0.92)
    ],
)
def test_a_steady_text_goes_nearly_as_fast_as_with_the_best_length(
    step: Rise, draft_each: float, rate: float
) -> None:
    fixed = [
        tokens_per_second(FixedLength(k), Text(lambda _: rate), step, draft_each, num_steps=1000)
        for k in range(13)
    ]
    adaptive = tokens_per_second(Adaptive(12), Text(lambda _: rate), step, draft_each)
    assert adaptive > 0.95 * max(fixed)
    assert adaptive > 0.985 * fixed[0]


@pytest.mark.parametrize("step", [gpu, cpu])
@pytest.mark.parametrize("draft_each", [0.00001, pytest.param(0.001, marks=pytest.mark.slow)])
def test_a_text_that_never_pays_loses_less_than_a_percent(step: Rise, draft_each: float) -> None:
    plain = 1 / step(1)
    long = tokens_per_second(Adaptive(12), Text(lambda _: 0.0), step, draft_each, num_steps=2000)
    short = tokens_per_second(Adaptive(12), Text(lambda _: 0.0), step, draft_each, num_steps=200)
    assert long > (0.99 if step is cpu else 0.985) * plain  # a percent is less than steps differ by
    assert short > 0.97 * plain


@pytest.mark.parametrize("step", [gpu, cpu])
def test_a_text_that_changes_is_noticed(step: Rise) -> None:
    def rate(position: int) -> float:
        return 0.95 if position % 2000 >= 1000 else 0.0

    adaptive = tokens_per_second(Adaptive(12), Text(rate), step, 0.0005)
    fixed = [tokens_per_second(FixedLength(k), Text(rate), step, 0.0005) for k in (0, 1, 2, 4, 8, 12)]
    assert adaptive > 1.02 * max(fixed)


def test_scores_choose_what_is_verified() -> None:
    """Half of the drafts are nearly sure and half are nearly hopeless, and scores tell which, but not how much."""
    random = np.random.default_rng(4)
    current = [0.0]

    def scores(length: int) -> list[float]:
        current[0] = float(random.choice([0.97, 0.03]))
        return [0.6 if current[0] > 0.5 else 0.4] * length

    adaptive = tokens_per_second(Adaptive(12), Text(lambda _: current[0]), cpu, 0.00001, scores, 1000)
    fixed = [
        tokens_per_second(FixedLength(k), Text(lambda _: current[0]), cpu, 0.00001, scores, 300)
        for k in range(13)
    ]
    assert adaptive > 1.2 * max(fixed)


def test_sampled_drafts_are_not_cut() -> None:
    policy, branch = Adaptive(4), make_request([1]).branches[0]
    draft = Draft((5, 6), (ROOT, 0), (np.ones(9) / 9,) * 2, scores=(0.0, 0.0))
    policy.timed(1, 1.0)
    policy.timed(3, 3.0)
    assert policy.trim([branch], [draft], 1) == [draft]
    fixed = chain([5, 6], scores=[0.0, 0.0])
    assert policy.trim([branch], [fixed], 1) == [NO_DRAFT]


def test_what_was_drafted_to_learn_is_verified_whatever_its_score() -> None:
    policy, branch = Adaptive(4), make_request([1]).branches[0]
    draft = chain([5], scores=[0.05])
    for _ in range(40):
        policy.timed(1, 0.010)
        policy.timed(2, 0.018)
        policy.drafted(1, 0.002)
        policy.record(branch, draft, [9], False)
        policy.trim([branch], [draft], 1)
    num_asked = num_kept = 0
    for _ in range(2000):
        [length] = policy.lengths([branch], 1)
        policy.timed(1, 0.010)
        if length:
            num_asked += 1
            [kept] = policy.trim([branch], [draft], 1)
            num_kept += len(kept)
    assert 5 < num_asked == num_kept < 30  # of 20 seconds 0.1, at 10 ms each


def test_a_step_of_a_prompt_gets_drafts_only_as_good_as_elsewhere() -> None:
    policy, branch = Adaptive(8), make_request([1]).branches[0]
    for count in range(1, 600, 7):
        policy.timed(count, 0.006 + 0.004 * count)
    policy.drafted(8, 1e-5)
    for _ in range(50):
        policy.record(branch, chain([5, 6]), [5, 9], False)
    alone = policy.lengths([branch], 1)
    assert 1 <= alone[0] <= 2
    assert policy.lengths([branch], 500) == alone


def test_what_drafts_compete_with_is_measured_again() -> None:
    policy, branch = Adaptive(4), make_request([1]).branches[0]
    policy.timed(1, 0.01)
    asked = []
    for _ in range(600):
        [length] = policy.lengths([branch], 1)
        asked.append(length)
        policy.timed(1 + length, 0.01)
        policy.record(branch, chain(list(range(length))), list(range(length + 1)), False)
    assert asked.count(0) == 2
    assert asked.count(4) > 590


def test_many_branches_share_what_is_worth_verifying() -> None:
    policy = Adaptive(4)
    branches = [make_request([i + 1]).branches[0] for i in range(8)]
    for count in range(1, 40):
        policy.timed(count, 0.01 * max(1.0, count / 12))  # 4 more cost nothing
    for _ in range(40):
        for index, branch in enumerate(branches):
            policy.record(branch, chain([5, 6]), [5, 6, 9] if index < 2 else [9], False)
    lengths = policy.lengths(branches, 8)
    assert sum(lengths) >= 4
    assert min(lengths[:2]) == 4 or sum(lengths[:2]) >= 4
    assert max(lengths[2:]) <= 1
