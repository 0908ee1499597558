"""The last proof: logits of the finished artifact against the model's, over ragged batches and pages."""

import copy
from collections.abc import Iterable
from typing import Any

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
# Of a quantised artifact beside its graph: how far its logits may be off, as a share of how far quantisation moved
# them. Both round to the same codes, but where sums in another order land beyond a tie. Rounding moves a value by
# g / sqrt(12) rms, where g is the gap between two codes, and a code that flips moves it by g: if a share f of all
# flips, logits are off by sqrt(12 f) of what quantisation did: half of it for f = 2 %. Orders of sums flip fewer (a
# tiny Llama's logits move by 1e-6 of it in fp32, by 1 % in bf16); a scale that is lost, or of another block, moves
# logits by as much as quantisation itself, or more.
SHARE = 0.5
# A code that flips changes what later layers round, and in a deep model all of them follow: in FP8, the logits of 30
# layers of SmolLM2 move by nearly as much as quantisation moved them when each product is off by 2^-24. How far the
# graph moves then is measured, and this many times as much is room for the artifact, whose sums are in one more order.
UNREST = 2.0
# What quantisation moves logits by where that is not to be seen, because the reference is quantised too.
UNSEEN = 0.3
LENGTHS, FIRST = (9, 14, 5), (4, 13, 5)


def check_whole_model(model: nn.Module, artifact: Artifact, runner: ModelRunner) -> float:
    """The error, or PassError. Three prompts share two steps; the second step reads the first's pages.

    A router turns a rounding into another expert, so a mixture in bf16 may be further from its exact form than the
    bound. Then that distance is measured, and the artifact may be UNREST times as far from the exact form.
    """
    if not has_values(model):
        return 0.0
    prompts = _prompts(artifact)
    got = _artifact_logits(prompts, runner)
    wanted = _model_logits(model, prompts)
    worst = _worst(got, wanted)
    dtype = artifact.program.of_kind("cache")[0].dtype
    bound = BOUND[dtype]
    if worst <= bound:
        return worst
    own = ""
    if dtype == "bf16":
        exact = _model_logits(copy.deepcopy(model).float(), prompts)
        room, distance = UNREST * _worst(wanted, exact), _worst(got, exact)
        if distance <= room:
            return worst
        own = f", and from its form in fp32 by {distance:.2e}, where {room:.2e} is twice the model's own distance"
    raise PassError(
        f"verify: logits of the artifact differ from the model's by {worst:.2e} of the largest, bound {bound:.0e}{own}"
        "; every pass was proven, so a kernel or the memory plan is at fault: `octavo bisect` shows from where on"
    )


def check_quantized_model(
    model: nn.Module,
    graph: nn.Module,
    artifact: Artifact,
    runner: ModelRunner,
    moved: Iterable[nn.Module] = (),
) -> float:
    """The rms error of a quantised artifact's logits beside its graph's, relative to these, or PassError.

    model  before it was quantised (or the quantised graph again, where nothing else is left)
    graph  as it is executed op by op
    moved  the graph with products that are off by roundings; run only where the artifact is further off than a share
    The mean KL divergence is bounded too: it is quadratic in the difference, so by the square of the share.
    """
    prompts = _prompts(artifact)
    got, wanted = (
        np.stack(rows) for rows in (_artifact_logits(prompts, runner), _model_logits(graph, prompts))
    )
    plain = np.stack(_model_logits(model, prompts)) if has_values(model) else wanted
    size = _rms(wanted)
    floor = BOUND.get(artifact.program.of_kind("cache")[0].dtype, BOUND["bf16"])
    noise = _rms(wanted - plain) / size
    error, bound = _rms(got - wanted) / size, max(floor, SHARE * (noise or UNSEEN))
    largest = float(np.abs(wanted).max())
    lost = _kl(wanted, got)
    allowed = max(SHARE**2 * _kl(plain, wanted), ((floor if noise else bound) * largest) ** 2 / 2)
    if not (error <= bound and lost <= allowed):
        others = [np.stack(_model_logits(one, prompts)) for one in moved]
        bound = max([bound, *(UNREST * _rms(other - wanted) / size for other in others)])
        allowed = max([allowed, *(UNREST**2 * _kl(wanted, other) for other in others)])
    if not error <= bound:
        raise PassError(
            f"verify: logits of the artifact differ from its quantised graph's by {error:.2e} of their rms, bound "
            f"{bound:.1e}: quantisation moved them by {noise:.2e}; every step was proven, so a kernel or the memory "
            "plan is at fault"
        )
    if not lost <= allowed:
        raise PassError(
            f"verify: the artifact's tokens are {lost:.2e} nats from its quantised graph's, bound {allowed:.1e}; every "
            "step was proven, so a kernel or the memory plan is at fault"
        )
    return error


