"""What a caller asks for and what comes back: SamplingParams, Request, Token, Completion."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from octavo.compiler.errors import RequestError

FinishReason = Literal["length", "stop", "abort", "error"]

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop; greedy by default. RequestError for values out of range.

    max_tokens      most tokens to generate; None: up to the model's length or the pool, whichever ends first
    temperature     0 is greedy (the lowest id wins a tie); otherwise logits are divided by it
    top_k           keep the k most probable tokens; 0 keeps all
    top_p           then keep the fewest most probable tokens whose probabilities reach p; 1 keeps all
    min_p           then keep tokens with at least min_p times the probability of the best; 0 keeps all
    seed            same seed, prompt and parameters give the same tokens, whatever else is served; None: the
                    engine's own stream
    stop_token_ids  end after one of these, besides the model's end-of-sequence tokens
    ignore_eos      do not end at the model's end-of-sequence tokens
    stop            end before the text holds one of these; needs a tokenizer
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)
        _whole("top_k", self.top_k, 0)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p: expected above 0 and at most 1, got 0; for greedy use temperature=0")
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: expected at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"stop: expected strings of 1 to {MAX_STOP_CHARACTERS} characters, got {text!r}"
                )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Request:
    """A request and how far it is. The scheduler alone changes it.

    tokens         prompt, then what was generated
    max_len        tokens at which it ends with "length"
    pages          KV pages it holds, in order of position
    num_computed   tokens whose keys and values are in those pages
    """

    request_id: int
    prompt_len: int
    tokens: list[int]
    params: SamplingParams
    max_len: int
    stop_token_ids: frozenset[int] = frozenset()
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def num_uncomputed(self) -> int:
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Only its newest token is left to compute."""
        return self.num_uncomputed == 1 and len(self.tokens) > self.prompt_len


@dataclass(frozen=True)
class Token:
    """One generated token of a stream, or the end of a request that brought none.

    index     which prompt of the call it belongs to
    token_id  None only when the request ends by "abort" or "error"
    text      what may be shown now: never part of a character or of a stop string, so it may be empty and be
              made up by a later token; always empty without a tokenizer
    """

    request_id: int
    index: int
    token_id: int | None
    text: str
    finish_reason: FinishReason | None = None
    error: str | None = None


@dataclass(frozen=True)
class Completion:
    """A finished request. token_ids holds every generated token, an end token included; text is None without
    a
    tokenizer and never shows end tokens or stop strings."""

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str | None
    finish_reason: FinishReason


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


def _whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        limits = f"{low} or more" if high is None else f"{low} to {high}"
        raise RequestError(f"{name}: expected a whole number of {limits}, got {value!r}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not low <= value <= high
        or math.isinf(value)
    ):
        limits = f"{low:g} or more" if math.isinf(high) else f"{low:g} to {high:g}"
        raise RequestError(f"{name}: expected a number of {limits}, got {value!r}")
