"""Speculation within a step: who is asked for drafts, room for them, drafts into chunks, tokens out of logits."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import OutOfPages
from octavo.runtime.batch import MAX_TREE_TOKENS, Batch
from octavo.runtime.chunk import Chunk
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.request import Branch, Request
from octavo.runtime.sampler import RandomKey, Sampled
from octavo.runtime.speculative.accept import Rule, accept
from octavo.runtime.speculative.acceptance import accepted_nodes
from octavo.runtime.speculative.draft import NO_DRAFT, ROOT
from octavo.runtime.speculative.figures import Figures
from octavo.runtime.speculative.policy import Policy
from octavo.runtime.speculative.proposer import Asked, Proposer

Keys = Callable[[Request, int], RandomKey]


@dataclass
class Speculator:
    """Asks, verifies and counts. It changes no request: the scheduler's commit does.

    rule     of verification for drafts that were drawn. A request with a seed of its own is verified by equality, as
             the lengths of its drafts depend on what else the machine does, and its output must not
    figures  counts since the engine was made
    """

    proposer: Proposer
    policy: Policy
    rule: Rule = "block"
    figures: Figures = field(default_factory=Figures)
    _rounds: WeakKeyDictionary[Branch, int] = field(default_factory=WeakKeyDictionary)

    def ask(self, chunks: Sequence[Chunk], memory: PagedMemory, budget: int, keys: Keys) -> list[Asked]:
        """The branches that get drafts in this step, with room in their pages for them.

        budget  tokens that the step may have
        """
        able = [chunk for chunk in chunks if _can_speculate(chunk)]
        num_known = sum(chunk.length for chunk in chunks)
        wanted = self.policy.lengths([chunk.branch for chunk in able], num_known)
        spare, asked = budget - num_known, []
        for chunk, length in zip(able, wanted, strict=True):
            most = min(length, spare, self._most(chunk))
            if most > 0 and self._reserve(chunk, memory, most):
                spare -= most
                asked.append(self._asked(chunk, most, keys))
        return asked

    def _most(self, chunk: Chunk) -> int:
        """Drafts that could all be accepted, with one more token behind them."""
        left = chunk.request.max_len - len(chunk.branch.tokens) - 1
        return min(left, MAX_TREE_TOKENS - chunk.length) if self.proposer.has_tree else left

    def _reserve(self, chunk: Chunk, memory: PagedMemory, most: int) -> bool:
        """Drafts never take pages from another request: where none are free, nothing is drafted."""
        try:
            memory.reserve(chunk.branch.table, len(chunk.branch.tokens) + most)
        except OutOfPages:
            return False
        return True

    def _asked(self, chunk: Chunk, most: int, keys: Keys) -> Asked:
        request, branch = chunk.request, chunk.branch
        if branch.state is not None:
            branch.state.sync(branch.tokens)
        key = keys(request, branch.index)
        return Asked(
            request, branch, most, key, self._rounds.get(branch, 0), self._rule(request) == "equality"
        )

    def _rule(self, request: Request) -> Rule:
        if request.params.is_greedy:
            return "equality"
        return self.rule if request.params.seed is None or self.rule == "typical" else "equality"

    def draft(self, chunks: Sequence[Chunk], asked: Sequence[Asked]) -> list[Chunk]:
        """The chunks with what was drafted for them."""
        if not asked:
            return list(chunks)
        began = time.perf_counter()
        drafts = self.proposer.propose(asked)
        assert len(drafts) == len(asked), (
            f"{self.proposer.name}: {len(drafts)} drafts for {len(asked)} branches"
        )
        seconds = time.perf_counter() - began
        self.figures.draft_s += seconds
        self.policy.drafted(sum(each.most for each in asked), seconds)
        for each, draft in zip(asked, drafts, strict=True):
            assert len(draft) <= each.most, (
                f"{self.proposer.name}: {len(draft)} drafts, {each.most} were asked for"
            )
            assert all(ROOT <= parent < node for node, parent in enumerate(draft.parents)), (
                f"{self.proposer.name}: a node does not lie behind its parent: {draft.parents}"
            )
            self._rounds[each.branch] = each.round + 1
        branches = [each.branch for each in asked]
        trimmed = self.policy.trim(branches, drafts, sum(chunk.length for chunk in chunks))
        by_branch = {id(branch): draft for branch, draft in zip(branches, trimmed, strict=True)}
        return [chunk._replace(draft=by_branch.get(id(chunk.branch), NO_DRAFT)) for chunk in chunks]

    def observe(
        self, chunks: Sequence[Chunk], batch: Batch, features: NDArray[np.generic] | None, seconds: float
    ) -> None:
        """The target ran this step, in so many seconds."""
        self.proposer.observe(chunks, batch, features)
        if all(chunk.is_sampled and chunk.length == 1 for chunk in chunks):
            self.policy.timed(len(batch.input_ids), seconds)
        self.figures.count_step(chunks, seconds)

    def verify(self, chunk: Chunk, logits: NDArray[np.float32], key: RandomKey) -> list[Sampled]:
        """The tokens that the chunk's branch goes on with, at least one; ExecutionError where `accept` raises it."""
        began = time.perf_counter()
        branch, draft = chunk.branch, chunk.draft
        round = self._rounds[branch] - 1
        tokens = accept(chunk, logits, key, round, self._rule(chunk.request))
        ids = [each.token_id for each in tokens[: _num_emitted(chunk, tokens)]]
        has_ended = ids[-1] in chunk.request.stop_token_ids
        self.policy.record(branch, draft, ids, has_ended)
        self.figures.count_round(draft, accepted_nodes(draft, ids), len(ids), has_ended)
        self.figures.verify_s += time.perf_counter() - began
        return tokens


def _can_speculate(chunk: Chunk) -> bool:
    """A branch that has an answer already and is about to go on with one token: no beam, no report of the prompt."""
    request = chunk.request
    has_begun = len(chunk.branch.tokens) > request.prompt_len
    return (
        chunk.is_sampled
        and has_begun
        and request.params.beam_width is None
        and not request.wants_prompt_report
    )


def _num_emitted(chunk: Chunk, tokens: Sequence[Sampled]) -> int:
    """Tokens up to the one that ends the branch."""
    ends = [place for place, each in enumerate(tokens, 1) if each.token_id in chunk.request.stop_token_ids]
    return ends[0] if ends else len(tokens)
