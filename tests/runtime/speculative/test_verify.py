import math
from collections.abc import Callable

import numpy as np
import pytest
from drafted import Given, Verify, coupled
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.compiler.errors import ExecutionError
from octavo.runtime.sampler import RandomKey, draw, random_bits, uniform
from octavo.runtime.speculative.draft import NO_DRAFT, ROOT, Distribution, Draft, chain
from octavo.runtime.speculative.verify import Noise, Target, Verdict, verify_block, verify_tokens, walk

LAST = math.nextafter(1, 0)
VERIFIES: dict[str, Verify] = {"tokens": verify_tokens, "block": verify_block}


def given_noise(*points: float) -> Given:
    return Given(points)


def rows(*probs: list[float]) -> Target:
    """The target's distributions behind ROOT, node 0, node 1, ..."""
    table = [np.array(row) for row in probs]
    return lambda node: table[node + 1]


def drawn(token_ids: list[int], *probs: list[float]) -> Draft:
    """A chain that was drawn."""
    return Draft(
        tuple(token_ids), tuple(range(-1, len(token_ids) - 1)), tuple(np.array(row) for row in probs)
    )


@pytest.mark.parametrize("rule", VERIFIES.values())
def test_a_token_is_accepted_strictly_below_its_ratio(rule: Verify) -> None:
    draft, target = drawn([1], [0.25, 0.5, 0.25]), rows([0.5, 0.25, 0.25], [0, 0, 1])
    assert rule(draft, target, given_noise(math.nextafter(0.5, 0), 0.0)) == Verdict((0,), 2)
    assert rule(draft, target, given_noise(0.5, 0.0)) == Verdict((), 0)
    assert rule(draft, target, given_noise(0.5, LAST)) == Verdict((), 0)  # max(p - q, 0) is (1/4, 0, 0)


@pytest.mark.parametrize("rule", VERIFIES.values())
def test_what_the_target_excludes_is_not_accepted_by_a_zero(rule: Verify) -> None:
    target = rows([0, 1], [0.5, 0.5])
    assert rule(drawn([0], [1, 0]), target, given_noise(0.0, 0.0)) == Verdict((), 1)
    assert rule(chain([0]), target, given_noise(0.0, 0.0)) == Verdict((), 1)


@pytest.mark.parametrize("rule", VERIFIES.values())
def test_an_equal_distribution_is_always_accepted(rule: Verify) -> None:
    probs = [0.1, 0.2, 0.3, 0.4]
    assert rule(drawn([3], probs), rows(probs, probs), given_noise(LAST, 0.0)) == Verdict((0,), 0)


@pytest.mark.parametrize("rule", VERIFIES.values())
def test_where_nothing_is_left_the_target_is_drawn_from(rule: Verify) -> None:
    """Rounding made p(x) a bit less than q(x), and the largest number refused x: p - q is nowhere positive."""
    draft, target = drawn([0], [0.5, 0.5]), rows([0.5 - 2.0**-54, 0.5], [1, 0])
    assert rule(draft, target, given_noise(LAST, 0.25)) == Verdict((), 0)
    assert rule(draft, target, given_noise(LAST, 0.75)) == Verdict((), 1)


def test_after_siblings_that_left_nothing_what_was_left_before_counts() -> None:
    """The first is refused and leaves all to token 1; the second is drawn from just that."""
    draft = Draft((0, 1), (ROOT, ROOT), (np.array([0.5, 0.5]), np.array([0.0, 1.0])), True)
    assert verify_tokens(draft, rows([0, 1], [1, 0], [1, 0]), given_noise(0.0, LAST, 0.0)) == Verdict((1,), 0)


@pytest.mark.parametrize("rule", VERIFIES.values())
@pytest.mark.parametrize("position", [0, 7, 10**9])
def test_without_drafts_it_is_plain_decoding(rule: Verify, position: int) -> None:
    key, probs = RandomKey(3, 1), [0.3, 0.2, 0.5]
    verdict = rule(NO_DRAFT, rows(probs), Noise(key, position, 4))
    assert verdict == Verdict((), draw(np.array(probs), uniform(key, position)))


@pytest.mark.parametrize("rule", VERIFIES.values())
def test_behind_an_accepted_draft_it_is_plain_decoding(rule: Verify) -> None:
    key = RandomKey(3, 1)
    for position in range(20):
        verdict = rule(chain([1, 1]), rows([0, 1], [0, 1], [0.5, 0.5]), Noise(key, position, 4))
        assert verdict == Verdict((0, 1), draw(np.array([0.5, 0.5]), uniform(key, position + 2)))


@pytest.mark.parametrize("rule", VERIFIES.values())
def test_a_vocabulary_of_one_token(rule: Verify) -> None:
    assert rule(drawn([0, 0], [1], [1]), rows([1], [1], [1]), Noise(RandomKey(0, 0), 0, 0)) == Verdict(
        (0, 1), 0
    )


