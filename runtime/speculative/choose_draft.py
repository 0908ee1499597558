"""The next drafted token of a branch, from a draft model's logits."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.runtime.sampler import DRAFT_STREAM, draw, probabilities, uniform
from octavo.runtime.speculative.draft import NO_DRAFT, ROOT, Distribution, Draft
from octavo.runtime.speculative.proposer import Asked

Logits = NDArray[np.float32]


@dataclass
class Drafting:
    """A chain in the making. The branch's state follows it until `finish`.

    features  (1, F) of a head behind the last token that it read
    """

    asked: Asked
    token_ids: list[int] = field(default_factory=list)
    probs: list[Distribution | None] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    features: NDArray[Any] | None = None
    is_stuck: bool = False
    _advanced: int = 0

    @property
    def is_done(self) -> bool:
        return self.is_stuck or len(self.token_ids) >= self.asked.most

    @property
    def position(self) -> int:
        """Of the next token in its sequence."""
        return len(self.asked.branch.tokens) + len(self.token_ids)

    def add(self, logits: Logits, target_ids: NDArray[np.int64] | None, vocab_size: int) -> None:
        """Choose the next token from a row of logits of the draft model, processed as the target's are.

        logits      (vocab,), or (len(target_ids),) of the target's tokens with these ids
        vocab_size  the target's
        Where nothing that the draft model knows may follow, the chain ends.
        """
        request, state = self.asked.request, self.asked.branch.state
        if not np.isfinite(logits.max()):  # a broken draft model drafts nothing; the target is asked as ever
            self.is_stuck = True
            return
        if state is None and request.params.is_greedy:
            row = logits if target_ids is not None else logits[:vocab_size]
            best = int(row.argmax())
            self._take(best if target_ids is None else int(target_ids[best]), None, _share(row, best))
        else:
            row = self._processed(_in_target_ids(logits, target_ids, vocab_size))
            if not np.isfinite(row.max()):
                self.is_stuck = True
                return
            if request.params.is_greedy:
                best = int(row.argmax())
                self._take(best, None, _share(row, best))
            else:
                self._draw(row)
        if self.token_ids[-1] in request.stop_token_ids:
            self.is_stuck = True
        elif state is not None:
            state.advance(self.token_ids[-1:])
            self._advanced += 1

    def _processed(self, row: Logits) -> Logits:
        state = self.asked.branch.state
        try:
            return row if state is None else state.apply(row)
        except ExecutionError:  # the target will say so of its own row, if it comes there
            return np.full_like(row, -np.inf)

    def _draw(self, row: Logits) -> None:
        """By the noise of the target's own draw where that decides, so that both choose alike; else by its own."""
        asked = self.asked
        distribution = probabilities(row, asked.request.params)
        if asked.is_coupled:
            token_id = draw(distribution, uniform(asked.key, self.position))
            self._take(token_id, None, float(distribution[token_id]))
            return
        token_id = draw(distribution, uniform(asked.key, self.position, DRAFT_STREAM, asked.round))
        self._take(token_id, distribution, float(distribution[token_id]))

    def _take(self, token_id: int, probs: Distribution | None, score: float) -> None:
        self.token_ids.append(token_id)
        self.probs.append(probs)
        self.scores.append(score)

    def finish(self) -> Draft:
        """The draft; the state is where it was before."""
        state, count = self.asked.branch.state, len(self.token_ids)
        if state is not None:
            state.rollback(self._advanced)
        if not count:
            return NO_DRAFT
        scores = tuple(self.scores) if self.asked.is_coupled else None
        return Draft(tuple(self.token_ids), tuple(range(ROOT, count - 1)), tuple(self.probs), scores=scores)


def _share(row: Logits, token_id: int) -> float:
    return 1.0 / float(np.exp(row - row[token_id]).sum())


def _in_target_ids(logits: Logits, target_ids: NDArray[np.int64] | None, vocab_size: int) -> Logits:
    """A row (vocab_size,): tokens that the draft model does not know have -inf. Padded ids of its own are left out."""
    if target_ids is None and len(logits) == vocab_size:
        return logits
    row = np.full(vocab_size, -np.inf, np.float32)
    if target_ids is None:
        count = min(len(logits), vocab_size)
        row[:count] = logits[:count]
    else:
        row[target_ids] = logits
    return row
