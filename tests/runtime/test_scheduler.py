from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.compiler.errors import RequestError
from octavo.runtime.engine import Engine
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.prefix_cache import SHARED_KEY
from octavo.runtime.recovery import recover
from octavo.runtime.request import Branch, Request, Status
from octavo.runtime.sampler import Sampled
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler

Make = Callable[..., Engine]
Greedy = Callable[..., list[int]]


def make_scheduler(num_pages: int = 9, page_size: int = 4, **options: Any) -> Scheduler:
    given = {"max_model_len": 64, "max_batch_tokens": 8, "max_requests": 4, **options}
    return Scheduler(PagedMemory(num_pages, page_size, use_prefix_cache=False), **given)


def add(scheduler: Scheduler, request_id: int, prompt_len: int, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens)
    max_len = scheduler.max_len(prompt_len, params)
    branch = Branch(0, list(range(1, prompt_len + 1)), scheduler.memory.new_table(SHARED_KEY))
    request = Request(request_id, prompt_len, params, max_len, [branch])
    scheduler.add(request)
    return request


def step(scheduler: Scheduler, token: int = 7) -> list[tuple[int, int, int]]:
    """One step; (request, start, length) of each chunk."""
    chunks = scheduler.schedule()
    scheduler.check()
    shown = [(chunk.request.request_id, chunk.start, chunk.length) for chunk in chunks]
    scheduler.commit(chunks, [[Sampled(token)] for chunk in chunks if chunk.is_sampled])
    scheduler.check()
    return shown


def test_a_long_prompt_is_spread_over_steps_and_decodes_go_first() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 3, 8)
    assert step(scheduler) == [(0, 0, 3)]
    add(scheduler, 1, 17, 1)
    assert step(scheduler) == [(0, 3, 1), (1, 0, 7)]
    assert step(scheduler) == [(0, 4, 1), (1, 7, 7)]
    assert step(scheduler) == [(0, 5, 1), (1, 14, 3)]
    assert step(scheduler) == [(0, 6, 1)]


def test_without_chunks_a_prompt_waits_for_a_step_with_room() -> None:
    scheduler = make_scheduler(chunked_prefill=False)
    add(scheduler, 0, 3, 3)
    add(scheduler, 1, 8, 1)
    add(scheduler, 2, 1, 1)
    assert step(scheduler) == [(0, 0, 3)], "request 1 needs the whole step; request 2 may not overtake it"
    assert step(scheduler) == [(0, 3, 1)]
    assert step(scheduler) == [(0, 4, 1)]
    assert step(scheduler) == [(1, 0, 8)]
    assert step(scheduler) == [(2, 0, 1)]


def test_first_come_first_served_and_at_most_max_requests() -> None:
    scheduler = make_scheduler(max_requests=2)
    for request_id in range(3):
        add(scheduler, request_id, 1, 2)
    assert step(scheduler) == [(0, 0, 1), (1, 0, 1)]
    assert step(scheduler) == [(0, 1, 1), (1, 1, 1)]
    assert step(scheduler) == [(2, 0, 1)]


def test_the_youngest_gives_way_and_is_computed_again() -> None:
    scheduler = make_scheduler(num_pages=5)  # 4 pages of 4 tokens
    old, young = add(scheduler, 0, 4, 10), add(scheduler, 1, 4, 6)
    assert step(scheduler) == [(0, 0, 4), (1, 0, 4)]
    for position in range(4, 8):
        assert step(scheduler) == [(0, position, 1), (1, position, 1)]
    assert step(scheduler) == [(0, 8, 1)], "the old one needs a third page"
    assert (
        young.status is Status.WAITING
        and young.branches[0].table.is_empty
        and scheduler.stats.num_preemptions == 1
    )
    while old.status is not Status.FINISHED:
        assert step(scheduler)[0][0] == 0
    assert step(scheduler) == [(1, 0, 8)], "its prompt and the tokens it had generated"
    assert young.branches[0].tokens == [1, 2, 3, 4, 7, 7, 7, 7, 7]
    step(scheduler)
    assert young.finish_reason == "length" and len(young.branches[0].tokens) == 10
    assert scheduler.memory.pool.num_free == 4


def test_a_preempted_request_keeps_its_place_before_later_ones() -> None:
    scheduler = make_scheduler(num_pages=4, max_batch_tokens=16)
    add(scheduler, 0, 4, 9)
    add(scheduler, 1, 4, 3)
    add(scheduler, 2, 8, 1)
    order = []
    while scheduler.requests:
        order += [request_id for request_id, start, _ in step(scheduler) if start == 0]
    assert scheduler.stats.num_preemptions > 0
    assert order == sorted(order), "no one overtakes"


def test_an_interrupted_step_is_simply_run_again() -> None:
    scheduler = make_scheduler()
    add(scheduler, 0, 4, 5)
    first = scheduler.schedule()
    assert scheduler.schedule() == first
    step(scheduler)
    assert [(c.start, c.length) for c in scheduler.schedule()] == [(4, 1)]
    assert step(scheduler) == [(0, 4, 1)]


