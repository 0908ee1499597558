"""Several answers whose pages were taken are computed again in the pages that one request may have."""

import random

import pytest

from octavo.compiler.errors import RequestError
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.prefix_cache import SHARED_KEY
from octavo.runtime.request import Branch, Request
from octavo.runtime.sampler import Sampled
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler


def make_scheduler(
    num_pages: int, page_size: int, windows: tuple[int | None, ...], has_cache: bool
) -> Scheduler:
    memory = PagedMemory(num_pages, page_size, windows, use_prefix_cache=has_cache)
    return Scheduler(memory, max_model_len=64, max_batch_tokens=8, max_requests=4)


def add(
    scheduler: Scheduler,
    prompt: list[int],
    params: SamplingParams,
    priority: int = 0,
    max_len: int | None = None,
) -> Request:
    branch = Branch(0, list(prompt), scheduler.memory.new_table(SHARED_KEY))
    max_len = max_len or scheduler.max_len(len(prompt), params)
    request = Request(-priority, len(prompt), params, max_len, [branch], priority=priority)
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, rng: random.Random) -> None:
    chunks = scheduler.schedule()
    scheduler.check()
    sampled = []
    for chunk in chunks:
        if chunk.is_sampled:
            request = chunk.request
            is_forking = len(request.branches) == 1 and len(chunk.branch.tokens) == request.prompt_len
            sampled.append(
                [Sampled(rng.randrange(2)) for _ in range(request.num_branches if is_forking else 1)]
            )
    scheduler.commit(chunks, sampled)
    scheduler.check()


def smallest_pool(
    page_size: int, windows: tuple[int | None, ...], prompt_len: int, params: SamplingParams
) -> int:
    for num_pages in range(2, 200):
        try:
            make_scheduler(num_pages, page_size, windows, False).max_len(prompt_len, params)
        except RequestError:
            continue
        return num_pages
    raise AssertionError("no pool is large enough")


@pytest.mark.parametrize("has_cache", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 4), (6,), (None, 4, 4)])
def test_answers_computed_again_fit_the_pool_they_were_admitted_to(
    windows: tuple[int | None, ...], has_cache: bool
) -> None:
    rng = random.Random(1)
    num_preempted = 0
    for _ in range(30):
        page_size, prompt = rng.choice([1, 2, 4]), [rng.randrange(2) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(max_tokens=rng.randint(2, 14), n=rng.choice([2, 3]), temperature=1.0)
        num_pages = smallest_pool(page_size, windows, len(prompt), params)
        scheduler = make_scheduler(num_pages, page_size, windows, has_cache)
        request = add(scheduler, prompt, params)
        for _ in range(rng.randint(0, 8)):
            step(scheduler, rng)
        other = [rng.randrange(2) for _ in range(rng.randint(1, len(prompt)))]
        add(scheduler, other, SamplingParams(max_tokens=rng.randint(1, params.max_tokens or 1)), priority=-1)
        while scheduler.requests:
            step(scheduler, rng)
        assert request.error is None, (request.error, page_size, num_pages)
        assert scheduler.memory.pool.num_free == scheduler.memory.pool.capacity
        num_preempted += scheduler.stats.num_preemptions
    assert num_preempted > 5


@pytest.mark.parametrize("num_pages", (5, 7, 9, 12))
def test_what_gave_way_to_a_request_that_fails_in_the_same_step_runs_instead(num_pages: int) -> None:
    for delay in range(14):
        scheduler, rng = make_scheduler(num_pages, 4, (None,), False), random.Random(0)
        two = SamplingParams(max_tokens=30, n=2, temperature=1.0)
        tall = add(scheduler, [1, 2, 3, 4], two, priority=-1, max_len=64)
        for _ in range(delay):
            step(scheduler, rng)
        short = add(scheduler, [5, 6, 7], SamplingParams(max_tokens=8))
        while scheduler.requests:
            step(scheduler, rng)
        assert tall.finish_reason == "error" and "alone in the pool" in str(tall.error)
        assert short.finish_reason == "length" and scheduler.memory.pool.num_free == num_pages - 1
