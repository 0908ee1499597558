"""The last proof: logits and features of the finished artifact against the model's, over ragged batches and pages."""

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from octavo.compiler.artifact import Artifact
from octavo.compiler.capture import reference_outputs
from octavo.compiler.errors import PassError
from octavo.compiler.fresh_inputs import Chunk, step_inputs
from octavo.compiler.meta_model import has_values
from octavo.compiler.program import FEATURES, Program
from octavo.runtime.batch import Batch
from octavo.runtime.features import narrow, wide
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
Row = NDArray[np.float32]


def check_whole_model(
    model: nn.Module, artifact: Artifact, runner: ModelRunner, features: Sequence[int] | None = None
) -> float:
    """The error, or PassError. Three prompts share two steps; the second step reads the first's pages.

    features  those that the artifact was made to give, beside what the model returns itself

    A router turns a rounding into another expert, so a mixture in bf16 may be further from its exact form than the
    bound. Then that distance is measured, and the artifact may be UNREST times as far from the exact form.
    """
    if not has_values(model):
        return 0.0
    prompts = _prompts(artifact)
    got = _artifact_rows(prompts, artifact.program, runner)
    wanted = _model_rows(model, prompts, features)
    worst, what = _worst(got, wanted)
    dtype = _dtype(artifact.program)
    bound = BOUND[dtype]
    if worst <= bound:
        return worst
    own = ""
    if dtype == "bf16":
        exact = _model_rows(copy.deepcopy(model).float(), prompts, features)
        room, distance = UNREST * _worst(wanted, exact)[0], _worst(got, exact)[0]
        if distance <= room:
            return worst
        own = f", and from its form in fp32 by {distance:.2e}, where {room:.2e} is twice the model's own distance"
    raise PassError(
        f"verify: {what} of the artifact differ from the model's by {worst:.2e} of the largest, bound {bound:.0e}{own}"
        "; every pass was proven, so a kernel or the memory plan is at fault: `octavo bisect` shows from where on"
    )


def check_quantized_model(
    model: nn.Module,
    graph: nn.Module,
    artifact: Artifact,
    runner: ModelRunner,
    moved: Iterable[nn.Module] = (),
    features: Sequence[int] | None = None,
) -> float:
    """The rms error of a quantised artifact's logits beside its graph's, relative to these, or PassError.

    model  before it was quantised (or the quantised graph again, where nothing else is left)
    graph  as it is executed op by op
    moved  the graph with products that are off by roundings; run only where the artifact is further off than a share
    features  as in check_whole_model: of these too the error is bounded, by UNREST shares of what quantisation did
    The mean KL divergence is bounded too: it is quadratic in the difference, so by the square of the share.
    """
    prompts = _prompts(artifact)
    artifacts, graphs = _artifact_rows(prompts, artifact.program, runner), _model_rows(graph, prompts)
    models = _model_rows(model, prompts, features) if has_values(model) else graphs
    got, wanted, plain = (np.stack(rows.logits) for rows in (artifacts, graphs, models))
    size = _rms(wanted)
    floor = BOUND.get(_dtype(artifact.program), BOUND["bf16"])
    _check_features(artifacts.features, graphs.features, models.features, floor)
    noise = _rms(wanted - plain) / size
    error, bound = _rms(got - wanted) / size, max(floor, SHARE * (noise or UNSEEN))
    largest = float(np.abs(wanted).max())
    lost = _kl(wanted, got)
    allowed = max(SHARE**2 * _kl(plain, wanted), ((floor if noise else bound) * largest) ** 2 / 2)
    if not (error <= bound and lost <= allowed):
        others = [np.stack(_model_rows(one, prompts).logits) for one in moved]
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


def _check_features(got: list[Row], wanted: list[Row], plain: list[Row], floor: float) -> None:
    """Of a quantised artifact; raises PassError."""
    if not got:
        return
    exact = np.stack(wanted)
    size = _rms(exact)
    error, noise = _rms(np.stack(got) - exact) / size, _rms(exact - np.stack(plain)) / size
    bound = UNREST * max(floor, SHARE * (noise or UNSEEN))
    if not error <= bound:
        raise PassError(
            f"verify: features of the artifact differ from its quantised graph's by {error:.2e} of their rms, bound "
            f"{bound:.1e}: quantisation moved them by {noise:.2e}; a kernel or the memory plan is at fault"
        )


@dataclass(frozen=True)
class _Prompt:
    """ids (T,), and of a draft head features (T, F), fp32 numbers that the program's dtype holds."""

    ids: NDArray[np.int64]
    features: NDArray[np.float32] | None


class _Rows(NamedTuple):
    """Logits (vocab,) of the last token of every chunk, in both steps, and features (F,) of every token of them."""

    logits: list[Row]
    features: list[Row]


