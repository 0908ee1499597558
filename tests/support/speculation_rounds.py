"""Rounds of speculation as the runtime plays them: drafts drawn by the real noise, logits processed, tokens accepted.

Only the models are made up: their logits are random, behind every run of tokens. Everything that decides is real.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
from drafted import Shape, Tokens, path_to
from numpy.typing import NDArray
from speculation_laws import Drafts, Law

from octavo.compiler.errors import ExecutionError
from octavo.runtime import sampler
from octavo.runtime.chunk import Chunk
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.prefix_cache import SHARED_KEY
from octavo.runtime.request import Branch, Request
from octavo.runtime.sampler import DRAFT_STREAM, RandomKey, draw
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative import accept, choose_draft
from octavo.runtime.speculative.accept import Rule
from octavo.runtime.speculative.choose_draft import Drafting
from octavo.runtime.speculative.draft import ROOT, Distribution, Draft
from octavo.runtime.speculative.proposer import Asked
from octavo.runtime.token_state import new_token_state

PROMPT = (0, 1, 1)
Logits = NDArray[np.float32]
HOT = SamplingParams(temperature=1.0)


@dataclass(frozen=True)
class Language:
    """Logits of a target and of a draft model.

    distance     how far the draft model's are from the target's
    num_unknown  tokens that the draft model has not, nor the target the same number of others
    """

    vocab_size: int
    seed: int
    distance: float = 0.8
    num_unknown: int = 0

    @cache  # noqa: B019 - as long as the run
    def target(self, tokens: Tokens) -> Logits:
        rng = np.random.default_rng([self.seed, 0, len(tokens), *tokens])
        logits = 1.5 * rng.standard_normal(self.vocab_size)
        logits[self.vocab_size - self.num_unknown :] = -np.inf
        return logits.astype(np.float32)

    @cache  # noqa: B019
    def proposer(self, tokens: Tokens) -> Logits:
        rng = np.random.default_rng([self.seed, 1, len(tokens), *tokens])
        logits = np.maximum(self.target(tokens), -2) + self.distance * rng.standard_normal(self.vocab_size)
        logits[: self.num_unknown] = -np.inf
        return logits.astype(np.float32)


@dataclass(frozen=True)
class Case:
    """What is drafted, and how it is verified.

    law         of what a round does: one for each of `params`; None: sequences of 3 tokens are looked at, and their
                law is that of plain decoding
    params      of requests that take turns
    ends_below  a chain ends behind a token that the draft model gave less than that
    """

    name: str
    language: Language
    shape: Shape
    rule: Rule
    law: Callable[[Drafts], Law] | None
    params: tuple[SamplingParams, ...] = (HOT,)
    ends_below: float = 0.0

    def laws(self) -> Law:
        """(params, accepted, next token) or (sequences of three tokens,); sums to 1."""
        if self.law is not None:
            return np.stack([self.law(self._drafts(params)) for params in self.params]) / len(self.params)
        p, size = self._drafts(self.params[0]).p, self.language.vocab_size
        after = np.array([[p((one, two)) for two in range(size)] for one in range(size)])
        second = np.array([p((one,)) for one in range(size)])
        return np.ravel(p(())[:, None, None] * second[:, :, None] * after)

    def _drafts(self, params: SamplingParams) -> Drafts:
        language = self.language

        @cache
        def p(tokens: Tokens) -> Distribution:
            return processed(params, tokens, language.target(tokens))

        @cache
        def q(tokens: Tokens) -> Distribution:
            return processed(params, tokens, language.proposer(tokens))

        def fixed(node: int, tokens: Tokens) -> int:
            return fixed_token(node, language.proposer(tokens))

        def ends(tokens: Tokens) -> bool:
            return bool(tokens) and float(q(tokens[:-1])[tokens[-1]]) < self.ends_below

        return Drafts(p, q, self.shape, fixed, ends)


def processed(params: SamplingParams, tokens: Tokens, logits: Logits) -> Distribution:
    """The distribution behind the prompt and these tokens."""
    state = new_token_state(params, len(PROMPT))
    if state is not None:
        state.sync((*PROMPT, *tokens))
        logits = state.apply(logits)
    return sampler.probabilities(logits, params)


def fixed_token(node: int, logits: Logits) -> int:
    """Of a node that a rule chooses: one of the best, another for each node."""
    return int(np.argsort(-logits, kind="stable")[node % len(logits)])


@cache
def _remembered(row: bytes, params: SamplingParams) -> Distribution:
    probs = sampler.probabilities(np.frombuffer(row, np.float32), params)
    probs.flags.writeable = False
    return probs


def probabilities(logits: Logits, params: SamplingParams) -> Distribution:
    """The real ones, each computed once."""
    return _remembered(logits.tobytes(), params)


_GENERATOR = np.random.Philox(key=np.zeros(2, np.uint64))


def kept_bits(key: RandomKey, position: int, stream: int, index: int, count: int) -> NDArray[np.uint64]:
    """What `random_bits` gives, in a quarter of the time: that makes a generator for each place, this keeps one."""
    place: Any = {
        "counter": np.array([0, position, stream, index], np.uint64),
        "key": np.array([key.seed, key.stream], np.uint64),
    }
    _GENERATOR.state = {
        "bit_generator": "Philox", "state": place, "buffer": np.zeros(4, np.uint64), "buffer_pos": 4,
        "has_uint32": 0, "uinteger": 0,
    }  # fmt: skip
    bits: NDArray[np.uint64] = _GENERATOR.random_raw(count)
    return bits


@contextlib.contextmanager
def sped_up() -> Iterator[None]:
    """Pure functions that answer alike, sooner."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sampler, "random_bits", kept_bits))
        for caller in (accept, choose_draft):
            stack.enter_context(mock.patch.object(caller, "probabilities", probabilities))
        yield


