"""A token's logits are the same bits whatever step it is computed in: alone, in a prompt, in a chunk, beside others."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from models import LONGEST, VOCAB
from numpy.typing import NDArray
from stages import BF16, FP32, model_of

import octavo
from octavo.compiler.fresh_inputs import Chunk, step_inputs
from octavo.compiler.options import QuantConfig
from octavo.runtime.batch import Batch
from octavo.runtime.model_runner import ModelRunner, NativeRunner

LENGTH, PAGE_SIZE = 40, 4
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (3, LENGTH))
TEXT = [TOKENS[2].tolist(), TOKENS[1].tolist()]
PLAN = list[list[Chunk]]
# Steps in which request 0 comes to its end.
STEPS: dict[str, PLAN] = {
    "seven and the rest": [[Chunk(0, 0, 7)], [Chunk(0, 7, LENGTH - 7)]],
    "one by one": [[Chunk(0, t, 1)] for t in range(LENGTH)],
    "by threes": [[Chunk(0, t, min(3, LENGTH - t))] for t in range(0, LENGTH, 3)],
    "between prompts": [[Chunk(1, 0, 11), Chunk(0, 0, LENGTH), Chunk(2, 0, 3)]],
    "beside requests that decode": [
        [Chunk(0, 0, 20), Chunk(1, 0, 20), Chunk(2, 0, 5)],
        *([Chunk(1, t, 1), Chunk(0, t, 1), Chunk(2, t - 15, 1)] for t in range(20, LENGTH)),
    ],
}


def logits(runner: ModelRunner, steps: PLAN) -> NDArray[np.float32]:
    """Of every token of request 0."""
    rows: list[NDArray[np.float32]] = []
    for chunks in steps:
        step = step_inputs(
            chunks, PAGE_SIZE, 3, torch.Generator().manual_seed(1), LONGEST, runner.page_windows
        )
        arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in step.tensors.items()}
        groups = range(1, len(runner.page_windows))
        windowed = tuple((arrays.pop(f"page_table_{g}"), arrays.pop(f"slot_mapping_{g}")) for g in groups)
        ids = np.concatenate([TOKENS[c.request, c.start : c.start + c.length] for c in chunks])
        arrays |= {"positions": arrays["positions"][0], "logit_rows": np.arange(len(ids))}
        found = runner.run(Batch(input_ids=ids, windowed=windowed, **arrays))
        ends = np.cumsum([c.length for c in chunks])
        rows += [
            found[end - c.length : end].copy() for c, end in zip(chunks, ends, strict=True) if c.request == 0
        ]
    return np.concatenate(rows)


def runners(name: str, dtype: torch.dtype, quantize: QuantConfig | None) -> Iterator[ModelRunner]:
    """On one thread and on two."""
    artifact = octavo.compile(
        model_of(name, dtype), max_model_len=LONGEST, page_size=PAGE_SIZE, verify="off", quantize=quantize,
        calibration=None if quantize is None else TEXT, deterministic=True,
    ).artifact  # fmt: skip
    assert artifact.manifest["options"]["deterministic"] is True
    for num_threads in (1, 2):
        yield NativeRunner(artifact, 128, num_threads)


def check(name: str, dtype: torch.dtype, quantize: QuantConfig | None) -> None:
    for runner in runners(name, dtype, quantize):
        whole = logits(runner, [[Chunk(0, 0, LENGTH)]])
        for how, steps in STEPS.items():
            assert np.array_equal(logits(runner, steps), whole), how


@pytest.mark.parametrize(
    ("name", "dtype", "quantize"),
    [("llama", BF16, QuantConfig("nvfp4", kv="nvfp4")), ("gpt_oss", FP32, None)],
)
def test_logits_do_not_depend_on_the_step(
    name: str, dtype: torch.dtype, quantize: QuantConfig | None
) -> None:
    check(name, dtype, quantize)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gemma3", "deepseek_v2", "bloom"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "quantize",
    [None, QuantConfig("nvfp4"), QuantConfig("nvfp4_weight_only"), QuantConfig("fp8", kv="fp8")],
    ids=lambda config: config and config.mode,
)
def test_logits_of_every_kind_of_model_and_format(
    name: str, dtype: torch.dtype, quantize: QuantConfig | None
) -> None:
    check(name, dtype, quantize)
