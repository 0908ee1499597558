import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import log_softmax
from scipy.stats import chisquare, kstest

from octavo.compiler.errors import ExecutionError
from octavo.runtime.sampler import (
    RandomKey,
    Row,
    Sampled,
    best,
    draw,
    log_probabilities,
    probabilities,
    prompt_logprobs,
    sample,
    uniform,
)
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.token_state import new_token_state

LOGITS = np.log(np.array([0.1, 0.3, 0.05, 0.3, 0.25], np.float32))
HOT = SamplingParams(temperature=1.0)


def sample_one(logits: NDArray[np.float32], params: SamplingParams, key: RandomKey, position: int) -> int:
    [chosen] = sample(logits[None], [Row(params, key, position)])
    assert isinstance(chosen, Sampled)
    return chosen.token_id


def greedy_rows(count: int) -> list[Row]:
    return [Row(SamplingParams(), RandomKey(0, 0), 0)] * count


def softmax(logits: NDArray[np.float32], temperature: float = 1.0) -> NDArray[np.float64]:
    wide = np.exp(logits.astype(np.float64) / temperature)
    result: NDArray[np.float64] = wide / wide.sum()
    return result


def test_greedy_takes_the_lowest_id_of_equal_maxima() -> None:
    logits = np.array(
        [[1, 3, 3, 0], [-np.inf, -np.inf, -5, -5], [0, 0, 0, 0], [-0.0, 0.0, -1, -1]], np.float32
    )
    assert sample(logits, greedy_rows(4)) == [Sampled(1), Sampled(2), Sampled(0), Sampled(0)]


def test_greedy_ignores_the_other_parameters() -> None:
    params = SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=0.9, seed=3)
    assert sample_one(LOGITS, params, RandomKey(3, 0), 5) == 1


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_temperature_divides_logits(temperature: float) -> None:
    expected = softmax(LOGITS, temperature)
    assert np.allclose(probabilities(LOGITS, SamplingParams(temperature=temperature)), expected, rtol=1e-12)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = np.array([1e30, -1e30, 2e30, -np.inf], np.float32)
    assert probabilities(logits, SamplingParams(temperature=1e-300)).tolist() == [0, 0, 1, 0]


def test_top_k_keeps_exactly_k_and_the_lowest_ids_of_a_tie() -> None:
    kept = [
        np.flatnonzero(probabilities(LOGITS, SamplingParams(temperature=1, top_k=k))).tolist()
        for k in range(7)
    ]
    assert kept == [[0, 1, 2, 3, 4], [1], [1, 3], [1, 3, 4], [0, 1, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.01, [1]), (0.29, [1]), (0.31, [1, 3]), (0.7, [1, 3, 4]), (0.9, [0, 1, 3, 4]), (1.0, [0, 1, 2, 3, 4])],
)
def test_top_p_keeps_the_fewest_that_reach_p(top_p: float, kept: list[int]) -> None:
    probs = probabilities(LOGITS, SamplingParams(temperature=1, top_p=top_p))
    assert np.flatnonzero(probs).tolist() == kept
    assert np.allclose(probs[kept], softmax(LOGITS)[kept] / softmax(LOGITS)[kept].sum(), rtol=1e-12)


def test_top_p_counts_within_what_top_k_kept() -> None:
    """After top-k 2 the two are 1/2 each, so p = 0.5 keeps one; before, it would have kept two."""
    probs = probabilities(LOGITS, SamplingParams(temperature=1, top_k=2, top_p=0.45))
    assert np.flatnonzero(probs).tolist() == [1]
    assert np.flatnonzero(probabilities(LOGITS, SamplingParams(temperature=1, top_p=0.45))).tolist() == [1, 3]


