"""A compiled model that drafts: a smaller one, the target in fewer bits or layers, a head that reads features."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.batch import Batch, build_batch
from octavo.runtime.chunk import Chunk
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.request import Branch
from octavo.runtime.speculative.choose_draft import Drafting
from octavo.runtime.speculative.draft import Draft, chain
from octavo.runtime.speculative.draft_features import PendingFeatures, by_chunk
from octavo.runtime.speculative.draft_pages import FilledSlots
from octavo.runtime.speculative.proposer import Asked

# A head reads the features of so many decoded tokens at once, if it is not asked for drafts before.
MOST_PENDING = 32
Features = NDArray[Any]


@dataclass(frozen=True)
class DraftModel:
    """A draft model beside a target.

    runner        its pages have the target's numbers and size
    vocab_size    the target's
    max_tokens    of one step of the draft model
    target_ids    (its vocabulary,) the target's id of each of its tokens; None: the same
    has_features  it reads the target's features
    own_width     of its own features, if they have columns of their own behind the target's (EAGLE-3); 0: they stand
                  in the target's place
    shares_pages  its pages are the target's own memory: what the target computed need not be computed again
    groups        for each of its page groups that of the target whose pages it uses
    """

    runner: ModelRunner
    vocab_size: int
    max_tokens: int
    target_ids: NDArray[np.int64] | None = None
    has_features: bool = False
    own_width: int = 0
    shares_pages: bool = False
    groups: tuple[int, ...] = (0,)


@dataclass
class _Progress:
    """How far the draft model is with a branch.

    num_tokens  of the branch that it has keys and values of; then those of the last draft, drafted
    features    of the target, of those that it has not read
    """

    num_tokens: int
    drafted: tuple[int, ...] = ()
    features: PendingFeatures = field(default_factory=PendingFeatures)

    def settle(self, tokens: Sequence[int]) -> None:
        """What was accepted of the last draft need not be computed again."""
        following = tokens[self.num_tokens : -1][: len(self.drafted)]  # the newest is asked what follows it
        for ours, theirs in zip(self.drafted, following, strict=False):
            if ours != theirs:
                break
            self.num_tokens += 1


class ModelProposer:
    """Chains from a draft model, of all branches together: a step of it for each depth.

    A head's row for a token reads the target's features of the token before; while it drafts, its own stand in for
    these (Li et al. 2024, EAGLE). Where the target did not compute a token in this request, because the prefix cache
    had it, features are zeros: the draft is worse for it, the output is not.
    """

    has_tree = False

    def __init__(self, model: DraftModel, name: str = "model") -> None:
        self.name = name
        self._model = model
        self._progress: WeakKeyDictionary[Branch, _Progress] = WeakKeyDictionary()
        self._like: Features | None = None  # features of the last step: their width and dtype

    def use_pages(self, memory: PagedMemory) -> None:
        self._filled = FilledSlots(memory, self._model.groups[0])

    def move_pages(self, moves: Sequence[Move]) -> None:
        if not self._model.shares_pages:
            self._model.runner.move_pages(moves)
            self._filled.move(moves)

    def observe(self, chunks: Sequence[Chunk], batch: Batch, features: Features | None) -> None:
        """A head keeps the features of decoded tokens until it drafts, and reads those of prompts now."""
        if not self._model.has_features:
            return
        assert features is not None, "a head beside a target without features"
        features = _beside_zeros(features, self._model.own_width, before=False)
        self._like, late = features[:1], []
        for chunk, rows in by_chunk(chunks, features):
            progress = self._progress_of(chunk.branch)
            progress.features.add(chunk.start, rows)
            known = chunk.start + chunk.length
            if known - progress.num_tokens > (MOST_PENDING if chunk.is_sampled and chunk.length == 1 else 0):
                late.append((chunk.request, chunk.branch, known))
        for request, branch, end in late:
            for start, length in self._spans(branch, end):
                self._run([Chunk(request, branch, start, length)], 0, [self._read(branch, start, length)])
            self._settle(branch, end)

    def _progress_of(self, branch: Branch) -> _Progress:
        """What is in the pages counts; a request that was given new ones begins again."""
        if branch not in self._progress:
            self._progress[branch] = _Progress(branch.table.num_tokens)
        progress = self._progress[branch]
        if self._model.shares_pages:
            progress.num_tokens = branch.table.num_tokens
            return progress
        before = progress.num_tokens
        progress.num_tokens = min(before, self._filled.count(branch.table))
        if progress.num_tokens == before:
            progress.settle(branch.tokens)
        if progress.num_tokens > before:
            self._filled.fill(branch.table, before, progress.num_tokens)
        progress.drafted = ()
        return progress

    def _spans(self, branch: Branch, end: int) -> list[tuple[int, int]]:
        """(start, length) of steps of the draft model up to token `end`."""
        start, most = self._progress[branch].num_tokens, self._model.max_tokens
        return [(first, min(most, end - first)) for first in range(start, end, most)]

    def _read(self, branch: Branch, start: int, length: int) -> Features | None:
        """What a head reads beside tokens start : start + length: features of the token before each."""
        if not self._model.has_features:
            return None
        assert self._like is not None, "the target ran no step"
        return self._progress[branch].features.of(start - 1, start + length - 1, self._like)

    def _settle(self, branch: Branch, end: int) -> None:
        progress = self._progress[branch]
        if not self._model.shares_pages:
            self._filled.fill(branch.table, progress.num_tokens, end)
        progress.num_tokens = end
        progress.features.forget(end - 1)

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        """Catch up with the target, then draft depth by depth."""
        draftings = [Drafting(each) for each in asked]
        for group in self._caught_up(draftings):
            self._deepen(group)
        while growing := [each for each in draftings if not each.is_done]:
            for first in range(0, len(growing), self._model.max_tokens):
                self._deepen([_Next.behind(each) for each in growing[first : first + self._model.max_tokens]])
        for each in draftings:
            # A head computes accepted tokens again: the target's features tell it more than its own did.
            fed = () if self._model.has_features else each.token_ids[:-1]
            self._progress[each.asked.branch].drafted = tuple(fed)
        return [each.finish() for each in draftings]

    def _caught_up(self, draftings: Sequence[Drafting]) -> list[list["_Next"]]:
        """The steps that end with each branch's newest token; what does not fit into them is computed here."""
        groups: list[list[_Next]] = [[]]
        for each in draftings:
            request, branch = each.asked.request, each.asked.branch
            self._progress_of(branch)
            *before, (start, length) = self._spans(branch, len(branch.tokens))
            for span in before:
                self._run([Chunk(request, branch, *span)], 0, [self._read(branch, *span)])
            own = _Next(each, Chunk(request, branch, start, length), self._read(branch, start, length))
            if sum(other.chunk.length for other in groups[-1]) + length > self._model.max_tokens:
                groups.append([])
            groups[-1].append(own)
            self._settle(branch, len(branch.tokens))
        return groups

    def _deepen(self, steps: Sequence["_Next"]) -> None:
        """One step of the draft model, and a token of each draft."""
        logits = self._run([each.chunk for each in steps], 1, [each.features for each in steps])
        made = self._own_features()
        ends = np.cumsum([each.chunk.num_tokens for each in steps])
        for index, (each, end) in enumerate(zip(steps, ends.tolist(), strict=True)):
            each.drafting.add(logits[index], self._model.target_ids, self._model.vocab_size)
            each.drafting.features = None if made is None else made[end - 1 : end].copy()

    def _own_features(self) -> Features | None:
        """What the draft model made of its last step, as it reads it in the next."""
        made = self._model.runner.features
        if made is None or not self._model.own_width:
            return made
        assert self._like is not None, "the target ran no step"
        return _beside_zeros(made, self._like.shape[1] - self._model.own_width, before=True)

    def _run(
        self, chunks: Sequence[Chunk], num_wanted: int, features: Sequence[Features | None]
    ) -> NDArray[np.float32]:
        batch = build_batch(chunks, self._model.runner.page_size, lambda _: num_wanted)
        groups = [(batch.page_table, batch.slot_mapping), *batch.windowed]
        (page_table, slot_mapping), *windowed = (groups[group] for group in self._model.groups)
        rows = [each for each in features if each is not None]
        return self._model.runner.run(
            replace(
                batch, page_table=page_table, slot_mapping=slot_mapping, windowed=tuple(windowed),
                features=np.concatenate(rows) if rows else None,
            )
        )  # fmt: skip


def _beside_zeros(features: Features, width: int, before: bool) -> Features:
    """With so many columns of zeros in front, or behind."""
    if not width:
        return features
    zeros = np.zeros((len(features), width), features.dtype)
    return np.concatenate([zeros, features] if before else [features, zeros], axis=1)


class _Next(NamedTuple):
    """What the draft model computes of a branch in its next step, and what a head reads beside it."""

    drafting: Drafting
    chunk: Chunk
    features: Features | None

    @classmethod
    def behind(cls, drafting: Drafting) -> "_Next":
        """The token that was drafted last. It lies behind the branch, so it comes as a draft of it."""
        asked = drafting.asked
        newest = chain(drafting.token_ids[-1:])
        return cls(
            drafting, Chunk(asked.request, asked.branch, drafting.position - 1, 0, newest), drafting.features
        )