Rows = list[np.ndarray[tuple[int], np.dtype[np.float32]]]
Prompts = list[np.ndarray[tuple[int], np.dtype[np.int64]]]


def _prompts(artifact: Artifact) -> Prompts:
    longest = artifact.model.max_model_len
    return [_prompt(i, min(n, longest), artifact.model.vocab_size) for i, n in enumerate(LENGTHS)]


def _artifact_logits(prompts: Prompts, runner: ModelRunner) -> Rows:
    """Of the last token of every chunk, in both steps."""
    rows: Rows = []
    for is_last in (False, True):
        chunks = _chunks([len(p) for p in prompts], is_last)
        rows += [row.copy() for row in runner.run(_batch(prompts, chunks, runner))]
    return rows


def _model_logits(model: nn.Module, prompts: Prompts) -> Rows:
    """Of the same tokens, each prompt by itself."""
    with torch.no_grad():
        whole = [reference_logits(model, torch.from_numpy(p)[None])[0].float().numpy() for p in prompts]
    chunks = [chunk for is_last in (False, True) for chunk in _chunks([len(p) for p in prompts], is_last)]
    return [whole[chunk.request][chunk.start + chunk.length - 1] for chunk in chunks]


def _worst(got: Rows, wanted: Rows) -> float:
    """Largest difference of a row over its largest logit. np.maximum keeps a NaN, which max() would lose."""
    errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in zip(got, wanted, strict=True)]
    return float(np.maximum.reduce(errors))


def _rms(values: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def _kl(wanted: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> float:
    """Mean KL(wanted || got) over rows of logits, in nats."""
    p, q = (torch.from_numpy(rows).double().log_softmax(-1) for rows in (wanted, got))
    return float((p.exp() * (p - q)).sum(-1).mean())


def _prompt(seed: int, length: int, vocab_size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.random.default_rng(seed).integers(0, vocab_size, length)


def _chunks(lengths: list[int], is_last: bool) -> list[Chunk]:
    """The first tokens of every prompt, or the rest of those that have one."""
    firsts = [min(first, length) for first, length in zip(FIRST, lengths, strict=True)]
    if not is_last:
        return [Chunk(i, 0, first) for i, first in enumerate(firsts)]
    return [Chunk(i, f, n - f) for i, (f, n) in enumerate(zip(firsts, lengths, strict=True)) if n > f]


def _batch(
    prompts: list[np.ndarray[tuple[int], np.dtype[np.int64]]], chunks: list[Chunk], runner: ModelRunner
) -> Batch:
    generator, windows = torch.Generator().manual_seed(0), runner.page_windows
    step = step_inputs(chunks, runner.page_size, len(prompts), generator, max(LENGTHS), windows)
    arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in step.tensors.items()}
    groups = range(1, len(windows))
    windowed = tuple((arrays.pop(f"page_table_{g}"), arrays.pop(f"slot_mapping_{g}")) for g in groups)
    arrays["positions"] = arrays["positions"][0]
    ids = np.concatenate([prompts[c.request][c.start : c.start + c.length] for c in chunks])
    return Batch(input_ids=ids, windowed=windowed, **arrays)
