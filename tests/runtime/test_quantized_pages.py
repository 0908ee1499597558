"""Serving with pages of FP8 and NVFP4: tokens of the eager references, recycled pages, pages that move."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from models import LONGEST
from numpy.typing import NDArray
from paged_model import multipliers, paged_artifact

from octavo.compiler.eager_runner import EagerRunner
from octavo.compiler.options import PageFormat
from octavo.runtime.batch import Batch
from octavo.runtime.engine import Engine
from octavo.runtime.model_runner import ModelRunner, NativeRunner, page_bytes
from octavo.runtime.sampling_params import SamplingParams

FORMATS = pytest.mark.parametrize("format", ["fp8", "nvfp4"])
PROMPTS = [[1, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7] * 6]
LAYERS, KV_HEADS, HEAD_DIM, PAGE_SIZE = 2, 2, 16, 4


def fill(runner: NativeRunner, byte: int) -> None:
    """Every byte of every page but the null page: 0xFF is nan as E4M3."""
    for buffer in runner.program.of_kind("cache"):
        pages = runner._memory[buffer.name].reshape(runner.num_pages, -1)
        pages[1:] = byte


def generate(runner: ModelRunner, format: PageFormat, num_tokens: int = 12) -> tuple[list[list[int]], int]:
    engine = Engine(runner, paged_artifact(format).model, None)
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=num_tokens))
    return [list(answer.token_ids) for answer in answers], engine.stats.num_preemptions


@FORMATS
def test_tokens_are_those_of_the_eager_references(format: PageFormat) -> None:
    """With room for all requests, and with so little that they push each other out of pages full of garbage."""
    artifact = paged_artifact(format)
    expected, _ = generate(EagerRunner(artifact, 40), format)
    roomy, cramped = NativeRunner(artifact, 40), NativeRunner(artifact, 9)
    for runner in (roomy, cramped):
        fill(runner, 0xFF)
    assert generate(roomy, format) == (expected, 0)
    tokens, preemptions = generate(cramped, format)
    assert tokens == expected and preemptions > 0
    assert generate(cramped, format)[0] == expected  # over what the first run left


@FORMATS
def test_multipliers_come_from_the_artifact(format: PageFormat) -> None:
    artifact, plan = paged_artifact(format), multipliers(format)
    for i in range(LAYERS):
        stored = artifact.weights[f"kv_multipliers_{i}"].array
        expected = [plan.pages[i].k_multiplier, plan.pages[i].v_multiplier]
        assert stored.view(np.float32).tolist() == np.array(expected, np.float32).tolist()


def test_bytes_of_a_page() -> None:
    elements = LAYERS * 2 * KV_HEADS * HEAD_DIM * PAGE_SIZE
    expected: dict[PageFormat, int] = {
        "bf16": 4 * elements,
        "fp8": elements,
        "nvfp4": elements // 2 + elements // 16,
    }
    assert {f: page_bytes(paged_artifact(f).program) for f in expected} == expected


def chunk(start: int, ids: list[int], pages: list[int]) -> Batch:
    """The tokens of one request from `start` on."""
    end = start + len(ids)
    place = np.arange(start, end)
    return Batch(
        input_ids=np.array(ids, np.int64), positions=place.astype(np.int64),
        slot_mapping=np.array(pages, np.int64)[place // PAGE_SIZE] * PAGE_SIZE + place % PAGE_SIZE,
        page_table=np.array([pages], np.int32), seq_lens=np.array([end], np.int32),
        cu_seqlens_q=np.array([0, len(ids)], np.int32), logit_rows=np.array([len(ids) - 1], np.int64),
    )  # fmt: skip


def copied(runner: NativeRunner, moves: dict[int, int], wanted: Callable[[str], bool]) -> None:
    """Pages to other pages, in the caches that are wanted."""
    for buffer in runner.program.of_kind("cache"):
        pages = runner._memory[buffer.name].reshape(runner.num_pages, -1)
        for source, target in moves.items():
            if wanted(buffer.name):
                pages[target] = pages[source]


def after_moving(format: PageFormat, wanted: Callable[[str], bool]) -> NDArray[np.float32]:
    """Logits of a last token whose request was moved from the pages 1 and 2 to 5 and 3."""
    runner = NativeRunner(paged_artifact(format), 8)
    fill(runner, 0x38)
    runner.run(chunk(0, PROMPTS[1][:7], [1, 2]))
    copied(runner, {1: 5, 2: 3}, wanted)
    for page in (1, 2):
        copied(runner, {0: page}, lambda _: True)
    return runner.run(chunk(7, PROMPTS[1][7:8], [5, 3])).copy()


def _is_other(prefix: str, name: str) -> bool:
    return not name.startswith(prefix)


@FORMATS
def test_a_page_moves_with_all_buffers_of_its_kind(format: PageFormat) -> None:
    runner = NativeRunner(paged_artifact(format), 8)
    runner.run(chunk(0, PROMPTS[1][:7], [1, 2]))
    expected = runner.run(chunk(7, PROMPTS[1][7:8], [1, 2])).copy()
    assert np.array_equal(after_moving(format, lambda _: True), expected)
    names = {b.name.rpartition("_")[0] for b in runner.program.of_kind("cache")}
    assert len(names) == {"fp8": 2, "nvfp4": 4}[format]
    for name in names:
        rest = partial(_is_other, name)
        assert not np.array_equal(after_moving(format, rest), expected)


@FORMATS
def test_a_step_is_the_sum_of_its_requests(format: PageFormat) -> None:
    """Bit for bit, in one step and one after another: pages of a request depend on no other."""
    batch = chunk(0, PROMPTS[0], [1])
    other = chunk(0, PROMPTS[1][:8], [2, 3])
    both = replace(
        batch, input_ids=np.concatenate([batch.input_ids, other.input_ids]),
        positions=np.concatenate([batch.positions, other.positions]),
        slot_mapping=np.concatenate([batch.slot_mapping, other.slot_mapping]),
        page_table=np.array([[1, 0], [2, 3]], np.int32), seq_lens=np.array([3, 8], np.int32),
        cu_seqlens_q=np.array([0, 3, 11], np.int32), logit_rows=np.array([2, 10], np.int64),
    )  # fmt: skip
    runner = NativeRunner(paged_artifact(format), 8)
    together = runner.run(both).copy()
    apart = [NativeRunner(paged_artifact(format), 8).run(one).copy()[0] for one in (batch, other)]
    assert np.array_equal(together, np.stack(apart))
    assert LONGEST >= 12
