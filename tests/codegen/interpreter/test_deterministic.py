"""A deterministic artifact for a B200: a token's logits are the same bits alone, in a prompt and beside others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton.runtime.interpreter as interpreter
from fake_cuda import POISON, caches_of
from interpreted_cuda import InterpretingDriver
from numpy.typing import NDArray
from tiny_llama import of_config
from transformers import LlamaConfig

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.kernel import Kernel, KernelSpec
from octavo.compiler.api import compile
from octavo.compiler.artifact import Artifact
from octavo.compiler.fresh_inputs import Chunk, step_inputs
from octavo.compiler.target import Target
from octavo.runtime.batch import Batch
from octavo.runtime.cuda_runner import CudaRunner

LENGTH, PAGE_SIZE, VOCAB = 140, 16, 96
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))
# Steps in which request 0 comes to its end. Its last token's context is long enough to be split, if it were.
STEPS = {
    "in chunks, and the last alone": [[Chunk(0, 0, 67)], [Chunk(0, 67, 72)], [Chunk(0, 139, 1)]],
    "beside another": [
        [Chunk(1, 0, 9), Chunk(0, 0, 138)],
        [Chunk(0, 138, 1), Chunk(1, 9, 1)],
        [Chunk(0, 139, 1)],
    ],
}


def build_one_form(specs: list[KernelSpec], target: Target, progress: Any) -> list[Kernel]:
    return build_kernels([replace(spec, candidates=()) for spec in specs], target, progress)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=160, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    folder: Path = tmp_path_factory.mktemp("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(folder / "cache"))
        patch.setattr("octavo.compiler.build.build_kernels", build_one_form)
        return compile(
            of_config(config).bfloat16().eval(), "b200", output=folder / "artifact", page_size=PAGE_SIZE,
            max_batch_tokens=160, verify="off", deterministic=True,
        ).artifact  # fmt: skip


def logits(artifact: Artifact, steps: list[list[Chunk]]) -> NDArray[np.float32]:
    """Of every token of request 0."""
    driver = InterpretingDriver(artifact)
    runner = CudaRunner(artifact, 21, driver=driver, max_requests=4)
    for cache in caches_of(runner, driver).values():
        cache[1:] = POISON
    rows: list[NDArray[np.float32]] = []
    for chunks in steps:
        step = step_inputs(chunks, PAGE_SIZE, 2, torch.Generator().manual_seed(1), 160)
        arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in step.tensors.items()}
        ids = np.concatenate([TOKENS[c.request, c.start : c.start + c.length] for c in chunks])
        arrays |= {"positions": arrays["positions"][0], "logit_rows": np.arange(len(ids))}
        found = runner.run(Batch(input_ids=ids, windowed=(), **arrays))
        ends = np.cumsum([c.length for c in chunks])
        rows += [
            found[end - c.length : end].copy() for c, end in zip(chunks, ends, strict=True) if c.request == 0
        ]
    return np.concatenate(rows)


def dot_in_order(builder: Any, a: Any, b: Any, accumulator: Any, *options: Any) -> Any:
    """A product whose sums go along K, as a tensor core's do in an order of its own; numpy's depends on the row."""
    left, right, sums = a.data.astype(np.float32), b.data.astype(np.float32), accumulator.data.copy()
    for k in range(left.shape[-1]):
        sums += left[:, k : k + 1] * right[k : k + 1]
    return interpreter.TensorHandle(sums, accumulator.dtype.scalar)


@pytest.mark.slow
def test_logits_do_not_depend_on_the_step(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    InterpretingDriver(artifact)  # puts the interpreter's corrections in place, to be replaced
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot_in_order)
    monkeypatch.setattr("triton_interpreter.install", lambda: None)
    assert not [step for step in artifact.program.steps if step.when not in ("", "L > 0")]
    whole = logits(artifact, [[Chunk(0, 0, LENGTH)]])
    assert np.isfinite(whole).all()
    for how, steps in STEPS.items():
        assert np.array_equal(logits(artifact, steps), whole), how
