"""What processing a branch's logits needs to remember: its tokens, counted, and how far its grammar is.

Order: grammar mask and bans -> logit bias -> repetition, frequency and presence penalty; temperature and what
cuts the distribution come after (sampler.py). What is masked stays masked: its logit is -inf.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.sampling_params import SamplingParams


class Matcher(Protocol):
    """How far the text of a branch is in its grammar."""

    def accept(self, token_ids: Sequence[int]) -> None: ...

    def rollback(self, count: int) -> None: ...

    def fork(self) -> "Matcher": ...

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens (vocab,) may follow. Raises ExecutionError for a grammar that cannot be followed."""
        ...

    def forced(self) -> list[int]:
        """Tokens of the only text that may follow, as far as there is only one; it may be written in other tokens."""
        ...


class TokenState:
    """Belongs to one branch. `sync` tells it the branch's tokens; `apply` changes nothing in it.

    prompt_len      tokens of the prompt, which are the first of the branch
    stop_token_ids  that end it: the model's end tokens, unless ignored, and those of params
    matcher         of params.structured, at its beginning
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_len: int,
        stop_token_ids: Collection[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        self._params = params
        self._prompt_len = prompt_len
        self._stop_ids = np.array(sorted(stop_token_ids), np.int64)
        bias = dict(params.logit_bias)
        self._bias_ids = np.array(list(bias), np.int64)
        self._bias = np.array(list(bias.values()), np.float32)
        self._matcher = matcher
        self._prompt_ids: NDArray[np.int64] | None = None  # distinct; taken in by the first sync
        self._generated: list[int] = []
        self._counts: Counter[int] = Counter()  # of generated tokens; none is 0

    def sync(self, tokens: Sequence[int]) -> None:
        """Take in those of the branch's tokens, prompt included, that came since the last call."""
        if self._prompt_ids is None:
            is_needed = self._params.repetition_penalty != 1
            self._prompt_ids = np.unique(np.array(tokens[: self._prompt_len] if is_needed else [], np.int64))
        num_seen = self._prompt_len + len(self._generated)
        assert len(tokens) >= num_seen, "tokens were dropped without a rollback"
        self.advance(tokens[num_seen:])

    def advance(self, token_ids: Sequence[int]) -> None:
        """Take in tokens that follow those taken in, drafted ones perhaps: `rollback` forgets them."""
        self._generated += token_ids
        self._counts.update(token_ids)
        if self._matcher is not None and token_ids:
            self._matcher.accept(token_ids)

    def rollback(self, count: int) -> None:
        """Forget the last `count` generated tokens."""
        assert 0 <= count <= len(self._generated), "more tokens dropped than were generated"
        if count == 0:
            return
        for token_id in self._generated[-count:]:
            self._counts[token_id] -= 1
            if self._counts[token_id] == 0:
                del self._counts[token_id]
        del self._generated[-count:]
        if self._matcher is not None:
            self._matcher.rollback(count)

    def forced(self) -> list[int]:
        """Tokens of the only text that the grammar lets follow; [] where it leaves a choice or there is none."""
        return [] if self._matcher is None else self._matcher.forced()

    def fork(self) -> "TokenState":
        """The state of a branch that goes on from here on its own."""
        forked = object.__new__(TokenState)
        forked.__dict__.update(self.__dict__)
        forked._generated = list(self._generated)
        forked._counts = Counter(self._counts)
        forked._matcher = None if self._matcher is None else self._matcher.fork()
        return forked

    def apply(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """The processed row (vocab,) of logits for the token after those taken in; the row given stays as it is.

        Raises ExecutionError if the grammar cannot be followed.
        """
        row = logits.copy()
        if self._matcher is not None:
            row[~self._matcher.allowed(len(row))] = -np.inf
        if len(self._generated) < self._params.min_tokens:
            row[self._stop_ids] = -np.inf
        row[self._bias_ids] += self._bias
        self._penalize(row)
        return row

    def _penalize(self, row: NDArray[np.float32]) -> None:
        params = self._params
        generated = np.fromiter(self._counts, np.int64, len(self._counts))
        if params.repetition_penalty != 1 and self._prompt_ids is not None:
            seen = np.concatenate([generated, self._prompt_ids])
            logits, penalty = row[seen], np.float32(params.repetition_penalty)
            row[seen] = np.where(
                logits < 0, logits * penalty, logits / penalty
            )  # twice the same where in both
        if params.frequency_penalty or params.presence_penalty:
            counts = np.fromiter(self._counts.values(), np.float32, len(generated))
            row[generated] -= np.float32(params.frequency_penalty) * counts
            row[generated] -= np.float32(params.presence_penalty)


def new_token_state(
    params: SamplingParams,
    prompt_len: int,
    stop_token_ids: Collection[int] = (),
    matcher: Matcher | None = None,
) -> TokenState | None:
    """A state for a request's first branch, or None where its logits are left as they are."""
    is_idle = (
        matcher is None
        and not params.min_tokens
        and not params.logit_bias
        and params.repetition_penalty == 1
        and not params.frequency_penalty
        and not params.presence_penalty
    )
    return None if is_idle else TokenState(params, prompt_len, stop_token_ids, matcher)