@pytest.mark.parametrize(
    ("min_p", "kept"), [(0.1, [0, 1, 2, 3, 4]), (0.2, [0, 1, 3, 4]), (0.5, [1, 3, 4]), (1.0, [1, 3])]
)
def test_min_p_compares_with_the_best(min_p: float, kept: list[int]) -> None:
    probs = probabilities(LOGITS, SamplingParams(temperature=1, min_p=min_p))
    assert np.flatnonzero(probs).tolist() == kept


def test_temperature_comes_before_min_p_and_top_p() -> None:
    """Flattened by temperature 4 every token is above half of the best; at temperature 1 two are not."""
    flat = probabilities(LOGITS, SamplingParams(temperature=4, min_p=0.5))
    assert np.count_nonzero(flat) == 5
    assert np.count_nonzero(probabilities(LOGITS, SamplingParams(temperature=4, top_p=0.7))) == 4


_rows = st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40)


@settings(deadline=None)
@given(
    _rows,
    st.floats(0.05, 5),
    st.integers(0, 45),
    st.floats(0.01, 1),
    st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_any_parameters_give_a_distribution_that_keeps_the_best(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, point: float
) -> None:
    logits = np.array(row, np.float32)
    probs = probabilities(logits, SamplingParams(None, temperature, top_k, top_p, min_p))
    assert np.isfinite(probs).all() and (probs >= 0).all() and abs(probs.sum() - 1) < 1e-9
    assert probs[logits.argmax()] == probs.max()
    assert not 0 < top_k < np.count_nonzero(probs)
    assert probs[draw(probs, point)] > 0


@settings(deadline=None)
@given(st.lists(st.sampled_from([-1.5, 0.0, -0.0, 2.0, 3.0, -np.inf]), min_size=1, max_size=30), st.data())
def test_best_ranks_by_logit_then_id(row: list[float], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(row)))
    expected = sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
    assert best(np.array(row, np.float32), count).tolist() == expected


def test_top_p_looks_as_far_as_it_must() -> None:
    logits = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    exact = softmax(logits)
    ranked = np.argsort(-logits, kind="stable")
    for top_p in (0.01, 0.5, 0.9, 0.999):
        probs = probabilities(logits, SamplingParams(temperature=1, top_p=top_p))
        count = int(np.searchsorted(np.cumsum(exact[ranked]), top_p)) + 1
        assert sorted(np.flatnonzero(probs)) == sorted(ranked[:count])


def test_draw_never_gives_a_token_without_share() -> None:
    probs = np.array([0, 0.5, 0, 0.5, 0])
    points = [0.0, np.nextafter(0.5, 0), 0.5, np.nextafter(1, 0), 1.0]
    assert [draw(probs, point) for point in points] == [1, 1, 3, 3, 3]


