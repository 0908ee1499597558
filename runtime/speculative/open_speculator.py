"""Options -> the speculator of an engine: its proposer, a draft model's runner beside the target's, its policy."""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.artifact import STEP_TIMES, Artifact
from octavo.compiler.errors import ArtifactError, OptionError
from octavo.compiler.program import FEATURES, TREE, Buffer, Program
from octavo.runtime.model_runner import ModelRunner, NativeRunner
from octavo.runtime.open_runner import is_for_gpu, open_runner
from octavo.runtime.speculative.forced import Forced
from octavo.runtime.speculative.medusa import MedusaProposer
from octavo.runtime.speculative.model import DraftModel, ModelProposer
from octavo.runtime.speculative.ngram import NGram
from octavo.runtime.speculative.options import Speculate
from octavo.runtime.speculative.policy import Adaptive, FixedLength, Policy
from octavo.runtime.speculative.proposer import Proposer
from octavo.runtime.speculative.speculator import Speculator
from octavo.runtime.speculative.step_times import read_step_times
from octavo.runtime.speculative.suffix import Suffix

TARGET_IDS = "draft/target_ids.json"


def open_speculator(
    options: Speculate, target: Artifact, runner: ModelRunner, num_threads: int | None = None
) -> Speculator:
    """What drafts for an engine over the target's runner. Raises OptionError for a draft that does not go with it."""
    return Speculator(
        Forced(_proposer(options, target, runner, num_threads)), _policy(options, target), options.rule
    )


def _policy(options: Speculate, target: Artifact) -> Policy:
    if options.length is not None:
        return FixedLength(options.length)
    if STEP_TIMES not in target.files:
        return Adaptive(options.most)
    return Adaptive(options.most, read_step_times(target.read(STEP_TIMES).decode(errors="replace")))


def _proposer(options: Speculate, target: Artifact, runner: ModelRunner, num_threads: int | None) -> Proposer:
    if options.method == "ngram":
        return NGram()
    if options.method == "suffix":
        return Suffix(is_tree=any(buffer.name == TREE for buffer in target.program.of_kind("input")))
    assert options.artifact is not None
    draft = Artifact.open(options.artifact)
    facts = draft.manifest["provenance"].get("draft", {})
    _check(draft, target, runner)
    if options.method == "self":
        return ModelProposer(_self_draft(draft, target, runner, num_threads, facts), "self")
    model = _beside(draft, target, runner, num_threads, facts)
    if facts.get("kind") == "medusa":
        return MedusaProposer(model, int(facts["heads"]))
    return ModelProposer(model, str(facts.get("kind", "model")))


def _check(draft: Artifact, target: Artifact, runner: ModelRunner) -> None:
    """Raise OptionError for a draft whose pages cannot have the target's numbers."""
    if draft.program.mesh.world > 1 or target.program.mesh.world > 1:
        raise OptionError(
            f"speculate: expected artifacts for one rank, got {target.program.mesh} and {draft.program.mesh} for the "
            "draft; compile both without parallel"
        )
    if is_for_gpu(draft) != is_for_gpu(target):
        raise OptionError(
            f"speculate: expected a draft for {target.manifest['target']}, got one for {draft.manifest['target']}; "
            "compile it for the target's machine"
        )
    if draft.program.page_size != runner.page_size:
        raise OptionError(
            f"speculate: expected a draft with pages of {runner.page_size} tokens, as they have the target's numbers, "
            f"got {draft.program.page_size}; compile it with page_size={runner.page_size}"
        )


def _beside(
    draft: Artifact, target: Artifact, runner: ModelRunner, num_threads: int | None, facts: Mapping[str, Any]
) -> DraftModel:
    """A draft with pages of its own."""
    target_ids = _target_ids(draft, target)
    num_heads, own_width = int(facts.get("heads", 1)), int(facts.get("own_width", 0))
    if target_ids is None and draft.model.vocab_size != num_heads * target.model.vocab_size:
        # Rows of a head may be padded; ids below the smaller of both are the same tokens, if the tokenizers are.
        _check_tokenizers(draft, target)
    has_features = _check_features(draft.program, target.program, own_width)
    own = open_runner(draft, runner.num_pages, num_threads, num_host_pages=runner.num_host_pages)
    return DraftModel(
        own, target.model.vocab_size, draft.model.max_batch_tokens, target_ids, has_features, own_width,
        groups=_groups(draft.program.page_windows, runner.page_windows),
    )  # fmt: skip


def _check_tokenizers(draft: Artifact, target: Artifact) -> None:
    name = "tokenizer/tokenizer.json"
    files = [artifact.read(name) if name in artifact.files else None for artifact in (draft, target)]
    if files[0] is None or files[0] != files[1]:
        raise OptionError(
            f"speculate: expected a draft of the target's {target.model.vocab_size} tokens, got "
            f"{draft.model.vocab_size} and another tokenizer; drafts have to be of the same tokens"
        )


