"""Pages that are copied, sent out to host slots and fetched in again, by every runner."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from page_orders import NUM_PAGES, NUM_SLOTS, ORDERS, after, moves_of
from paged_model import paged_artifact

from octavo.compiler.eager_runner import EagerRunner
from octavo.compiler.errors import ExecutionError
from octavo.compiler.options import PageFormat
from octavo.runtime.model_runner import NativeRunner
from octavo.runtime.page_moves import HostPages, Move, check_moves

FORMATS = pytest.mark.parametrize("format", ["bf16", "fp8", "nvfp4"])
RUNNERS = pytest.mark.parametrize("make", [NativeRunner, EagerRunner])


@pytest.mark.parametrize("text", ORDERS)
def test_moves_are_made_in_order(text: str) -> None:
    cache = np.arange(NUM_PAGES * 4).reshape(NUM_PAGES, 4)
    expected = after([row.copy() for row in cache], text)
    HostPages([cache], NUM_SLOTS).move(moves_of(text))
    assert np.array_equal(cache, np.stack(expected))


def caches_of(runner: NativeRunner | EagerRunner) -> dict[str, NDArray[np.uint8]]:
    """Each cache buffer as (pages, bytes), with other bytes in every page."""
    if isinstance(runner, NativeRunner):
        memory = {b.name: runner._memory[b.name] for b in runner.program.of_kind("cache")}
    else:
        memory = {name: cache.view(torch.uint8).numpy() for name, cache in runner.caches.items()}
    caches = {name: array.reshape(NUM_PAGES, -1) for name, array in memory.items()}
    random = np.random.default_rng(0)
    for cache in caches.values():
        cache[1:] = random.integers(0, 256, cache[1:].shape)
    return caches


@FORMATS
@RUNNERS
def test_a_page_moves_in_all_layers_with_its_scales(
    make: Callable[..., NativeRunner | EagerRunner], format: PageFormat
) -> None:
    runner = make(paged_artifact(format), NUM_PAGES, num_host_pages=NUM_SLOTS)
    caches = caches_of(runner)
    assert len(caches) == {"bf16": 4, "fp8": 4, "nvfp4": 8}[format]
    assert runner.page_bytes == sum(cache.shape[1] for cache in caches.values())
    assert (runner.num_host_pages, runner.page_windows) == (NUM_SLOTS, (None,))
    expected = {name: after([row.copy() for row in cache], ORDERS[7]) for name, cache in caches.items()}
    runner.move_pages(moves_of(ORDERS[7]))
    for name, cache in caches.items():
        assert np.array_equal(cache, np.stack(expected[name])), name


@pytest.mark.parametrize(
    ("move", "slots"),
    [
        (Move("copy", 0, 1), 3), (Move("copy", 1, 0), 3), (Move("copy", 1, 7), 3), (Move("copy", -1, 2), 3),
        (Move("out", 0, 1), 3), (Move("out", 7, 1), 3), (Move("out", 1, 3), 3), (Move("out", 1, -1), 3),
        (Move("in", 3, 1), 3), (Move("in", 1, 0), 3), (Move("in", 1, 7), 3), (Move("out", 1, 0), 0),
        (Move("in", 0, 1), 0),
    ],
)  # fmt: skip
def test_a_move_that_cannot_be_is_refused_with_all_before_it(move: Move, slots: int) -> None:
    cache = np.arange(7)[:, None]
    expected = (
        rf"pages 1 to 6 and host slots below {slots}, got '{move.kind}' from {move.source} to {move.target}"
    )
    with pytest.raises(ExecutionError, match=expected):
        HostPages([cache], slots).move([Move("copy", 1, 2), move])
    assert cache[:, 0].tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_a_page_is_not_copied_to_itself() -> None:
    with pytest.raises(ExecutionError, match="expected two pages, got 'copy' from 3 to 3"):
        check_moves([Move("copy", 3, 3)], 7, 0)


def test_a_negative_number_of_slots_is_refused() -> None:
    with pytest.raises(ExecutionError, match="0 or more host slots, got 7 and -1"):
        NativeRunner(paged_artifact("bf16"), NUM_PAGES, num_host_pages=-1)
