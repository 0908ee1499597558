"""Several answers to one prompt: they share its pages, and each equals a request of its own."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_runner import logits_of

from octavo.compiler.errors import RequestError
from octavo.runtime.engine import Engine
from octavo.runtime.request import Status
from octavo.runtime.sampler import RandomKey, draw, probabilities, uniform
from octavo.runtime.sampling_params import SamplingParams

Make = Callable[..., Engine]

PROMPT = [5, 6, 7, 8, 9, 10]


def sampled(prompt: list[int], params: SamplingParams, branch: int) -> list[int]:
    """What an answer must be: its own stream of random numbers over the fake model, without any of the runtime."""
    tokens = list(prompt)
    assert params.seed is not None and params.max_tokens is not None
    key = RandomKey(params.seed, branch << 48)
    for _ in range(params.max_tokens):
        tokens.append(draw(probabilities(logits_of(tokens), params), uniform(key, len(tokens))))
    return tokens[len(prompt) :]


def run(engine: Engine, prompt: list[int], params: SamplingParams) -> list[list[int]]:
    (completion,) = engine.generate([prompt], params)
    engine.scheduler.check()
    assert engine.memory.pool.num_free == engine.memory.pool.capacity
    return [list(answer.token_ids) for answer in completion.answers]


@pytest.mark.parametrize("page_size", [1, 3, 4, 6])
@pytest.mark.parametrize("windows", [(None,), (None, 5)])
def test_n_answers_are_distinct_reproducible_and_share_the_prompt(
    make_engine: Make, page_size: int, windows: tuple[int | None, ...]
) -> None:
    params = SamplingParams(n=8, temperature=1.0, seed=3, max_tokens=7)
    engine = make_engine(num_pages=250, page_size=page_size, windows=windows)
    answers = run(engine, PROMPT, params)
    assert answers == [sampled(PROMPT, params, branch) for branch in range(8)]
    assert len({tuple(answer) for answer in answers}) == 8
    assert engine.stats.prompt_tokens == len(PROMPT), "the prompt is counted, and computed, once"
    assert engine.stats.computed_tokens == len(PROMPT) + 8 * 6
    assert (
        run(make_engine(page_size=page_size), PROMPT, SamplingParams(**{**vars(params), "n": 1}))
        == answers[:1]
    )


def test_only_the_partial_page_is_copied(make_engine: Make) -> None:
    engine = make_engine(num_pages=60, page_size=4)
    engine.add_request(PROMPT, SamplingParams(n=4, temperature=1.0, seed=1, max_tokens=3))
    engine.step()
    assert engine.memory.pool.capacity - engine.memory.pool.num_free == 2, "nothing is copied before a write"
    engine.scheduler.schedule()
    moves = engine.memory.moves
    assert [move.kind for move in moves] == ["copy"] * 3, "the last holder writes in place"
    assert engine.memory.pool.capacity - engine.memory.pool.num_free == 1 + 4
    assert len({move.source for move in moves}) == 1 and len({move.target for move in moves}) == 3


@pytest.mark.parametrize("num_host_pages", [0, 60])
def test_answers_survive_preemption(make_engine: Make, num_host_pages: int) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=9)
    engine = make_engine(num_pages=17, page_size=2, num_host_pages=num_host_pages)
    prompts = [PROMPT, [1, 2], [3, 4, 5]]
    completions = engine.generate(prompts, params)
    for prompt, completion in zip(prompts, completions, strict=True):
        wanted = [sampled(prompt, params, branch) for branch in range(3)]
        assert [list(answer.token_ids) for answer in completion.answers] == wanted
    assert engine.scheduler.stats.num_preemptions > 0
    assert (engine.scheduler.stats.num_swaps > 0) == (num_host_pages > 0)


def test_answers_end_on_their_own(make_engine: Make) -> None:
    free = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=9)
    long = [sampled(PROMPT, free, branch) for branch in range(4)]
    stop = long[1][4]
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=9, stop_token_ids=(stop,))
    answers = run(make_engine(), PROMPT, params)
    assert answers == [own[: own.index(stop) + 1] if stop in own else own for own in long]
    assert len(answers[1]) <= 5


def test_best_of_returns_the_most_probable_on_average(make_engine: Make) -> None:
    params = SamplingParams(n=2, best_of=6, temperature=1.5, seed=11, max_tokens=5, logprobs=0)
    engine = make_engine(num_pages=80)
    (completion,) = engine.generate([PROMPT], params)
    every = [sampled(PROMPT, params, branch) for branch in range(6)]
    means = []
    for own in every:
        history, total = list(PROMPT), 0.0
        for token in own:
            logits = logits_of(history).astype(np.float64)
            total += logits[token] - np.log(np.exp(logits).sum())
            history.append(token)
        means.append(total / len(own))
    order = np.argsort(-np.array(means))[:2]
    assert [list(answer.token_ids) for answer in completion.answers] == [every[place] for place in order]
    assert [answer.score for answer in completion.answers] == pytest.approx([means[place] for place in order])
    assert completion.answers[0].logprobs is not None and len(completion.answers[0].logprobs) == 5
    streamed = [
        [
            token.token_id
            for token in make_engine(num_pages=80).stream([PROMPT], params)
            if token.branch == rank
        ]
        for rank in range(2)
    ]
    assert streamed == [list(answer.token_ids) for answer in completion.answers]


def test_streams_tell_answers_apart(make_engine: Make) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=4)
    seen: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for token in make_engine().stream([PROMPT], params):
        seen[token.branch].append(token.token_id)
    assert list(seen.values()) == [sampled(PROMPT, params, branch) for branch in range(3)]


def test_aborting_takes_back_all_answers(make_engine: Make) -> None:
    engine = make_engine()
    request_id = engine.add_request(PROMPT, SamplingParams(n=3, temperature=1.0, max_tokens=9))
    engine.step()
    engine.step()
    request = engine.scheduler.requests[request_id]
    assert engine.abort(request_id) and request.status is Status.FINISHED
    engine.scheduler.check()
    assert engine.memory.pool.num_free == engine.memory.pool.capacity


def test_more_answers_than_sequences_may_run_are_refused(make_engine: Make) -> None:
    with pytest.raises(RequestError, match=r"n: expected at most 2 sequences \(max_requests\), got 3"):
        make_engine(max_requests=2).generate([[1]], SamplingParams(n=3, temperature=1.0, max_tokens=1))
    with pytest.raises(RequestError, match=r"in 8 sequences; raise num_pages"):
        make_engine(num_pages=9).generate([[1]], SamplingParams(n=8, temperature=1.0, max_tokens=9))


def test_prompt_logprobs_are_those_of_every_position(make_engine: Make) -> None:
    prompt = list(range(3, 23))
    engine = make_engine(max_batch_tokens=7)
    params = SamplingParams(max_tokens=2, prompt_logprobs=2, logprobs=1)
    for _ in range(2):
        (completion,) = engine.generate([prompt], params)
        report = completion.prompt_logprobs
        assert report is not None and [each.token_id for each in report] == prompt[1:]
        for place, each in enumerate(report):
            logits = logits_of(prompt[: place + 1]).astype(np.float64)
            logprobs = logits - np.log(np.exp(logits).sum())
            assert each.logprob == pytest.approx(logprobs[each.token_id])
            assert [token for token, _ in each.top_logprobs] == np.argsort(-logits)[:2].tolist()
    assert engine.scheduler.stats.hit_tokens == 0, "a cached prompt is computed again"