def _target_ids(draft: Artifact, target: Artifact) -> NDArray[np.int64] | None:
    """The target's ids of the draft's tokens, where it knows fewer."""
    if TARGET_IDS not in draft.files:
        return None
    try:
        ids = np.array(json.loads(draft.read(TARGET_IDS)), np.int64)
    except (ValueError, TypeError, OverflowError) as error:
        raise ArtifactError(
            f"{draft.path}/{TARGET_IDS}: expected a list of token ids, got: {error}"
        ) from None
    most = target.model.vocab_size
    if (
        ids.ndim != 1
        or not len(ids)
        or ids.min() < 0
        or ids.max() >= most
        or len(set(ids.tolist())) != len(ids)
    ):
        raise ArtifactError(f"{draft.path}/{TARGET_IDS}: expected different token ids below {most}")
    return ids


def _check_features(draft: Program, target: Program, own_width: int) -> bool:
    """Whether the draft reads features; OptionError if the target does not make them, but for the draft's own."""
    read = [buffer for buffer in draft.of_kind("input") if buffer.name == FEATURES]
    if not read:
        return False
    made = [(buffer.dtype, int(buffer.shape[1])) for buffer in target.hidden_states]
    width = sum(size for _, size in made)
    wanted = int(read[0].shape[1]) - own_width
    if not made or made[0][0] != read[0].dtype or width != wanted:
        got = f"{made[0][0]} of width {width}" if made else "none"
        raise OptionError(
            f"speculate: the draft head reads features of its target, {read[0].dtype} of width {wanted}, and "
            f"the target makes {got}; compile the target with features=..., of the head's layers, in the same dtype"
        )
    return True


def _groups(draft: tuple[int | None, ...], target: tuple[int | None, ...]) -> tuple[int, ...]:
    """For each page group of the draft one of the target's whose pages hold all that it looks at."""
    groups = []
    for window in draft:
        wide = [
            group
            for group, other in enumerate(target)
            if other is None or (window is not None and window <= other)
        ]
        if not wide:
            raise OptionError(
                f"speculate: the draft looks back {window or 'at all'} tokens, and the target keeps pages for "
                f"{max(one or 0 for one in target)} only; use a draft with the target's windows, or n-grams"
            )
        groups.append(wide[0])
    return tuple(groups)


def _self_draft(
    draft: Artifact, target: Artifact, runner: ModelRunner, num_threads: int | None, facts: Mapping[str, Any]
) -> DraftModel:
    """A draft on the target's own pages: keys and values of accepted tokens are the target's."""
    if not isinstance(runner, NativeRunner):
        raise OptionError(
            f"speculate: expected a target on a processor for self=..., got {type(runner).__name__}; use draft=..., "
            "which has pages of its own"
        )
    if draft.model.vocab_size != target.model.vocab_size:
        raise OptionError(
            f"speculate: expected the target itself with fewer bits or layers, got a model of "
            f"{draft.model.vocab_size} tokens, not {target.model.vocab_size}; use draft=... for other models"
        )
    layers = facts.get("layers") or range(draft.model.num_layers)
    caches = _shared_caches(draft.program, target.program, runner.caches, list(layers))
    own = NativeRunner(draft, runner.num_pages, num_threads, caches=caches)
    return DraftModel(
        own, target.model.vocab_size, draft.model.max_batch_tokens, shares_pages=True,
        groups=_groups(draft.program.page_windows, runner.page_windows),
    )  # fmt: skip


def _shared_caches(
    draft: Program, target: Program, memory: Mapping[str, NDArray[Any]], layers: list[int]
) -> dict[str, NDArray[Any]]:
    """For each cache buffer of the draft the target's memory of the same layer."""
    theirs = {buffer.name: buffer for buffer in target.of_kind("cache")}
    shared = {}
    for buffer in draft.of_kind("cache"):
        kind, _, layer = buffer.name.rpartition("_")
        name = f"{kind}_{layers[int(layer)]}" if int(layer) < len(layers) else ""
        if name not in theirs or (theirs[name].dtype, theirs[name].shape) != (buffer.dtype, buffer.shape):
            raise OptionError(
                f"speculate: {_shown(buffer)} of the draft is not as {_shown(theirs.get(name))} of the target, so they "
                "cannot share pages; compile both with the same dtype and KV format, or use draft=..."
            )
        shared[buffer.name] = memory[name]
    return shared


def _shown(buffer: Buffer | None) -> str:
    return "no pages" if buffer is None else f"{buffer.name} {buffer.dtype} {list(buffer.shape)}"