@pytest.mark.parametrize("rule", VERIFIES.values())
@pytest.mark.parametrize("token_id", [-1, 2, 10**6])
def test_a_fixed_token_outside_the_vocabulary_is_refused(rule: Verify, token_id: int) -> None:
    """-1 would name the last token, if it named any."""
    target = rows([0, 1], [0, 1], [0, 1])
    assert rule(chain([token_id, 1]), target, given_noise(0.0, 0.0)) == Verdict((), 1)
    assert rule(chain([1, token_id]), target, given_noise(0.0, 0.0, 0.0)) == Verdict((0,), 1)
    beside = Draft((token_id, 1), (ROOT, ROOT), (None, None))
    assert verify_tokens(beside, target, given_noise(0.0, 0.0, 0.0)) == Verdict((1,), 1)


@pytest.mark.parametrize("rule", VERIFIES.values())
@pytest.mark.parametrize(
    ("draft", "said"),
    [
        (drawn([0], [0, 1]), "expected token 0 of node 0 to be drawn from its probs, got probability 0.0"),
        (drawn([-1], [0, 1]), "expected token -1 of node 0 .* got probability 0.0"),
        (drawn([2], [0, 1]), "expected token 2 of node 0 .* got probability 0.0"),
        (drawn([0], [math.nan, 1]), "expected token 0 of node 0 .* got probability nan"),
        (drawn([0], [1, math.nan]), "expected finite probabilities at node 0, got ones that add up to nan"),
        (drawn([0], [1]), "expected probabilities of the target's 2 tokens for node 0, got 1"),
    ],
)
def test_probs_that_cannot_be_true_are_an_error(rule: Verify, draft: Draft, said: str) -> None:
    with pytest.raises(ExecutionError, match=f"draft: {said}"):
        rule(draft, rows([0.5, 0.5], [0.5, 0.5]), given_noise(LAST, LAST))


def test_a_sibling_without_replacement_that_repeats_is_an_error() -> None:
    probs = np.array([0.5, 0.5])
    draft = Draft((0, 0), (ROOT, ROOT), (probs, probs), True)
    with pytest.raises(ExecutionError, match=r"without its siblings' tokens \[0\], got probability 0.0"):
        verify_tokens(draft, rows([0, 1], [0, 1], [0, 1]), given_noise(LAST, LAST))


def test_a_sibling_behind_all_that_could_be_drawn_is_an_error() -> None:
    probs = np.array([1.0, 0.0])
    draft = Draft((0, 1), (ROOT, ROOT), (probs, probs), True)
    with pytest.raises(ExecutionError, match=r"without its siblings' tokens \[0\], got probability 0.0"):
        verify_tokens(draft, rows([0, 1], [0, 1], [0, 1]), given_noise(LAST, LAST))


def test_a_block_asks_for_nothing_behind_a_token_that_cannot_come() -> None:
    """A grammar has no state there."""
    target = Watched([np.array(row) for row in ([0.5, 0.5], [1.0, 0.0], [0.0, 0.0])])
    half = [0.5, 0.5]
    assert verify_block(drawn([0, 1, 0], half, half, half), target, given_noise(0.0, 0.0)) == Verdict((0,), 0)
    assert target.asked == [ROOT, 0]


def test_a_beginning_that_leaves_nothing_is_never_the_longest() -> None:
    """Of two, the second is as the target: either both are kept, or none."""
    draft, target = drawn([1, 0], [0.5, 0.5], [0.5, 0.5]), rows([0.75, 0.25], [0.5, 0.5], [1, 0])
    assert verify_block(draft, target, given_noise(math.nextafter(0.5, 0), 0.0)) == Verdict((0, 1), 0)
    assert verify_block(draft, target, given_noise(0.5, 0.0, LAST)) == Verdict((), 0)


def test_of_children_that_are_alike_the_coupling_follows_the_first() -> None:
    assert walk(Draft((1, 1), (ROOT, ROOT), (None, None)), lambda node: 1) == Verdict((0,), 1)


def test_a_block_is_of_a_chain() -> None:
    with pytest.raises(AssertionError, match="expected a chain"):
        verify_block(Draft((0, 1), (ROOT, ROOT), (None, None)), rows([1, 0]), given_noise())


