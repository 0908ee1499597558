"""Pages on a device over a driver without a GPU: what moves, in which order, with how many calls."""

from collections.abc import Mapping

import numpy as np
import pytest
from fake_cuda import POISON, RecordingDriver
from numpy.typing import NDArray
from page_orders import NUM_PAGES, NUM_SLOTS, ORDERS, after, moves_of

from octavo.compiler.errors import ExecutionError
from octavo.runtime.cuda_memory import DeviceMemory
from octavo.runtime.cuda_pages import DevicePages

# Two layers; NVFP4 pages have scales of an eighth of their codes.
BF16 = {"k_cache_0": 64, "v_cache_0": 64, "k_cache_1": 64, "v_cache_1": 64}
NVFP4 = BF16 | {"k_scales_0": 8, "v_scales_0": 8, "k_scales_1": 8, "v_scales_1": 8}
PAGES = pytest.mark.parametrize("sizes", [BF16, NVFP4])


class Made:
    """Pages, their driver and stream."""

    def __init__(self, sizes: Mapping[str, int], num_slots: int = NUM_SLOTS) -> None:
        self.sizes, self.driver = sizes, RecordingDriver()
        self.memory = DeviceMemory(self.driver)
        self.driver.create_stream()
        self.stream = self.driver.create_stream()
        self.pages = DevicePages(self.memory, self.stream, sizes, NUM_PAGES, num_slots)

    def caches(self) -> dict[str, NDArray[np.uint8]]:
        """Each buffer as (pages, bytes)."""
        return {
            name: self.driver.at(self.pages.addresses[name], size * NUM_PAGES).reshape(NUM_PAGES, size)
            for name, size in self.sizes.items()
        }


@PAGES
@pytest.mark.parametrize("text", ORDERS)
def test_pages_move_in_all_buffers_and_in_order(sizes: Mapping[str, int], text: str) -> None:
    made = Made(sizes)
    random = np.random.default_rng(0)
    expected = {}
    for name, cache in made.caches().items():
        assert not cache.any(), "pages begin as zeros"
        assert made.pages.addresses[name] % 16 == 0
        cache[:] = random.integers(0, 256, cache.shape)
        expected[name] = after([row.copy() for row in cache], text)
    made.driver.queued.clear()
    made.pages.move(moves_of(text))
    for name, cache in made.caches().items():
        assert np.array_equal(cache, np.stack(expected[name])), name
    num_calls = len(text.split()) * len(set(sizes.values()))
    assert made.driver.queued == [("copy", made.stream)] * num_calls


def test_buffers_do_not_share_memory() -> None:
    made = Made(NVFP4)
    for number, cache in enumerate(made.caches().values()):
        cache[:] = number
    for number, cache in enumerate(made.caches().values()):
        assert (cache == number).all()


def test_slots_are_page_locked_and_given_back_and_none_are_none() -> None:
    made = Made(NVFP4)
    assert sum(array.nbytes for array in made.driver.pinned) == NUM_SLOTS * sum(NVFP4.values())
    assert all((array == POISON).all() for array in made.driver.pinned)
    made.memory.release()
    assert not made.driver.pinned and not made.driver.allocated
    assert not Made(NVFP4, num_slots=0).driver.pinned


@pytest.mark.parametrize("text", ["1>2 0>3", "1>2 3>0", "1>2 7>1", "1>2 1>d", "1>2 d>1"])
def test_none_is_queued_if_one_cannot_be(text: str) -> None:
    made = Made(BF16)
    made.driver.queued.clear()
    with pytest.raises(ExecutionError, match="move_pages: expected pages 1 to 6 and host slots below 3"):
        made.pages.move(moves_of(text))
    assert made.driver.queued == []


def test_a_failed_copy_says_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(BF16)

    def fail(*arguments: object) -> None:
        raise ExecutionError("cuMemcpy3DAsync_v2: no")

    monkeypatch.setattr(made.driver, "copy", fail)
    with pytest.raises(ExecutionError, match=r"^move_pages: cuMemcpy3DAsync_v2: no"):
        made.pages.move(moves_of("1>2"))
