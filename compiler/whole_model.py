"""The last proof: logits of the finished artifact against the model's, over ragged batches and pages."""

import numpy as np
import torch
from torch import nn

from octavo.compiler.artifact import Artifact
from octavo.compiler.capture import reference_logits
from octavo.compiler.errors import PassError
from octavo.compiler.fresh_inputs import Chunk, step_inputs
from octavo.compiler.meta_model import has_values
from octavo.runtime.batch import Batch
from octavo.runtime.model_runner import ModelRunner

# Largest logit error relative to the largest logit. Roundings of a layer add up like a random walk, and a
# bf16 model is as far from its own fp64 form as this bound.
BOUND = {"fp32": 1e-4, "bf16": 6e-2}
LENGTHS, FIRST = (9, 14, 5), (4, 13, 5)


def check_whole_model(model: nn.Module, artifact: Artifact, runner: ModelRunner) -> float:
    """The error, or PassError. Three prompts share two steps; the second step reads the first's pages."""
    if not has_values(model):
        return 0.0
    longest = artifact.model.max_model_len
    prompts = [_prompt(i, min(n, longest), artifact.model.vocab_size) for i, n in enumerate(LENGTHS)]
    with torch.no_grad():
        expected = [reference_logits(model, torch.from_numpy(p)[None])[0].float().numpy() for p in prompts]
    worst = 0.0
    for is_last in (False, True):
        chunks = _chunks([len(p) for p in prompts], is_last)
        logits = runner.run(_batch(prompts, chunks, runner.page_size))
        for row, chunk in zip(logits, chunks, strict=True):
            wanted = expected[chunk.request][chunk.start + chunk.length - 1]
            # np.maximum keeps a NaN, which max() would lose.
            worst = float(np.maximum(worst, np.abs(row - wanted).max() / np.abs(wanted).max()))
    bound = BOUND[artifact.program.of_kind("cache")[0].dtype]
    if not worst <= bound:
        raise PassError(
            f"verify: logits of the artifact differ from the model's by {worst:.2e} of the largest, bound "
            f"{bound:.0e}; every pass was proven, so a kernel or the memory plan is at fault: `octavo "
            "bisect` shows from where on"
        )
    return worst


def _prompt(seed: int, length: int, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, vocab_size, length)


def _chunks(lengths: list[int], is_last: bool) -> list[Chunk]:
    """The first tokens of every prompt, or the rest of those that have one."""
    firsts = [min(first, length) for first, length in zip(FIRST, lengths, strict=True)]
    if not is_last:
        return [Chunk(i, 0, first) for i, first in enumerate(firsts)]
    return [Chunk(i, f, n - f) for i, (f, n) in enumerate(zip(firsts, lengths, strict=True)) if n > f]


def _batch(
    prompts: list[np.ndarray[tuple[int], np.dtype[np.int64]]], chunks: list[Chunk], page_size: int
) -> Batch:
    step = step_inputs(
        chunks, page_size, len(prompts), torch.Generator().manual_seed(0), max(LENGTHS)
    ).tensors
    arrays = {
        name: np.ascontiguousarray(value.reshape(value.shape[-value.dim() :]).numpy())
        for name, value in step.items()
    }
    arrays["positions"] = arrays["positions"][0]
    ids = np.concatenate([prompts[c.request][c.start : c.start + c.length] for c in chunks])
    return Batch(input_ids=ids, requests=(), **arrays)