def test_numbers_are_of_their_place_and_purpose() -> None:
    key = RandomKey(5, 9)
    numbers = [
        number
        for each in (RandomKey(5, 9), RandomKey(5, 8), RandomKey(4, 9))
        for round in (0, 1, 900)
        for noise in (Noise(each, 10, round), Noise(each, 20, round))
        for depth in range(3)
        for number in (*(noise.accept(depth, sibling) for sibling in range(5)), noise.residual(depth))
    ]
    plain = [Noise(key, 10, 3).plain(depth) for depth in range(3)]
    drafted = [uniform_of(key, position, 1, round) for position in range(10, 13) for round in (0, 1, 900)]
    assert len({*numbers, *plain, *drafted}) == len(numbers) + len(plain) + len(drafted)
    assert all(0 <= number < 1 for number in numbers)
    assert Noise(key, 10, 3).accept(2, 1) == Noise(key, 12, 3).accept(0, 1)
    assert Noise(key, 10, 3).residual(2) == Noise(key, 12, 3).residual(0) == uniform_of(key, 12, 3, 3)
    assert Noise(key, 10, 3).accept(2, 0) == uniform_of(key, 12, 2, 3)
    assert plain == [uniform(key, position) for position in (10, 11, 12)]


def uniform_of(key: RandomKey, position: int, stream: int, round: int) -> float:
    return (int(random_bits(key, position, stream, round, 1)[0]) >> 11) * 2.0**-53


_tokens = st.integers(0, 4)


@st.composite
def _drafts(data: st.DrawFn) -> Draft:
    """Any tree of at most six nodes, with whatever probs its tokens may have come from."""
    count = data(st.integers(0, 6))
    parents = tuple(data(st.integers(ROOT, node - 1)) for node in range(count))
    token_ids = tuple(data(_tokens) for _ in range(count))
    probs = tuple(_probs(data, token) if data(st.booleans()) else None for token in token_ids)
    return Draft(token_ids, parents, probs)


def _probs(data: st.DrawFn, token: int | None = None) -> Distribution:
    weights = np.array(data(st.lists(st.sampled_from([0.0, 1e-300, 0.5, 1.0]), min_size=5, max_size=5)))
    weights[data(_tokens) if token is None else token] += 1.0
    weights /= weights.sum()
    weights.flags.writeable = False
    return weights


_targets = st.composite(lambda data: [_probs(data) for _ in range(7)])()


class Watched:
    """A target that remembers what it was asked for."""

    def __init__(self, table: list[Distribution]) -> None:
        self.table = table
        self.asked: list[int] = []

    def __call__(self, node: int) -> Distribution:
        self.asked.append(node)
        return self.table[node + 1]


@settings(deadline=None)
@given(_drafts(), _targets, st.integers(0, 2**64 - 1))
def test_nothing_that_the_target_excludes_is_emitted(
    draft: Draft, table: list[Distribution], seed: int
) -> None:
    noise = Noise(RandomKey(seed, 0), 5, 1)
    for rule in (verify_tokens, verify_block) if draft.is_chain else (verify_tokens,):
        target = Watched(table)
        path, token_id = rule(draft, target, noise)
        above = (ROOT, *path)
        assert all(draft.parents[node] == parent for node, parent in zip(path, above, strict=False))
        tokens = [*(draft.token_ids[node] for node in path), token_id]
        assert all(table[node + 1][token] > 0 for node, token in zip(above, tokens, strict=True))
        is_block = rule is verify_block
        assert target.asked == (list(range(-1, len(target.asked) - 1)) if is_block else list(above))
        assert len(target.asked) <= len(draft) + 1


@settings(deadline=None)
@given(_drafts(), st.lists(_tokens, min_size=7, max_size=7))
def test_the_coupling_emits_what_plain_decoding_does(draft: Draft, plain: list[int]) -> None:
    """Token i of plain decoding depends on those before it only, so here on the depth; e.g. an argmax."""
    asked: list[int] = []

    def choose(node: int) -> int:
        asked.append(node)
        return plain[0 if node == ROOT else draft.depth(node) + 1]

    path, token_id = walk(draft, choose)
    emitted = [*(draft.token_ids[node] for node in path), token_id]
    assert emitted == plain[: len(emitted)]
    assert asked == [ROOT, *path]
    assert all(draft.token_ids[child] != token_id for child in draft.children(asked[-1]))


@settings(deadline=None)
@given(_drafts(), st.lists(_tokens, min_size=7, max_size=7), st.integers(0, 2**64 - 1))
def test_a_greedy_target_emits_its_argmax_by_every_rule(draft: Draft, best: list[int], seed: int) -> None:
    table = [np.eye(5)[best[0 if node == ROOT else draft.depth(node) + 1]] for node in range(-1, len(draft))]
    rules: tuple[Callable[..., Verdict], ...] = (
        (verify_tokens, verify_block) if draft.is_chain else (verify_tokens,)
    )
    for rule in (*rules, coupled):
        path, token_id = rule(draft, lambda node: table[node + 1], Noise(RandomKey(seed, 0), 5, 1))
        emitted = [*(draft.token_ids[node] for node in path), token_id]
        assert emitted == best[: len(emitted)]
