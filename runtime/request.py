"""A request, how far it is, and what comes back: Request, Branch, Token, Answer, Completion."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from octavo.compiler.errors import RequestError
from octavo.runtime.paged_memory import PageTable
from octavo.runtime.prefix_cache import SHARED_KEY, CacheKey
from octavo.runtime.sampler import Sampled
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.token_state import TokenState

FinishReason = Literal["length", "stop", "abort", "error"]


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Branch:
    """One sequence of a request: one of n answers, or a beam.

    index    which answer it is; it names the branch's stream of random numbers
    tokens   prompt, then what was generated
    state    what processing its logits remembers
    chosen   each generated token with its log-probability, where the request needs those
    logprob  of a beam: sum of the log-probabilities of what it generated; noise: that, perturbed
    score    what answers are ranked by, once it is known
    """

    index: int
    tokens: list[int]
    table: PageTable
    state: TokenState | None = None
    chosen: list[Sampled] = field(default_factory=list)
    logprob: float = 0.0
    noise: float = 0.0
    score: float | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.table.num_tokens

    def take(self, sampled: Sampled, prompt_len: int) -> None:
        """Go on with a token. The token comes last: an interrupted call is simply made again."""
        if sampled.logprob is not None:
            self.chosen[len(self.tokens) - prompt_len :] = [sampled]
        self.tokens.append(sampled.token_id)

    def child(self, index: int, sampled: Sampled, table: PageTable, prompt_len: int) -> "Branch":
        """A branch that goes on from this one with a token of its own."""
        state = self.state.fork() if self.state else None
        branch = Branch(index, list(self.tokens), table, state, list(self.chosen))
        branch.take(sampled, prompt_len)
        return branch


@dataclass(eq=False)
class Request:
    """A request and how far it is. The scheduler alone changes it.

    max_len        tokens at which a branch ends with "length"
    branches       one until the prompt is computed, then `params.num_branches`
    finished       of beam search: what ended, by its generated tokens
    priority       lower goes first; equal ones in the order of their ids
    num_overtaken  requests that came later and were admitted earlier
    prompt_report  what was reported of the prompt's tokens after the first
    """

    request_id: int
    prompt_len: int
    params: SamplingParams
    max_len: int
    branches: list[Branch]
    stop_token_ids: frozenset[int] = frozenset()
    key: CacheKey = SHARED_KEY
    priority: int = 0
    num_overtaken: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None
    finished: dict[tuple[int, ...], Branch] = field(default_factory=dict)
    prompt_report: list[Sampled] = field(default_factory=list)

    @property
    def live(self) -> list[Branch]:
        """Branches that still grow."""
        return [branch for branch in self.branches if branch.finish_reason is None]

    @property
    def num_branches(self) -> int:
        """Sequences it runs at most."""
        return self.params.num_branches

    @property
    def is_decoding(self) -> bool:
        """Only the newest token of each branch is left to compute."""
        for branch in self.branches:  # a loop, as this is asked for every token
            if branch.finish_reason is None and len(branch.tokens) - branch.table.num_tokens != 1:
                return False
        return True

    @property
    def has_room(self) -> bool:
        """Whether the newest token of each branch can be written where its pages are."""
        for branch in self.branches:
            if branch.finish_reason is None and len(branch.tokens) > branch.table.num_writable:
                return False
        return True

    @property
    def is_swapped(self) -> bool:
        return self.branches[0].table.in_host or any(branch.table.in_host for branch in self.branches)

    @property
    def wants_prompt_report(self) -> bool:
        return self.params.prompt_logprobs is not None and len(self.prompt_report) < self.prompt_len - 1


@dataclass(frozen=True)
class Token:
    """One generated token of a stream, or the end of a request that brought none.

    index     which prompt of the call it belongs to; branch: which of its answers
    token_id  None only when the request ends by "abort" or "error"
    text      what may be shown now: never part of a character or of a stop string, so it may be empty and be
              made up by a later token; always empty without a tokenizer
    logprob   and top_logprobs: as `SamplingParams.logprobs` asks
    """

    request_id: int
    index: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None
    branch: int = 0
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """One answer of a request.

    token_ids  every generated token, an end token included
    text       None without a tokenizer; never shows end tokens or stop strings
    logprobs   of each token, (token id, log-probability, best ones); None: not asked for
    score      what answers were ranked by, higher is better; None: they were not
    """

    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason
    logprobs: tuple[Sampled, ...] | None = None
    score: float | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request: `params.n` answers, the best first where they are ranked. prompt_logprobs starts at the
    prompt's second token."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    answers: tuple[Answer, ...]
    prompt_logprobs: tuple[Sampled, ...] | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the first answer; so are text and finish_reason."""
        return self.answers[0].token_ids

    @property
    def text(self) -> str | None:
        return self.answers[0].text

    @property
    def finish_reason(self) -> FinishReason:
        return self.answers[0].finish_reason


def check_prompt(prompt: Sequence[int], vocab_size: int) -> list[int]:
    """The prompt as plain ints; RequestError if it is empty or holds anything but ids below vocab_size."""
    ids = [_token_id(token) for token in prompt]
    if not ids:
        raise RequestError(
            "prompt: expected at least 1 token, got none; an empty prompt has nothing to continue"
        )
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < vocab_size:
            raise RequestError(
                f"prompt: expected token ids of 0 to {vocab_size - 1}, got {token_id} "
                f"at position {position}; was it encoded with this model's tokenizer?"
            )
    return ids


def _token_id(token: Any) -> int:
    try:
        if isinstance(token, bool):
            raise TypeError
        return int(token.__index__())
    except (AttributeError, TypeError):
        raise RequestError(f"prompt: expected whole numbers as token ids, got {token!r}") from None
