"""Which drafted tokens a branch goes on with: the logits of a step, processed row by row, and a rule."""

from collections.abc import Callable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.runtime.chunk import Chunk
from octavo.runtime.sampler import (
    RandomKey,
    Row,
    Sampled,
    not_finite,
    probabilities,
    processed_logits,
    reported,
    sample,
)
from octavo.runtime.speculative.draft import ROOT, Distribution
from octavo.runtime.speculative.verify import Noise, Verdict, verify_block, verify_tokens, walk

# block: chains by Sun et al. 2024, trees as token. token: Leviathan et al. 2023, Chen et al. 2023; siblings by Miao et
# al. 2024 and Li et al. 2024. equality: output does not depend on drafts at all.
Rule = Literal["block", "token", "equality"]
RULES: tuple[Rule, ...] = ("block", "token", "equality")
Logits = NDArray[np.float32]
_NO_TOKEN = -1


def accept(chunk: Chunk, logits: Logits, key: RandomKey, round: int, rule: Rule) -> list[Sampled]:
    """The accepted tokens of a chunk's draft of N nodes, and the one behind them.

    logits  (1 + N, vocab) behind the newest token and behind each node; they stay as they are
    Raises ExecutionError where logits are broken or nothing may follow.
    The branch's state has taken in the branch's tokens, and has afterwards again.
    """
    rows = _Rows(chunk, logits, key)
    try:
        if chunk.draft.is_fixed or rule == "equality":
            return _coupled(chunk, rows)
        return _drawn(chunk, rows, round, rule)
    finally:
        rows.rollback()


class _Rows:
    """The target's rows behind nodes, asked for down a path; the state follows it."""

    def __init__(self, chunk: Chunk, logits: Logits, key: RandomKey) -> None:
        self.request, self.branch, self.draft = chunk.request, chunk.branch, chunk.draft
        self.logits = logits
        self.key = key
        self._depth = 0  # nodes above the row that was asked for last
        self._advanced = 0  # of these, in the state

    def row(self, node: int) -> Row:
        """Of the token behind a node that lies behind the one asked for before."""
        state = self.branch.state
        if node != ROOT:
            self._depth += 1
            if state is not None:
                state.advance([self.draft.token_ids[node]])
                self._advanced += 1
        return Row(self.request.params, self.key, len(self.branch.tokens) + self._depth, state)

    def is_end(self, node: int) -> bool:
        """Whether the branch ends with this node's token."""
        return node != ROOT and self.draft.token_ids[node] in self.request.stop_token_ids

    def checked(self, node: int, position: int) -> Logits:
        logits: Logits = self.logits[node + 1]
        if not np.isfinite(logits.max()):
            raise ExecutionError(not_finite(logits, position))
        return logits

    def rollback(self) -> None:
        if self.branch.state is not None:
            self.branch.state.rollback(self._advanced)


def _coupled(chunk: Chunk, rows: _Rows) -> list[Sampled]:
    """What plain decoding chooses at every place, as long as it was drafted and does not end the branch."""
    taken: list[Sampled] = []

    def choose(node: int) -> int:
        if rows.is_end(node):
            return _NO_TOKEN
        (result,) = sample(rows.logits[node + 1 : node + 2], [rows.row(node)])
        if isinstance(result, ExecutionError):
            raise result
        taken.append(result)
        return result.token_id

    walk(chunk.draft, choose)
    return taken


def _drawn(chunk: Chunk, rows: _Rows, round: int, rule: Rule) -> list[Sampled]:
    """By what each token was drawn from. A token that ends the branch has nothing behind it that matters."""
    request, branch, draft = chunk.request, chunk.branch, chunk.draft

    def target(node: int) -> Distribution:
        if rows.is_end(node):
            return _anything(rows.logits.shape[1])
        row = rows.row(node)
        processed = processed_logits(rows.checked(node, row.position), row)
        return probabilities(processed, row.params)

    noise = Noise(rows.key, len(branch.tokens), round)
    verify: Callable[..., Verdict] = verify_block if rule == "block" and draft.is_chain else verify_tokens
    verdict = verify(draft, target, noise)
    tokens = [*(draft.token_ids[node] for node in verdict.path), verdict.token_id]
    above = (ROOT, *verdict.path)
    return [
        reported(rows.logits[node + 1], token_id, request.params)
        for node, token_id in zip(above, tokens, strict=True)
    ]


def _anything(vocab_size: int) -> Distribution:
    distribution = np.zeros(vocab_size)
    distribution[0] = 1.0
    return distribution
