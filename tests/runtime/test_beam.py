"""Beam search against exhaustive search and a plain search by hand; beams sampled without replacement."""

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_runner import VOCAB_SIZE, logits_of
from numpy.typing import NDArray

from octavo.compiler.errors import RequestError
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

Make = Callable[..., Engine]

PROMPT = [5, 6, 7, 8, 9]


def logprobs_of(history: list[int]) -> NDArray[np.float64]:
    logits = logits_of(history).astype(np.float64)
    result: NDArray[np.float64] = logits - np.log(np.exp(logits).sum())
    return result


def search(prompt: list[int], width: int, count: int) -> list[tuple[list[int], float]]:
    """Beam search without end tokens, from its definition: keep the `width` best of all continuations."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    for _ in range(count):
        grown = []
        for tokens, total in beams:
            logprobs = logprobs_of(prompt + tokens)
            grown += [([*tokens, token], total + logprobs[token]) for token in range(VOCAB_SIZE)]
        beams = sorted(grown, key=lambda beam: -beam[1])[:width]
    return beams


def only(allowed: list[int]) -> dict[int, float]:
    """A bias that leaves these tokens, in effect, alone."""
    return {token: -100.0 for token in range(VOCAB_SIZE) if token not in allowed}


def run(engine: Engine, params: SamplingParams, prompt: list[int] = PROMPT) -> list[tuple[list[int], float]]:
    (completion,) = engine.generate([prompt], params)
    engine.scheduler.check()
    assert engine.memory.pool.num_free == engine.memory.pool.capacity
    return [(list(answer.token_ids), answer.score or 0.0) for answer in completion.answers]


@pytest.mark.parametrize("width", [1, 2, 8])
@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_beams_are_those_of_the_definition(
    make_engine: Make, width: int, windows: tuple[int | None, ...]
) -> None:
    params = SamplingParams(beam_width=width, n=width, max_tokens=6, length_penalty=0.0)
    engine = make_engine(num_pages=150, windows=windows)
    wanted = search(PROMPT, width, 6)
    found = run(engine, params)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert [score for _, score in found] == pytest.approx([total for _, total in wanted])
    assert engine.stats.computed_tokens <= len(PROMPT) + width * 5


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_a_width_that_covers_the_space_is_exhaustive_search(make_engine: Make, length_penalty: float) -> None:
    """Three tokens, one of which ends: all 15 sequences of at most 3 tokens are ranked."""
    end, allowed = 2, [0, 1, 2]
    bias = only(allowed)

    def score(tokens: tuple[int, ...]) -> float:
        total, history = 0.0, list(PROMPT)
        for token in tokens:
            logits = logits_of(history).astype(np.float64)
            for other, value in bias.items():
                logits[other] += value
            total += logits[token] - np.log(np.exp(logits).sum())
            history.append(token)
        return float(total / len(tokens) ** length_penalty)

    space = [(end,), *((a, end) for a in (0, 1))]
    space += [(a, b, c) for a, b, c in itertools.product((0, 1), (0, 1), allowed)]
    wanted = sorted(space, key=score, reverse=True)
    params = SamplingParams(
        beam_width=15, n=15, max_tokens=3, stop_token_ids=(end,), logit_bias=bias,
        length_penalty=length_penalty, early_stopping="never",
    )  # fmt: skip
    found = run(make_engine(num_pages=100), params)
    assert [tuple(tokens) for tokens, _ in found] == wanted
    assert [value for _, value in found] == pytest.approx([score(tokens) for tokens in wanted])


def test_early_stopping(make_engine: Make) -> None:
    best = search(PROMPT, 4, 1)
    ends = tuple(tokens[0] for tokens, _ in best[:2])
    params: dict[str, Any] = {"beam_width": 2, "n": 2, "max_tokens": 6, "stop_token_ids": ends}
    engine = make_engine(num_pages=60)
    assert [tokens for tokens, _ in run(engine, SamplingParams(**params, early_stopping=True))] == [
        [end] for end in ends
    ]
    assert engine.stats.num_steps == 1
    patient = make_engine(num_pages=60)
    run(patient, SamplingParams(**params, early_stopping="never", length_penalty=3.0))
    assert patient.stats.num_steps > 1


@pytest.mark.parametrize("num_host_pages", [0, 60])
def test_wide_beams_run_in_a_pool_that_fits_the_shared_need_only(
    make_engine: Make, num_host_pages: int
) -> None:
    """32 beams of 40 + 6 tokens: unshared they need 32 * 12 pages of 4; the pool has 10 + 32 * 3."""
    prompt = [(7 * i) % VOCAB_SIZE for i in range(40)]
    params = SamplingParams(beam_width=32, n=1, max_tokens=6)
    engine = make_engine(
        num_pages=1 + 10 + 32 * 3, max_model_len=64, num_host_pages=num_host_pages, model_batch_tokens=64
    )  # fmt: skip
    found = run(engine, params, prompt)
    assert found[0][0] == search(prompt, 32, 6)[0][0]
    assert engine.scheduler.stats.num_preemptions == 0
    assert engine.stats.computed_tokens <= 40 + 32 * 5


@pytest.mark.parametrize("num_host_pages", [0, 80])
def test_beams_survive_preemption(make_engine: Make, num_host_pages: int) -> None:
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    params = SamplingParams(beam_width=3, n=3, max_tokens=8, length_penalty=0.0)
    engine = make_engine(num_pages=17, page_size=2, num_host_pages=num_host_pages)
    for prompt, completion in zip(prompts, engine.generate(prompts, params), strict=True):
        wanted = [tokens for tokens, _ in search(prompt, 3, 8)]
        assert [list(answer.token_ids) for answer in completion.answers] == wanted
    assert engine.scheduler.stats.num_preemptions > 0
    assert (engine.scheduler.stats.num_swaps > 0) == (num_host_pages > 0)


def test_a_pool_too_small_for_the_beams_ends_the_request_with_a_reason(make_engine: Make) -> None:
    engine = make_engine(num_pages=13, page_size=2)
    with pytest.raises(Exception, match="alone in the pool: raise num_pages"):
        engine.generate([[1, 2, 3]], SamplingParams(beam_width=8, max_tokens=8))
    assert engine.memory.pool.num_free == engine.memory.pool.capacity
    with pytest.raises(RequestError, match="within the pool's"):
        engine.generate([[1, 2, 3]], SamplingParams(beam_width=12, max_tokens=20))


def test_sampled_beams_are_draws_without_replacement(make_engine: Make) -> None:
    """The first of k is a plain sample; the set has the inclusion probabilities of draws one after another."""
    allowed = [0, 1, 2]
    bias = only(allowed)
    logits = np.array([logits_of(PROMPT)[token] for token in allowed], np.float64)
    p = np.exp(logits - logits.max())
    p /= p.sum()
    draws = 1500
    first: Counter[int] = Counter()
    pairs: Counter[tuple[int, ...]] = Counter()
    engine = make_engine()
    for seed in range(draws):
        params = SamplingParams(beam_width=2, n=2, max_tokens=1, temperature=1.0, seed=seed, logit_bias=bias)
        tokens = [own[0] for own, _ in run(engine, params)]
        assert len(set(tokens)) == 2
        first[tokens[0]] += 1
        pairs[tuple(tokens)] += 1
    for token in allowed:
        assert abs(first[token] / draws - p[token]) < 5 * np.sqrt(p[token] * (1 - p[token]) / draws)
    for one, two in itertools.permutations(allowed, 2):
        wanted = p[one] * p[two] / (1 - p[one])
        assert abs(pairs[one, two] / draws - wanted) < 5 * np.sqrt(wanted * (1 - wanted) / draws) + 1e-9


def test_sampled_beams_of_several_tokens_are_distinct_and_reproducible(make_engine: Make) -> None:
    params = SamplingParams(
        beam_width=5, n=5, max_tokens=6, temperature=1.0, seed=4, stop_token_ids=(1, 2, 3)
    )
    found = run(make_engine(num_pages=80), params)
    assert len({tuple(tokens) for tokens, _ in found}) == 5
    assert run(make_engine(num_pages=80), params) == found
    scores = [score for _, score in found]
    assert scores == sorted(scores, reverse=True)
