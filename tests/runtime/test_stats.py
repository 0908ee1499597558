"""Live figures against books kept by hand, and the text for Prometheus read back by its own client."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.runtime.chunk import Chunk
from octavo.runtime.engine import Engine
from octavo.runtime.kv_cache import PageState
from octavo.runtime.paged_memory import PagedMemory, PageTable
from octavo.runtime.prefix_cache import SHARED_KEY
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.stats import EngineStats, Snapshot, prometheus_text, slots

MakeEngine = Callable[..., Engine]


def counted_slots(memory: PagedMemory, tables: Sequence[PageTable]) -> tuple[int, int]:
    """(held, needed), slot by slot: the token at position p attends to p - window + 1 : p + 1."""
    pages: set[int] = set()
    needed: set[tuple[int, int]] = set()
    for table in tables:
        for window, row in zip(memory.windows, table.groups, strict=True):
            pages |= set(row) - {0}
            for position in range(table.num_tokens):
                if window is None or position > table.num_tokens - window:
                    needed.add((row[position // memory.page_size], position % memory.page_size))
    return len(pages) * memory.page_size, len(needed)


def running_tables(engine: Engine) -> list[PageTable]:
    return [branch.table for request in engine.scheduler.running for branch in request.branches]


@pytest.mark.parametrize("windows", [(None,), (None, 6), (5,)])
def test_slots_of_mixed_traffic(make_engine: MakeEngine, windows: tuple[int | None, ...]) -> None:
    engine = make_engine(70, 4, windows=windows)
    random = np.random.default_rng(1)
    start = random.integers(1, 50, 13).tolist()
    for params in (
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=7, temperature=1.0, n=3, seed=1),
        SamplingParams(max_tokens=8, beam_width=3),
        SamplingParams(max_tokens=5),
    ):
        engine.add_request([*start, *random.integers(1, 50, 9).tolist()], params)
    wastes = []
    while engine.has_unfinished:
        engine.step()
        now = engine.snapshot()
        assert (now.held_slots, now.needed_slots) == counted_slots(engine.memory, running_tables(engine))
        assert now.held_slots == now.held_pages * 4
        wastes.append(now.waste)
    assert len(set(wastes)) > 5 and wastes[-1] == 0.0


def test_slots_of_a_page_that_one_needs_in_part_and_another_whole() -> None:
    memory = PagedMemory(20, 4, (6,))
    tables = [memory.new_table(SHARED_KEY) for _ in range(2)]
    tokens = list(range(12))
    for table, length in zip(tables, (8, 12), strict=True):
        memory.admit(table, tokens[:length], SHARED_KEY)
        memory.reserve(table, length)
        memory.commit(table, tokens[:length], length)
    # Next positions 8 and 12 reach back to 3 and 7: the first needs page 1 whole, the second its last slot.
    assert tables[0].groups[0][1] == tables[1].groups[0][1]
    assert slots(memory, tables) == counted_slots(memory, tables) == (12, 9)
    assert slots(memory, tables[::-1]) == (12, 9)


def test_counts_of_a_pool_that_is_too_small(make_engine: MakeEngine) -> None:
    """4 requests of 10 + 12 tokens in 11 pages of 4: two run, and one of them gives way."""
    engine = make_engine(12, 4, num_host_pages=2, prefix_caching=False)
    before = engine.snapshot()
    assert (before.waste, before.hit_rate, before.generated_per_second) == (0.0, 0.0, 0.0)
    for index in range(4):
        engine.add_request(list(range(index, index + 10)), SamplingParams(max_tokens=12))
    engine.step()
    first = engine.snapshot()
    assert (first.num_running, first.num_waiting, first.num_swapped) == (2, 2, 0)
    assert first.pages == {
        PageState.NULL: 1, PageState.CLEAN: 5, PageState.CACHED: 0, PageState.PRIVATE: 6, PageState.SHARED: 0,
    }  # fmt: skip
    assert (first.held_slots, first.needed_slots) == (24, 16), "16 tokens a step: 10 and 6 of the next"
    assert (first.prefill_tokens, first.generated_tokens, first.num_steps) == (16, 1, 1)
    while engine.has_unfinished:
        engine.step()
    last = engine.snapshot()
    assert last.num_preemptions > 0 and last.num_swaps == 0, "2 host slots hold no request"
    assert last.generated_tokens == 48 and last.seconds > first.seconds
    later = last.since(first)
    assert (later.generated_tokens, later.prefill_tokens) == (47, last.prefill_tokens - 16)
    assert later.generated_per_second == pytest.approx(47 / (last.seconds - first.seconds))


def test_tokens_computed_again_are_prefill_too(make_engine: MakeEngine) -> None:
    engine, stats = make_engine(), EngineStats()
    engine.add_request(list(range(10)))
    request = engine.scheduler.requests[0]
    pieces = ((0, 9), (9, 1), (10, 1), (12, 5))  # all but the third, a token that was generated
    stats.count_chunks([Chunk(request, request.branches[0], *each) for each in pieces])
    assert (stats.computed_tokens, stats.prefill_tokens) == (16, 15)


def test_swapped_requests_and_host_slots(make_engine: MakeEngine) -> None:
    engine = make_engine(12, 4, num_host_pages=8, prefix_caching=False)
    for index in range(2):
        engine.add_request(list(range(index, index + 12)), SamplingParams(max_tokens=24))
    seen: list[Snapshot] = []
    while engine.has_unfinished:
        engine.step()
        seen.append(engine.snapshot())
    swapped = [each for each in seen if each.num_swapped]
    assert {(each.num_running, each.num_waiting) for each in swapped} == {(1, 0), (0, 0)}
    assert all(each.host_pages[PageState.PRIVATE] > 0 for each in swapped)
    assert sum(swapped[0].host_pages.values()) == 8
    assert seen[-1].num_swaps == seen[-1].num_preemptions > 0
    assert seen[-1].host_pages[PageState.CLEAN] == 8


def test_hits_and_evictions(make_engine: MakeEngine) -> None:
    engine = make_engine(12, 4)
    prompt, params = list(range(1, 12)), SamplingParams(max_tokens=2)
    engine.generate(prompt, params)
    assert engine.snapshot().pages[PageState.CACHED] == 3, "12 of 13 tokens are computed, the last is not"
    engine.generate(prompt, params)
    now = engine.snapshot()
    assert (now.lookup_tokens, now.hit_tokens, now.hit_rate) == (22, 8, 8 / 22)
    assert now.prefill_tokens == 11 + 3
    engine.generate(list(range(20, 30)) * 4, params)
    assert engine.snapshot().num_evictions > 0


def test_prometheus_text(make_engine: MakeEngine) -> None:
    engine = make_engine(12, 4)
    for index in range(3):
        engine.add_request(list(range(index, index + 10)), SamplingParams(max_tokens=12))
    for _ in range(3):
        engine.step()
    now = engine.snapshot()
    families = list(text_string_to_metric_families(prometheus_text(now)))
    values = {
        (sample.name, *sample.labels.values()): sample.value for each in families for sample in each.samples
    }
    assert all(each.documentation and each.type in ("gauge", "counter") for each in families)
    assert all(each.name.startswith("octavo_") for each in families)
    counters = {sample.name for each in families if each.type == "counter" for sample in each.samples}
    assert counters == {name for name, *_ in values if name.endswith("_total")}
    for state in PageState:
        assert values["octavo_pages", state.value] == now.pages[state]
    assert values["octavo_requests", "running"] == now.num_running
    assert values["octavo_waste_ratio",] == now.waste > 0
    assert values["octavo_tokens_total", "prefill"] == now.prefill_tokens
    assert values["octavo_step_seconds_total",] == now.seconds
    assert values["octavo_page_bytes",] == 64
