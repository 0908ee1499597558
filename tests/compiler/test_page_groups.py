"""Artifacts of models with full attention and sliding windows: two page groups over one pair of caches."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from models import LONGEST, VOCAB
from numpy.typing import NDArray
from stages import model_of

import octavo
from octavo.compiler.artifact import Artifact
from octavo.compiler.capture import reference_logits
from octavo.compiler.eager_runner import EagerRunner
from octavo.compiler.fresh_inputs import Chunk, step_inputs
from octavo.compiler.options import PageFormat, QuantConfig
from octavo.runtime.batch import Batch
from octavo.runtime.engine import Engine
from octavo.runtime.model_runner import NativeRunner, page_bytes
from octavo.runtime.sampling_params import SamplingParams

LENGTHS, PAGE_SIZE, NUM_PAGES = (19, 8), 4, 40
PROMPTS = [torch.randint(0, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]
FORMATS: tuple[PageFormat, ...] = ("bf16", "fp8")


@cache
def artifact_of(format: PageFormat) -> Artifact:
    """A layer with a window of 6 and one without."""
    config = None if format == "bf16" else QuantConfig("bf16", kv=format)
    text = None if config is None else [[i * 7 % VOCAB for i in range(40)]]
    return octavo.compile(
        model_of("gemma3"),
        max_model_len=LONGEST,
        page_size=PAGE_SIZE,
        quantize=config,
        calibration=text,
        verify="off",
    ).artifact


def steps(windows: tuple[int | None, ...]) -> list[Batch]:
    """Most of both prompts, then the rest: pages 0 to 2 of the first are then behind the window of every token."""
    batches = []
    for chunks in ([Chunk(0, 0, 18), Chunk(1, 0, 3)], [Chunk(0, 18, 1), Chunk(1, 3, 5)]):
        step = step_inputs(chunks, PAGE_SIZE, 2, torch.Generator().manual_seed(1), 20, windows)
        arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in step.tensors.items()}
        arrays["positions"] = arrays["positions"][0]
        groups = range(1, len(windows))
        windowed = tuple((arrays.pop(f"page_table_{g}"), arrays.pop(f"slot_mapping_{g}")) for g in groups)
        ids = torch.cat([PROMPTS[c.request][c.start : c.start + c.length] for c in chunks]).numpy()
        batches.append(Batch(input_ids=ids, windowed=windowed, **arrays))
    return batches


def logits(runner: NativeRunner | EagerRunner) -> NDArray[np.float32]:
    """Of both steps; before each, the pages that it does not list are filled with what is nan as E4M3 and fp32."""
    rows = []
    for batch in steps(runner.page_windows):
        listed = {
            0,
            *batch.page_table.flatten(),
            *(p for table, _ in batch.windowed for p in table.flatten()),
        }
        gone = [page for page in range(NUM_PAGES) if page not in listed]
        for buffer in _caches(runner):
            buffer.reshape(NUM_PAGES, -1)[gone] = 0xFF
        rows.append(runner.run(batch).copy())
    return np.concatenate(rows)


def _caches(runner: NativeRunner | EagerRunner) -> list[NDArray[np.uint8]]:
    if isinstance(runner, NativeRunner):
        return [runner._memory[b.name] for b in runner.program.of_kind("cache")]
    return [cache.view(torch.uint8).numpy() for cache in runner.caches.values()]


@pytest.mark.parametrize("format", FORMATS)
def test_pages_behind_a_window_are_never_read(format: PageFormat) -> None:
    """By the host program and the eager references, of which neither finds what it wrote there."""
    artifact = artifact_of(format)
    assert artifact.program.page_windows == (None, 6)
    native, eager = NativeRunner(artifact, NUM_PAGES), EagerRunner(artifact, NUM_PAGES)
    table = steps(native.page_windows)[1].windowed[0][0]
    assert [int(page) == 0 for page in table[0]] == [True, True, True, False, False]
    found, expected = logits(native), logits(eager)
    assert np.abs(found - expected).max() <= (1e-5 if format == "bf16" else 0.1) * np.abs(expected).max()
    if format == "bf16":
        model = model_of("gemma3")
        for row, (prompt, end) in zip(found, [(0, 18), (1, 3), (0, 19), (1, 8)], strict=True):
            with torch.no_grad():
                wanted = reference_logits(model, PROMPTS[prompt][None, :end])[0, -1].numpy()
            assert np.abs(row - wanted).max() < 1e-5 * np.abs(wanted).max()


@pytest.mark.parametrize(("num_pages", "num_host_pages"), [(60, 0), (16, 0), (16, 8)])
def test_an_engine_serves_the_models_own_tokens(num_pages: int, num_host_pages: int) -> None:
    """With room for all, and where requests push each other out of pages, or to host slots, over pages of nan."""
    model, artifact, num_tokens = model_of("gemma3"), artifact_of("bf16"), 12
    prompts = [[1, 5, 9], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7] * 6, [2, 2]]
    runner = NativeRunner(artifact, num_pages, num_host_pages=num_host_pages)
    for buffer in _caches(runner):
        buffer.reshape(num_pages, -1)[1:] = 0xFF
    engine = Engine(runner, artifact.model)
    answers = engine.generate(prompts, SamplingParams(max_tokens=num_tokens))
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            rows = reference_logits(model, torch.tensor([[*prompt, *answer.token_ids]]))[
                0, len(prompt) - 1 : -1
            ]
        assert list(answer.token_ids) == rows.argmax(-1).tolist()
    assert (engine.stats.num_preemptions > 0) == (num_pages < 60)


def test_a_page_takes_the_memory_of_one_layer_not_of_two() -> None:
    elements = 2 * PAGE_SIZE * 2 * 16  # keys and values, of 2 heads
    expected = {"bf16": 4 * elements, "fp8": elements}
    assert {format: page_bytes(artifact_of(format).program) for format in FORMATS} == expected
    multipliers = [name for name in artifact_of("fp8").weights if "multipliers" in name]
    assert multipliers == ["kv_multipliers_0", "kv_multipliers_1"]  # of each layer, though pages are shared


def test_the_report_tells_the_groups() -> None:
    passes = {row["name"]: row for row in json.loads(artifact_of("bf16").read("report.json"))["passes"]}
    wanted = [{"layers": 1, "window": None}, {"layers": 1, "window": 6}]
    assert passes["group_pages"]["notes"]["groups"] == wanted