def _dtype(program: Program) -> str:
    """The model's: that of its pages, or of what a head without pages reads."""
    caches = program.of_kind("cache")
    return caches[0].dtype if caches else _features_dtype(program)


def _features_dtype(program: Program) -> str:
    return next(buffer.dtype for buffer in program.of_kind("input") if buffer.name == FEATURES)


def _prompts(artifact: Artifact) -> list[_Prompt]:
    program, longest = artifact.program, artifact.model.max_model_len
    return [_prompt(program, i, min(n, longest), artifact.model.vocab_size) for i, n in enumerate(LENGTHS)]


def _prompt(program: Program, seed: int, length: int, vocab_size: int) -> _Prompt:
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, vocab_size, length)
    widths = [buffer.shape[1] for buffer in program.of_kind("input") if buffer.name == FEATURES]
    if not widths:
        return _Prompt(ids, None)
    return _Prompt(
        ids, generator.integers(-64, 65, (length, int(widths[0]))).astype(np.float32) * np.float32(0.03125)
    )


def _artifact_rows(prompts: list[_Prompt], program: Program, runner: ModelRunner) -> _Rows:
    rows = _Rows([], [])
    for is_last in (False, True):
        chunks = _chunks([len(p.ids) for p in prompts], is_last)
        rows.logits.extend(row.copy() for row in runner.run(_batch(prompts, chunks, program, runner)))
        if runner.features is not None:
            rows.features.extend(wide(runner.features).copy())
    return rows


def _model_rows(model: nn.Module, prompts: list[_Prompt], features: Sequence[int] | None = None) -> _Rows:
    """Of the same tokens, each prompt by itself."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    whole: list[tuple[Row, Row | None]] = []
    with torch.no_grad():
        for prompt in prompts:
            given = None if prompt.features is None else torch.from_numpy(prompt.features)[None].to(dtype)
            made = reference_outputs(model, torch.from_numpy(prompt.ids)[None], given, features)
            joined = torch.cat(made[1:], -1)[0].float().numpy() if made[1:] else None
            whole.append((made[0][0].float().numpy(), joined))
    rows = _Rows([], [])
    for is_last in (False, True):
        for chunk in _chunks([len(p.ids) for p in prompts], is_last):
            (logits, states), end = whole[chunk.request], chunk.start + chunk.length
            rows.logits.append(logits[end - 1])
            rows.features.extend([] if states is None else states[chunk.start : end])
    return rows


def _worst(got: _Rows, wanted: _Rows) -> tuple[float, str]:
    """Largest difference of a row over its largest number, and of what. np.maximum keeps a NaN, which max() would
    lose."""
    found = []
    for what in _Rows._fields:
        pairs = zip(getattr(got, what), getattr(wanted, what), strict=True)
        errors = [np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]
        found.append((float(np.maximum.reduce([0.0, *errors])), what))
    return next((one for one in found if math.isnan(one[0])), max(found))


def _rms(values: np.ndarray[Any, Any]) -> float:
    return float(np.sqrt(np.square(values, dtype=np.float64).mean()))


def _kl(wanted: np.ndarray[Any, Any], got: np.ndarray[Any, Any]) -> float:
    """Mean KL(wanted || got) over rows of logits, in nats."""
    p, q = (torch.from_numpy(rows).double().log_softmax(-1) for rows in (wanted, got))
    return float((p.exp() * (p - q)).sum(-1).mean())


def _chunks(lengths: list[int], is_last: bool) -> list[Chunk]:
    """The first tokens of every prompt, or the rest of those that have one."""
    firsts = [min(first, length) for first, length in zip(FIRST, lengths, strict=True)]
    if not is_last:
        return [Chunk(i, 0, first) for i, first in enumerate(firsts)]
    return [Chunk(i, f, n - f) for i, (f, n) in enumerate(zip(firsts, lengths, strict=True)) if n > f]


def _batch(prompts: list[_Prompt], chunks: list[Chunk], program: Program, runner: ModelRunner) -> Batch:
    generator, windows = torch.Generator().manual_seed(0), runner.page_windows
    step = step_inputs(chunks, runner.page_size, len(prompts), generator, max(LENGTHS), windows)
    arrays = {name: np.ascontiguousarray(value.numpy()) for name, value in step.tensors.items()}
    groups = range(1, len(windows))
    windowed = tuple((arrays.pop(f"page_table_{g}"), arrays.pop(f"slot_mapping_{g}")) for g in groups)
    arrays["positions"] = arrays["positions"][0]
    ids = np.concatenate([prompts[c.request].ids[c.start : c.start + c.length] for c in chunks])
    given = [
        states[c.start : c.start + c.length]
        for c in chunks
        if (states := prompts[c.request].features) is not None
    ]
    features = narrow(np.concatenate(given), _features_dtype(program)) if given else None
    return Batch(input_ids=ids, windowed=windowed, features=features, **arrays)
