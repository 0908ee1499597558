"""Which drafted tokens a branch goes on with: the logits of a step, processed row by row, and a rule."""

from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.runtime.chunk import Chunk
from octavo.runtime.sampler import (
    RandomKey,
    Row,
    Sampled,
    draw,
    not_finite,
    probabilities,
    processed_logits,
    reported,
    sample,
    uniform,
)
from octavo.runtime.speculative.draft import ROOT, Distribution
from octavo.runtime.speculative.typical import verify_typical
from octavo.runtime.speculative.verify import Noise, Verdict, verify_block, verify_tokens, walk

# block: chains by Sun et al. 2024, trees as token. token: Leviathan et al. 2023, Chen et al. 2023; siblings by Miao et
# al. 2024 and Li et al. 2024. equality: output does not depend on drafts at all.
# typical: not lossless, Cai et al. 2024.
Rule = Literal["block", "token", "equality", "typical"]
RULES: tuple[Rule, ...] = get_args(Rule)
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
        if rule == "typical":
            return _told(chunk, rows, verify_typical(chunk.draft, rows.target, rows.choose))
        if chunk.draft.is_fixed or rule == "equality":
            return _coupled(chunk, rows)
        noise = Noise(key, len(chunk.branch.tokens), round)
        is_block = rule == "block" and chunk.draft.is_chain
        return _told(
            chunk, rows, (verify_block if is_block else verify_tokens)(chunk.draft, rows.target, noise)
        )
    finally:
        rows.rollback()


class _Rows:
    """The target's rows behind nodes, asked for down a path; the state follows it."""

    def __init__(self, chunk: Chunk, logits: Logits, key: RandomKey) -> None:
        self.request, self.branch, self.draft = chunk.request, chunk.branch, chunk.draft
        self.logits = logits
        self._key = key
        self._depth = 0  # nodes above the row that was asked for last
        self._advanced = 0  # of these, in the state
        self._known: dict[int, Distribution] = {}

    def row(self, node: int) -> Row:
        """Of the token behind a node that lies behind the one asked for before."""
        state = self.branch.state
        if node != ROOT:
            self._depth += 1
            if state is not None:
                state.advance([self.draft.token_ids[node]])
                self._advanced += 1
        return Row(self.request.params, self._key, len(self.branch.tokens) + self._depth, state)

    def is_end(self, node: int) -> bool:
        """Whether the branch ends with this node's token, so that nothing behind it matters."""
        return node != ROOT and self.draft.token_ids[node] in self.request.stop_token_ids

    def target(self, node: int) -> Distribution:
        """What the token behind a node is drawn from. Behind one that ends the branch, or that the target never draws,
        anything: a grammar could not follow there."""
        if node not in self._known:
            self._known[node] = self._distribution(node)
        return self._known[node]

    def _distribution(self, node: int) -> Distribution:
        if self.is_end(node) or (node != ROOT and self._is_impossible(node)):
            return _anything(self.logits.shape[1])
        row = self.row(node)
        logits = self.logits[node + 1]
        if not np.isfinite(logits.max()):
            raise ExecutionError(not_finite(logits, row.position))
        return probabilities(processed_logits(logits, row), row.params)

    def _is_impossible(self, node: int) -> bool:
        parent, token_id = self.draft.parents[node], self.draft.token_ids[node]
        is_behind_one = parent != ROOT and self._is_impossible(parent)
        return is_behind_one or not 0 <= token_id < self.logits.shape[1] or self.target(parent)[token_id] == 0

    def choose(self, node: int) -> int:
        """The token that plain decoding draws behind a node whose target was asked for."""
        depth = 0 if node == ROOT else self.draft.depth(node) + 1
        return draw(self.target(node), uniform(self._key, len(self.branch.tokens) + depth))

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


def _told(chunk: Chunk, rows: _Rows, verdict: Verdict) -> list[Sampled]:
    """The tokens with what their request wants to know of them."""
    tokens = [*(chunk.draft.token_ids[node] for node in verdict.path), verdict.token_id]
    above = (ROOT, *verdict.path)
    return [
        reported(rows.logits[node + 1], token_id, chunk.request.params)
        for node, token_id in zip(above, tokens, strict=True)
    ]


def _anything(vocab_size: int) -> Distribution:
    distribution = np.zeros(vocab_size)
    distribution[0] = 1.0
    return distribution
