"""However a request is served (cold, warm, resumed, in pieces, swapped, beside others), its tokens are the same."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

Make = Callable[..., Engine]
Greedy = Callable[..., list[int]]

WINDOWS: list[tuple[int | None, ...]] = [(None,), (None, 6), (5,), (None, 6, 6)]
PROMPTS = [list(range(1, 30)), [3, 1, 4, 1, 5], [2] * 17, [*range(1, 25), 40, 41]]


def window_of(windows: Sequence[int | None]) -> int | None:
    return None if None in windows else windows[0]


def answers(engine: Engine, prompts: Sequence[list[int]], count: int = 12) -> list[list[int]]:
    tokens = [list(c.token_ids) for c in engine.generate(prompts, SamplingParams(max_tokens=count))]
    engine.scheduler.check()
    assert engine.memory.pool.num_free == engine.memory.pool.capacity
    return tokens


@pytest.mark.parametrize("windows", WINDOWS)
def test_cold_warm_and_in_pieces(make_engine: Make, greedy: Greedy, windows: tuple[int | None, ...]) -> None:
    wanted = [greedy(prompt, 12, window=window_of(windows)) for prompt in PROMPTS]
    engine = make_engine(num_pages=120, windows=windows)
    assert answers(engine, PROMPTS) == wanted
    assert engine.scheduler.stats.hit_tokens > 0, "two prompts begin alike"
    cold = engine.scheduler.stats.hit_tokens
    assert answers(engine, PROMPTS) == wanted, "warm"
    assert engine.scheduler.stats.hit_tokens > cold + 40
    resumed = [[*prompt, *own] for prompt, own in zip(PROMPTS, wanted, strict=True)]
    again = [greedy(prompt, 12, window=window_of(windows)) for prompt in resumed]
    assert answers(engine, resumed) == again, "resumed"
    for budget in (1, 3, 16):
        other = make_engine(num_pages=120, windows=windows, max_batch_tokens=budget, prefix_caching=False)
        assert answers(other, PROMPTS) == wanted, f"in pieces of {budget}"
        assert other.scheduler.stats.hit_tokens == 0


@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("num_host_pages", [0, 5, 40])
def test_preempted_by_recompute_and_by_swap(
    make_engine: Make, greedy: Greedy, windows: tuple[int | None, ...], num_host_pages: int
) -> None:
    wanted = [greedy(prompt, 12, window=window_of(windows)) for prompt in PROMPTS]
    num_pages = 7 if windows == (5,) else 14 * len(windows)
    engine = make_engine(num_pages=num_pages, windows=windows, num_host_pages=num_host_pages)
    assert answers(engine, PROMPTS) == wanted
    stats = engine.scheduler.stats
    if windows == (5,):
        return  # a window bounds what each holds: some wait, nobody gives way
    assert stats.num_preemptions > 0
    if num_host_pages != 5:
        assert stats.num_swaps == (stats.num_preemptions if num_host_pages else 0)


def test_an_evicted_prefix_comes_back_from_host_memory(make_engine: Make, greedy: Greedy) -> None:
    engine = make_engine(num_pages=13, num_host_pages=40)
    for _ in range(2):
        for prompt in (list(range(30)), list(range(20, 50)), [7] * 30):
            assert answers(engine, [prompt], 4) == [greedy(prompt, 4)]
    assert engine.memory.num_evicted > 0
    assert engine.scheduler.stats.hit_tokens == 3 * 28, "the second round finds all full pages"


def test_salts_keep_prefixes_apart(make_engine: Make) -> None:
    engine = make_engine()
    hits = []
    for salt in (None, "a", "b", "a", None):
        engine.add_request(list(range(20)), SamplingParams(max_tokens=1), cache_salt=salt)
        while engine.has_unfinished:
            engine.step()
        hits.append(engine.scheduler.stats.hit_tokens)
    assert hits == [0, 0, 0, 16, 32]


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(
        st.tuples(
            st.sampled_from([[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 9], [5, 5]]),
            st.lists(st.integers(0, 3), max_size=6),
            st.integers(1, 9),
            st.integers(0, 3),
        ),
        min_size=1,
        max_size=7,
    ),
    windows=st.sampled_from(WINDOWS),
    page_size=st.integers(1, 4),
    spare=st.integers(0, 8),
    num_host_pages=st.sampled_from([0, 4, 40]),
    budget=st.integers(4, 16),
)
def test_whatever_is_shared_swapped_or_evicted(
    make_engine: Make,
    greedy: Greedy,
    prompts: list[tuple[list[int], list[int], int, int]],
    windows: tuple[int | None, ...],
    page_size: int,
    spare: int,
    num_host_pages: int,
    budget: int,
) -> None:
    longest = max(len(head) + len(tail) + count for head, tail, count, _ in prompts)
    need = len(windows) * (-(-longest // page_size) + 1)
    engine = make_engine(
        need + 1 + spare, page_size, windows=windows, num_host_pages=num_host_pages, max_batch_tokens=budget
    )
    wanted: dict[int, list[int]] = {}
    found: dict[int, list[int]] = {}
    steps = 0
    for head, tail, count, priority in prompts:
        prompt = head + tail
        request_id = engine.add_request(prompt, SamplingParams(max_tokens=count), priority=priority)
        wanted[request_id] = greedy(prompt, count, window=window_of(windows))
        found[request_id] = []
        for token in engine.step():
            found[token.request_id].append(token.token_id or 0)
        engine.scheduler.check()
    while engine.has_unfinished:
        for token in engine.step():
            found[token.request_id].append(token.token_id or 0)
        engine.scheduler.check()
        steps += 1
        assert steps < 1000, "no progress"
    assert found == wanted


def test_requests_run_by_priority_and_none_is_passed_over_for_ever(make_engine: Make) -> None:
    engine = make_engine(max_requests=1)
    params = SamplingParams(max_tokens=1)
    patient = engine.add_request([1], params, priority=5)
    order: list[Any] = []
    urgent = [engine.add_request([2], params, priority=1) for _ in range(70)]
    urgent.append(engine.add_request([3], params, priority=0))
    while engine.has_unfinished:
        order += [token.request_id for token in engine.step()]
    assert order[0] == urgent[-1], "the lowest number first"
    assert order.index(patient) == 64, "after 64 later ones it is its turn"
    assert [each for each in order if each in urgent[:-1]] == urgent[:-1], "equals in their order"
