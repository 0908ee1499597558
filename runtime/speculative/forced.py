"""Tokens that a grammar leaves no choice about, as drafts."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.batch import Batch
from octavo.runtime.chunk import Chunk
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.speculative.draft import NO_DRAFT, Draft, chain
from octavo.runtime.speculative.proposer import Asked, Proposer


class Forced:
    """Where the grammar of a branch forces tokens these are its draft; another proposer, if there is one, drafts for
    the others."""

    def __init__(self, inner: Proposer | None = None) -> None:
        self._inner = inner

    @property
    def name(self) -> str:
        return "grammar" if self._inner is None else self._inner.name

    @property
    def has_tree(self) -> bool:
        return self._inner is not None and self._inner.has_tree

    def use_pages(self, memory: PagedMemory) -> None:
        if self._inner is not None:
            self._inner.use_pages(memory)

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        """A branch's state has taken in all its tokens."""
        drafts = [self._forced(each) for each in asked]
        if self._inner is None:
            return drafts
        free = [each for each, draft in zip(asked, drafts, strict=True) if not len(draft)]
        others = iter(self._inner.propose(free) if free else ())
        return [draft if len(draft) else next(others) for draft in drafts]

    def _forced(self, asked: Asked) -> Draft:
        state = asked.branch.state
        token_ids = state.forced()[: asked.most] if state is not None else []
        return chain(token_ids, [1.0] * len(token_ids)) if token_ids else NO_DRAFT

    def observe(self, chunks: Sequence[Chunk], batch: Batch, features: NDArray[np.generic] | None) -> None:
        if self._inner is not None:
            self._inner.observe(chunks, batch, features)

    def move_pages(self, moves: Sequence[Move]) -> None:
        if self._inner is not None:
            self._inner.move_pages(moves)