class Player:
    """Plays a case. `draft` may be another than the right one."""

    def __init__(self, case: Case, params: SamplingParams, draft: "Propose | None" = None) -> None:
        self.case = case
        self.language = case.language
        self._draft = draft or Player.draft
        branch = Branch(
            0, list(PROMPT), PagedMemory(4, 4).new_table(SHARED_KEY), new_token_state(params, len(PROMPT))
        )
        self.request = Request(0, len(PROMPT), params, 1000, [branch])
        self.branch = branch

    def play(self, key: RandomKey, round: int) -> list[int]:
        """The tokens that a round goes on with."""
        if self.branch.state is not None:
            self.branch.state.sync(self.branch.tokens)
        is_coupled = self.case.rule == "equality"
        asked = Asked(self.request, self.branch, len(self.case.shape.parents), key, round, is_coupled)
        draft = self._draft(self, asked)
        before = self.generated
        rows = [self.language.target(before)]
        rows += [
            self.language.target(before + path_to(draft.parents, draft.token_ids, n))
            for n in range(len(draft))
        ]
        chunk = Chunk(self.request, self.branch, len(self.branch.tokens) - 1, 1, draft)
        return [each.token_id for each in accept.accept(chunk, np.stack(rows), key, round, self.case.rule)]

    def play_sequence(self, key: RandomKey, length: int) -> list[int]:
        """The first tokens of as many rounds as they take."""
        round = 0
        while len(self.generated) < length:
            self.branch.tokens += self.play(key, round)
            round += 1
        tokens = self.branch.tokens[len(PROMPT) :][:length]
        del self.branch.tokens[len(PROMPT) :]
        return tokens

    @property
    def generated(self) -> Tokens:
        return tuple(self.branch.tokens[len(PROMPT) :])

    def draft(self, asked: Asked) -> Draft:
        shape = self.case.shape
        is_chain = shape.parents == tuple(range(ROOT, len(shape.parents) - 1))
        return self._drawn_chain(asked) if is_chain and not shape.fixed else self._tree(asked)

    def _drawn_chain(self, asked: Asked) -> Draft:
        drafting = Drafting(asked)
        while not drafting.is_done and (not drafting.scores or drafting.scores[-1] >= self.case.ends_below):
            tokens = self.generated + tuple(drafting.token_ids)
            drafting.add(self.language.proposer(tokens), None, self.language.vocab_size)
        return drafting.finish()

    def _tree(self, asked: Asked) -> Draft:
        """Each node by a number of its own."""
        shape, count = self.case.shape, len(self.case.shape.parents)
        tokens: list[int] = []
        probs: list[Distribution | None] = []
        for node, parent in enumerate(shape.parents):
            path = path_to(shape.parents, tuple(tokens), parent)
            logits = self.language.proposer(self.generated + path)
            if node in shape.fixed:
                tokens.append(fixed_token(node, logits))
                probs.append(None)
                continue
            position = len(self.branch.tokens) + len(path)
            word = int(sampler.random_bits(asked.key, position, DRAFT_STREAM, asked.round, count)[node])
            told = probabilities(logits, self.request.params)
            if shape.is_without_replacement:
                told = told.copy()
                siblings = [i for i in range(node) if shape.parents[i] == parent and i not in shape.fixed]
                told[[tokens[i] for i in siblings]] = 0
            tokens.append(draw(told, (word >> 11) * 2.0**-53))
            probs.append(probabilities(logits, self.request.params))
        return Draft(tuple(tokens), shape.parents, tuple(probs), shape.is_without_replacement)


Propose = Callable[[Player, Asked], Draft]


@dataclass(frozen=True)
class Played:
    """counts, law  of the same shape. broken: what the runtime said when it refused to go on"""

    counts: NDArray[np.int64]
    law: Law
    broken: str = ""


def play(case: Case, law: Law, num_draws: int, seed: int, draft: Propose | None = None) -> Played:
    """Independent draws of a case: each has a stream of its own."""
    counts = np.zeros(law.shape, np.int64)
    players = [Player(case, params, draft) for params in case.params]
    size = case.language.vocab_size
    try:
        for index in range(num_draws):
            turn = index % len(players)
            key = RandomKey(seed, index)
            if case.law is None:
                one, two, three = players[turn].play_sequence(key, 3)
                counts[(one * size + two) * size + three] += 1
            else:
                tokens = players[turn].play(key, index % 5)
                counts[turn, len(tokens) - 1, tokens[-1]] += 1
    except ExecutionError as error:
        return Played(counts, law, str(error))
    return Played(counts, law)
