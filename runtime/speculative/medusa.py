"""Medusa heads: each guesses a token further ahead, all from the target's features of one token (Cai et al. 2024)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.batch import Batch, build_batch
from octavo.runtime.chunk import Chunk
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.request import Branch
from octavo.runtime.speculative.choose_draft import Drafting
from octavo.runtime.speculative.draft import Draft
from octavo.runtime.speculative.draft_features import PendingFeatures, by_chunk
from octavo.runtime.speculative.model import DraftModel
from octavo.runtime.speculative.proposer import Asked


class MedusaProposer:
    """Chains of at most `num_heads` tokens, of all branches in one step of the heads. No head sees what those before it
    chose."""

    name = "medusa"
    has_tree = False

    def __init__(self, model: DraftModel, num_heads: int) -> None:
        self._model = model
        self._num_heads = num_heads
        self._features: WeakKeyDictionary[Branch, PendingFeatures] = WeakKeyDictionary()
        self._like: NDArray[Any] | None = None

    def use_pages(self, memory: PagedMemory) -> None:
        pass

    def move_pages(self, moves: Sequence[Move]) -> None:
        pass

    def observe(self, chunks: Sequence[Chunk], batch: Batch, features: NDArray[Any] | None) -> None:
        """Keep the features of each branch's step: those of the last accepted token are in it."""
        assert features is not None, "heads beside a target without features"
        self._like = features[:1]
        for chunk, rows in by_chunk(chunks, features):
            pending = self._features[chunk.branch] = PendingFeatures()
            pending.add(chunk.start, rows)

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        chunks = [Chunk(each.request, each.branch, len(each.branch.tokens) - 1, 1) for each in asked]
        batch = build_batch(chunks, self._model.runner.page_size, lambda _: 1)
        features = np.concatenate([self._read(each.branch) for each in asked])
        logits = self._model.runner.run(replace(batch, features=features, windowed=()))
        logits = logits.reshape(len(asked), self._num_heads, -1)
        return [self._draft(each, rows) for each, rows in zip(asked, logits, strict=True)]

    def _read(self, branch: Branch) -> NDArray[Any]:
        """(1, F) of the token before the newest."""
        assert self._like is not None, "the target ran no step"
        place = len(branch.tokens) - 2
        pending = self._features.get(branch) or PendingFeatures()
        return pending.of(place, place + 1, self._like)

    def _draft(self, asked: Asked, rows: NDArray[np.float32]) -> Draft:
        drafting = Drafting(asked)
        for row in rows:
            if not drafting.is_done:
                drafting.add(row, self._model.target_ids, self._model.vocab_size)
        return drafting.finish()
