"""Served in every way the runtime knows, a compiled model gives the same tokens in fp32: cold, warm, resumed, in
pieces, swapped out and in, computed again, forked."""

import numpy as np
import pytest
from zoo import build

import octavo
from octavo.compiler.compiled import Compiled
from octavo.compiler.models import load_model
from octavo.runtime.engine import Engine

LENGTH = 9
# Two fp32 sums in other orders differ by a few units in the last place, and 30 layers add up.
LOGPROB_BOUND = 2e-3

Prompts = list[list[int]]


HEAD = [31, 7, 101, 55, 2, 90, 64, 12, 3, 77, 18, 41, 6, 99, 23, 87, 5, 68]
PROMPTS = [[*HEAD, 9, 4], [11, 13, 17], [*HEAD, 9, 4, 8, 120, 33], [40], [*HEAD[:9], 70, 71]]


@pytest.fixture(scope="module", params=["smollm2", "gemma3", "mistral"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    output = tmp_path_factory.mktemp("served") / request.param
    if request.param == "smollm2":
        loaded = load_model("demo")
        return octavo.compile(loaded.model, page_size=4, output=output, tokenizer=loaded.tokenizer)
    return octavo.compile(build(request.param), page_size=4, output=output)


def answers(engine: Engine, prompts: Prompts, count: int = LENGTH) -> Prompts:
    params = octavo.SamplingParams(max_tokens=count, ignore_eos=True)
    found = [list(answer.token_ids) for answer in engine.generate(prompts, params)]
    engine.scheduler.check()
    assert engine.memory.pool.num_free == engine.memory.pool.capacity
    return found


def test_tokens_are_the_same_however_they_are_served(served: Compiled) -> None:
    groups = len(served.artifact.program.page_windows)
    wanted = [answers(served.engine(prefix_caching=False), [prompt])[0] for prompt in PROMPTS]
    engine = served.engine(num_pages=100 * groups)
    assert answers(engine, PROMPTS) == wanted, "cold"
    before = engine.scheduler.stats.hit_tokens
    assert answers(engine, PROMPTS) == wanted, "warm"
    found = sum((len(prompt) - 1) // engine.memory.page_size for prompt in PROMPTS) * engine.memory.page_size
    assert engine.scheduler.stats.hit_tokens == before + found
    resumed = [[*prompt, *own[:4]] for prompt, own in zip(PROMPTS, wanted, strict=True)]
    assert answers(engine, resumed, LENGTH - 4) == [own[4:] for own in wanted], "resumed"
    assert answers(served.engine(max_batch_tokens=5), PROMPTS) == wanted, "in pieces"
    for num_host_pages in (0, 60):
        small = served.engine(num_pages=14 * groups, num_host_pages=num_host_pages, prefix_caching=False)
        assert answers(small, PROMPTS) == wanted, f"given way, {num_host_pages} host pages"
        stats = small.scheduler.stats
        assert served.artifact.program.page_windows[0] is not None or stats.num_preemptions > 0
        assert stats.num_swaps == (stats.num_preemptions if num_host_pages else 0)


def test_forked_answers_are_what_their_tokens_are_worth_alone(served: Compiled) -> None:
    """Each answer's log-probabilities are those of its whole sequence, computed in one piece by a fresh engine."""
    engine = served.engine()
    for params in (
        octavo.SamplingParams(max_tokens=8, n=3, temperature=60.0, seed=5, logprobs=0, ignore_eos=True),
        octavo.SamplingParams(max_tokens=8, beam_width=4, n=4, logprobs=0, ignore_eos=True),
    ):
        (completion,) = engine.generate([PROMPTS[0]], params)
        assert len({answer.token_ids for answer in completion.answers}) == params.n
        for answer in completion.answers:
            report = octavo.SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True)
            (alone,) = served.engine(prefix_caching=False).generate(
                [[*PROMPTS[0], *answer.token_ids]], report
            )
            assert alone.prompt_logprobs is not None and answer.logprobs is not None
            wanted = [each.logprob for each in alone.prompt_logprobs[-8:]]
            found = [each.logprob for each in answer.logprobs]
            assert np.abs(np.array(found, float) - np.array(wanted, float)).max() < LOGPROB_BOUND
