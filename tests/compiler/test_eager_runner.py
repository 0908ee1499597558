"""The eager references run an artifact's lowered graph as the host program does."""

import warnings
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from heads import PROMPTS, two_prompts
from models import LONGEST, VOCAB, tiny
from stages import BF16, FP32, compiled, greedy
from zoo import build

import octavo
from octavo.compiler.capture import reference_logits
from octavo.compiler.eager_runner import EagerRunner
from octavo.runtime.engine import Engine
from octavo.runtime.model_runner import NativeRunner
from octavo.runtime.sampling_params import SamplingParams


def test_a_mixture_of_experts_runs_as_the_host_program_does() -> None:
    artifact = octavo.compile(build("gpt_oss"), page_size=4).artifact
    batch = two_prompts()
    # Layers with a window have tables of their own: here the other pages of the pool.
    others = np.array([[7, 0], [5, 6]], np.int32), batch.slot_mapping + 4 * 4
    batch = replace(batch, windowed=(others,))
    logits = EagerRunner(artifact, 8).run(batch)
    native = NativeRunner(artifact, 8).run(batch)
    assert np.abs(logits - native).max() <= 1e-5 * np.abs(logits).max()


@pytest.mark.parametrize("name", ["llama", "sdpa"])
def test_logits_are_the_models_and_the_host_programs(name: str) -> None:
    artifact = compiled(name).artifact
    logits = EagerRunner(artifact, 8).run(two_prompts())
    assert logits.shape == (2, VOCAB)
    assert logits.dtype == np.float32
    for row, prompt in zip(logits, PROMPTS, strict=True):
        with torch.no_grad():
            expected = reference_logits(tiny(name), torch.tensor([prompt]))[0, -1].numpy()
        assert np.abs(row - expected).max() < 1e-5 * np.abs(expected).max()
    native = NativeRunner(artifact, 8).run(two_prompts())
    assert np.abs(logits - native).max() < 1e-5 * np.abs(native).max()


def test_pages_keep_what_was_written() -> None:
    runner = EagerRunner(compiled("llama").artifact, 8)
    runner.run(two_prompts())
    assert runner.num_pages == 8
    written = [page for page in range(8) if runner.caches["k_cache_1"][page].abs().max() > 0]
    assert written == [1, 2, 3]


def test_bf16_weights_and_pages_survive_the_artifact() -> None:
    with warnings.catch_warnings(action="ignore"), mock.patch.dict("os.environ", {"CXX": "no-such-compiler"}):
        artifact = octavo.compile(tiny("llama"), dtype="bf16", page_size=4, max_model_len=LONGEST)
    runner = EagerRunner(artifact.artifact, 8)
    assert {cache.dtype for cache in runner.caches.values()} == {BF16}
    assert {w.dtype for w in runner.graph_module.buffers()} == {BF16}
    engine = Engine(runner, artifact.artifact.model, None)
    tokens, gap = greedy("llama", PROMPTS[0], 6, FP32)
    (completion,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=6))
    assert gap > 0.3  # bf16 moves logits of this model by less
    assert list(completion.token_ids) == tokens
