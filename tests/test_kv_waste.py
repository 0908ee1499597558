"""What benchmarks/kv_waste.py measures with: lengths of the published means, a buddy allocator, replays, forks."""

import importlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.runtime.stats import slots

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module", autouse=True)
def importable() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT)
        yield


@pytest.fixture
def traces() -> Any:
    return importlib.import_module("benchmarks.traces")


@pytest.fixture
def kv_waste() -> Any:
    return importlib.import_module("benchmarks.kv_waste")


def test_lengths_have_the_published_means_and_tails(traces: Any) -> None:
    for shape, prompt, output in ((traces.CHAT, 161.31, 337.99), (traces.INSTRUCTIONS, 19.31, 58.45)):
        lengths = np.array(shape.draw(40_000, 3))
        assert np.allclose(lengths.mean(0), (prompt, output), rtol=0.03)
        assert lengths.min() >= 1 and lengths.max() == 1024 and lengths.sum(1).max() <= 2048
        assert (np.median(lengths, 0) < 0.95 * lengths.mean(0)).all(), "the tail is on the long side"
        assert shape.draw(100, 3) == shape.draw(100, 3) != shape.draw(100, 4)


def test_a_cut_mean_is_that_of_many_draws(traces: Any) -> None:
    draws = np.exp(4 + 1.3 * np.random.default_rng(0).standard_normal(400_000))
    assert traces.clipped_mean(4, 1.3, 300) == pytest.approx(np.minimum(draws, 300).mean(), rel=0.01)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 64), st.integers(0, 99)), max_size=60))
def test_buddies(events: list[tuple[bool, int, int]]) -> None:
    """Against a map of slots: a block is refused only if no aligned one of its size is free."""
    buddies = importlib.import_module("benchmarks.traces").Buddies(64)
    used = np.zeros(64, bool)
    blocks: list[tuple[int, int]] = []
    for is_free, count, which in events:
        if is_free and blocks:
            start, size = block = blocks.pop(which % len(blocks))
            buddies.free(block)
            used[start : start + size] = False
            continue
        wanted = next(size for size in (1, 2, 4, 8, 16, 32, 64) if size >= count)
        block = buddies.allocate(count)
        if block is None:
            assert used.reshape(-1, wanted).any(1).all()
            continue
        start, size = block
        assert size == wanted and start % size == 0 and not used[start : start + size].any()
        used[start : start + size] = True
        blocks.append(block)
    for block in blocks:
        buddies.free(block)
    assert list(buddies.blocks()) == [(0, 64)]


def test_replay_of_few_requests_by_hand(kv_waste: Any) -> None:
    """Room for one of 2048 slots: lengths 3 and 4, then 4 (5 waits for the end of each); pages of 4: all but one."""
    lengths = [(3, 1), (3, 1)]
    one = kv_waste.replay(kv_waste.Contiguous(2048), lengths)
    assert one.waste == pytest.approx(1 - np.mean([3, 4]) / 2048) and one.fit == 1
    pages = kv_waste.replay(kv_waste.Paged(4, 4), lengths, 4)
    assert pages.waste == pytest.approx(np.mean([1 / 4, 0])) and pages.fit == 1
    twos = kv_waste.replay(kv_waste.PowersOfTwo(8), [(3, 2), (1, 1)])
    assert twos.waste == pytest.approx(np.mean([5 / 8, 4 / 8, 3 / 8])), (
        "known from the beginning: 8 slots for 5"
    )
    long = kv_waste.replay(kv_waste.Paged(224, 16), [(210, 1)] * 2, 16)
    assert long.long_waste == pytest.approx(np.mean([14 / 224, 13 / 224]))
    assert long.long_rule == pytest.approx(np.mean([7.5 / 210, 7.5 / 211]))


def test_held_pages_are_those_of_the_engines_books(kv_waste: Any, traces: Any) -> None:
    memory = kv_waste.Paged(512, 8)
    waiting = deque(kv_waste.Growing(p, p + o) for p, o in traces.INSTRUCTIONS.draw(40, 0))
    running: list[Any] = []
    num_victims = 0
    while waiting:
        while waiting and memory.admit(waiting[0]):
            running.append(waiting.popleft())
        tables = [each.table for each in running]
        held = sum(memory.held(each) for each in running)
        assert slots(memory.memory, tables) == (held, sum(each.length for each in running))
        memory.memory.check(tables)
        num_waiting = len(waiting)
        kv_waste.step(memory, running, waiting)
        num_victims += len(waiting) - num_waiting
    assert num_victims > 0, "the pool was never full"


def test_pages_saved_by_forks(kv_waste: Any) -> None:
    # 2 full pages for both, then a page of each own: 2 + 2 in the place of 3 + 3.
    assert kv_waste.sharing_saved([(32, 1)], 2, 0.0, 16) == pytest.approx(1 - 4 / 6)
    # Half a page is copied when it is written: 1 page of each own, nothing saved.
    assert kv_waste.sharing_saved([(8, 4)], 3, 0.0, 16) == 0.0
    still, moving = (kv_waste.sharing_saved([(40, 60)], 4, rate, 16) for rate in (0.0, 0.5))
    assert moving > still > 0