def test_what_can_never_run_is_refused() -> None:
    scheduler = make_scheduler(num_pages=5, max_model_len=30)
    assert (
        scheduler.max_len(10, SamplingParams(max_tokens=7)) == 17
        and scheduler.max_len(16, SamplingParams(max_tokens=None)) == 17
    )
    with pytest.raises(
        RequestError, match=r"within the pool's 17 tokens \(4 pages of 4\), got a prompt of 17; raise"
    ):
        scheduler.max_len(17, SamplingParams(max_tokens=None))
    with pytest.raises(
        RequestError, match=r"within the pool's 17 tokens .* got a prompt of 10 and max_tokens 8"
    ):
        scheduler.max_len(10, SamplingParams(max_tokens=8))
    with pytest.raises(RequestError, match=r"within the model's 30 tokens, got a prompt of 30; shorten"):
        scheduler.max_len(30, SamplingParams(max_tokens=None))
    with pytest.raises(
        RequestError, match=r"within the model's 30 tokens, got a prompt of 3 and max_tokens 28"
    ):
        scheduler.max_len(3, SamplingParams(max_tokens=28))
    with pytest.raises(RequestError, match=r"at most 8 tokens \(one step\) without chunked prefill, got 9"):
        make_scheduler(chunked_prefill=False).max_len(9, SamplingParams(max_tokens=1))


def test_the_longest_request_that_fits_runs_alone_to_its_end() -> None:
    scheduler = make_scheduler(num_pages=5)
    request = add(scheduler, 0, 9, 8)
    while scheduler.requests:
        step(scheduler)
    assert (
        len(request.branches[0].tokens) == scheduler.capacity_tokens == 17
        and scheduler.stats.num_preemptions == 0
    )


def test_finishing_in_any_state_returns_the_pages() -> None:
    scheduler = make_scheduler(num_pages=4, max_batch_tokens=16)
    requests = [add(scheduler, i, 4, 9) for i in range(4)]
    for _ in range(5):
        step(scheduler)
    assert {r.status for r in requests} == {
        Status.RUNNING,
        Status.WAITING,
    } and scheduler.stats.num_preemptions > 0
    for request in requests:
        scheduler.finish(request, "abort")
        scheduler.check()
    assert scheduler.memory.pool.num_free == 3 and all(r.finish_reason == "abort" for r in requests)


_prompts = st.lists(
    st.tuples(st.lists(st.integers(0, 49), min_size=1, max_size=14), st.integers(1, 12), st.integers(0, 6)),
    min_size=1,
    max_size=7,
)


@settings(deadline=None, max_examples=120)
@given(
    prompts=_prompts,
    page_size=st.sampled_from([1, 2, 3, 4, 16]),
    spare_pages=st.integers(0, 6),
    budget=st.integers(1, 16),
    max_requests=st.integers(1, 8),
    is_chunked=st.booleans(),
    abort_at=st.integers(0, 12),
)
def test_whatever_the_limits_every_request_ends_with_its_own_tokens(
    make_engine: Make,
    greedy: Greedy,
    prompts: list[tuple[list[int], int, int]],
    page_size: int,
    spare_pages: int,
    budget: int,
    max_requests: int,
    is_chunked: bool,
    abort_at: int,
) -> None:
    if not is_chunked:
        budget = max(budget, max(len(prompt) for prompt, _, _ in prompts))
    need = max(-(-(len(prompt) + count - 1) // page_size) for prompt, count, _ in prompts)
    engine = make_engine(
        need + 1 + spare_pages,
        page_size,
        max_batch_tokens=budget,
        max_requests=max_requests,
        chunked_prefill=is_chunked,
    )
    answers: dict[int, list[int]] = {}
    wanted: dict[int, list[int]] = {}
    arriving = sorted(prompts, key=lambda item: item[2])
    steps = 0
    while arriving or engine.has_unfinished:
        while arriving and (arriving[0][2] <= steps or not engine.has_unfinished):
            prompt, count, _ = arriving.pop(0)
            request_id = engine.add_request(prompt, SamplingParams(max_tokens=count))
            wanted[request_id], answers[request_id] = greedy(prompt, count), []
        if steps == abort_at and engine.has_unfinished:
            aborted = next(iter(engine.scheduler.requests))
            assert engine.abort(aborted)
            del wanted[aborted], answers[aborted]
        for token in engine.step():
            assert token.token_id is not None
            answers[token.request_id].append(token.token_id)
        engine.scheduler.check()
        steps += 1
        assert steps < 2000, "no progress"
    assert answers == wanted
    assert engine.memory.pool.num_free == engine.memory.pool.capacity
    batches: list[dict[str, int]] = engine.runner.batches  # type: ignore[attr-defined]
    assert all(0 < batch["T"] <= budget and batch["R"] <= max_requests for batch in batches)


def test_no_decode_waits_for_a_long_prompt(make_engine: Make) -> None:
    engine = make_engine(num_pages=60, max_batch_tokens=8)
    short = engine.add_request([1, 2], SamplingParams(max_tokens=30))
    engine.step()
    engine.add_request(list(range(40)), SamplingParams(max_tokens=3))
    for _ in range(12):
        assert short in [token.request_id for token in engine.step()]


def test_recover_drops_lost_pages_and_ends_what_had_ended() -> None:
    scheduler = make_scheduler()
    first, second = add(scheduler, 0, 2, 1), add(scheduler, 1, 6, 4)
    chunks = scheduler.schedule()
    scheduler.memory.pool.allocate(2)  # pages on their way to nobody
    scheduler.running.reverse()
    first.branches[0].tokens.append(7)  # the token that ends it, before its end was recorded
    recover(scheduler)
    scheduler.check()
    assert (
        first.finish_reason == "length"
        and first.branches[0].table.is_empty
        and list(scheduler.requests) == [1]
    )
    assert scheduler.running == [second] and second.branches[0].table.num_tokens == 0
    assert [c.request for c in chunks] == [first, second]
    while scheduler.requests:
        step(scheduler)
    assert second.branches[0].tokens == [1, 2, 3, 4, 5, 6, 7, 7, 7, 7] and scheduler.memory.pool.num_free == 8