def test_draw_takes_weights_that_do_not_sum_to_one() -> None:
    assert [draw(np.array([1.0, 3.0]), point) for point in (0.0, 0.24, 0.26, 0.99)] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "params",
    [
        HOT,
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.3, top_k=3),
        SamplingParams(temperature=1, top_p=0.8),
        SamplingParams(temperature=1, min_p=0.4),
    ],
)
def test_tokens_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over positions of one stream and over streams at one position; fixed seeds, so no flakes."""
    expected = probabilities(LOGITS, params)
    for keys, positions in (
        ([RandomKey(11, 0)] * 4000, range(4000)),
        ([RandomKey(11, i) for i in range(4000)], [5] * 4000),
        ([RandomKey(i, 0) for i in range(4000)], [5] * 4000),
    ):
        tokens = [draw(expected, uniform(key, at)) for key, at in zip(keys, positions, strict=True)]
        counts = np.bincount(tokens, minlength=len(LOGITS))
        kept = expected > 0
        assert counts[~kept].sum() == 0
        assert chisquare(counts[kept], expected[kept] * 4000).pvalue > 1e-3


def test_the_test_above_would_see_a_wrong_distribution() -> None:
    tokens = [draw(softmax(LOGITS, 1.15), uniform(RandomKey(11, 0), at)) for at in range(4000)]
    assert chisquare(np.bincount(tokens, minlength=5), softmax(LOGITS) * 4000).pvalue < 1e-3


def test_uniform_is_uniform_and_independent_of_its_neighbours() -> None:
    points = np.array([uniform(RandomKey(5, 1), at) for at in range(4000)])
    assert kstest(points, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(points[:-1], points[1:])[0, 1]) < 0.05
    other = np.array([uniform(RandomKey(5, 2), at) for at in range(4000)])
    assert abs(np.corrcoef(points, other)[0, 1]) < 0.05


def philox(counter: list[int], key: list[int]) -> int:
    """The first output word of Philox-4x64-10, from the paper (Salmon et al. 2011)."""
    c, k = list(counter), list(key)
    for _ in range(10):
        (high0, low0), (high1, low1) = (
            divmod(0xD2E7470EE14C6C93 * c[0], 2**64),
            divmod(0xCA5A826395121157 * c[2], 2**64),
        )
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B97F4A7C15) % 2**64, (k[1] + 0xBB67AE8584CAA73B) % 2**64]
    return c[0]


@pytest.mark.parametrize(("seed", "stream", "position"), [(0, 0, 0), (2**64 - 1, 7, 123456), (42, 0, 1)])
def test_uniform_is_philox_so_seeds_mean_the_same_everywhere(seed: int, stream: int, position: int) -> None:
    word = philox([1, position, 0, 0], [seed, stream])  # numpy counts up before its first block
    assert uniform(RandomKey(seed, stream), position) == (word >> 11) * 2.0**-53


def test_places_differ() -> None:
    places = {(seed, stream, at) for seed in (0, 1, 2**63) for stream in (0, 1, 9) for at in (0, 1, 2, 500)}
    assert len({uniform(RandomKey(seed, stream), at) for seed, stream, at in places}) == len(places)


@settings(deadline=None)
@given(st.permutations(range(5)), st.integers(0, 5))
def test_a_row_does_not_depend_on_the_batch(order: list[int], count: int) -> None:
    rng = np.random.default_rng(3)
    logits = rng.standard_normal((5, 30)).astype(np.float32)
    params = [
        SamplingParams(),
        HOT,
        SamplingParams(temperature=2, top_k=4),
        SamplingParams(temperature=1, top_p=0.5),
        HOT,
    ]
    keys = [RandomKey(1, i) for i in range(5)]
    alone = [sample_one(logits[i], params[i], keys[i], 10 + i) for i in range(5)]
    chosen = order[:count]
    together = sample(logits[chosen], [Row(params[i], keys[i], 10 + i) for i in chosen])
    assert together == [Sampled(alone[i]) for i in chosen]


def test_logits_are_not_changed() -> None:
    logits = LOGITS[None].copy()
    params = SamplingParams(temperature=0.5, top_k=2, top_p=0.9, min_p=0.1, logprobs=3, logit_bias={1: -9.0})
    sample(logits, [Row(params, RandomKey(0, 0), 0, new_token_state(params, 1))])
    assert (logits == LOGITS).all()


@pytest.mark.parametrize("params", [SamplingParams(), HOT])
@pytest.mark.parametrize(
    ("row", "found"),
    [
        ([0, np.nan, 1], "1 NaN, 0 \\+inf, 0 -inf of 3"),
        ([0, np.inf, np.inf], "0 NaN, 2 \\+inf, 0 -inf of 3"),
        ([-np.inf] * 3, "0 NaN, 0 \\+inf, 3 -inf of 3"),
    ],
)
def test_a_broken_row_is_an_error_of_its_own(params: SamplingParams, row: list[float], found: str) -> None:
    logits = np.array([[0, 5, 1], row, [7, 5, 1]], np.float32)
    [whole] = greedy_rows(1)
    first, broken, last = sample(logits, [whole, Row(params, RandomKey(0, 0), 6), whole])
    assert (first, last) == (Sampled(1), Sampled(0))
    assert isinstance(broken, ExecutionError)
    with pytest.raises(ExecutionError, match=f"logits: expected finite numbers, got {found} at position 6"):
        raise broken


def test_no_rows_no_tokens() -> None:
    assert sample(np.zeros((0, 5), np.float32), []) == []


@settings(deadline=None)
@given(
    st.lists(st.floats(-40, 40, width=32), min_size=1, max_size=30),
    st.sampled_from([0, 1500, -1500]),
    st.integers(0, 20),
)
def test_logprobs_are_those_of_the_model_whatever_is_done_to_logits(
    row: list[float], offset: int, count: int
) -> None:
    logits = np.array(row, np.float32) + np.float32(offset)
    expected = log_softmax(logits.astype(np.float64))
    ranked = sorted(range(len(row)), key=lambda token: (-logits[token], token))
    least = int(logits.argmin())
    params = SamplingParams(None, 3.0, top_k=1, logprobs=count, logit_bias={least: 100})
    [chosen] = sample(logits[None], [Row(params, RandomKey(0, 0), 5, new_token_state(params, 1))])
    assert isinstance(chosen, Sampled)
    biased = logits + np.float32(100) * (np.arange(len(row)) == least)
    assert chosen.token_id == int(biased.argmax())
    assert np.isclose(chosen.logprob or 0, expected[chosen.token_id], rtol=1e-12, atol=1e-12)
    assert [token for token, _ in chosen.top_logprobs] == ranked[:count]
    assert np.allclose(
        [lp for _, lp in chosen.top_logprobs], expected[ranked[:count]], rtol=1e-12, atol=1e-12
    )


def test_logprobs_come_only_where_asked_for() -> None:
    logits = LOGITS[None]
    key = RandomKey(0, 0)

    def one(params: SamplingParams) -> Sampled:
        [chosen] = sample(logits, [Row(params, key, 0)])
        assert isinstance(chosen, Sampled)
        return chosen

    assert one(SamplingParams()) == Sampled(1, None, ())
    plain = one(SamplingParams(logprobs=0))
    assert plain.logprob == pytest.approx(math.log(0.3), abs=1e-6) and plain.top_logprobs == ()
    ranked = one(SamplingParams(temperature=1, best_of=2))
    assert ranked.logprob == pytest.approx(float(LOGITS[ranked.token_id]), abs=1e-6)
    assert [token for token, _ in one(SamplingParams(logprobs=20)).top_logprobs] == [1, 3, 4, 0, 2]


def test_logprobs_of_a_masked_token_are_minus_infinity() -> None:
    logprobs = log_probabilities(np.array([0, -np.inf, 0], np.float32))
    assert logprobs.tolist() == [pytest.approx(math.log(0.5)), -math.inf, pytest.approx(math.log(0.5))]


def test_prompt_logprobs_are_of_the_token_after_each_row() -> None:
    logits = np.random.default_rng(1).standard_normal((3, 12)).astype(np.float32) * 5
    expected = log_softmax(logits.astype(np.float64), axis=-1)
    logits[1, 4] = np.nan
    first, broken, last = prompt_logprobs(logits, [7, 0, 11], 2)
    for row, token, result in ((0, 7, first), (2, 11, last)):
        assert isinstance(result, Sampled) and result.token_id == token
        assert result.logprob == pytest.approx(expected[row, token], rel=1e-12)
        assert [i for i, _ in result.top_logprobs] == np.argsort(-expected[row])[:2].tolist()
    assert isinstance(broken, ExecutionError) and "1 NaN" in str(broken)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_everything_masked_is_an_error_of_its_own(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=1)
    state = new_token_state(params, 1, range(5))
    row = Row(params, RandomKey(0, 0), 6, state)
    broken, whole = sample(np.stack([LOGITS, LOGITS]), [row, *greedy_rows(1)])
    assert whole == Sampled(1)
    assert isinstance(broken, ExecutionError)
    assert str(broken).startswith("logits: expected a token that may follow at position 6, got none")
