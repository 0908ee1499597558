"""A request, how far it is, and what comes back: Request, Token, Completion."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from octavo.compiler.errors import RequestError
from octavo.runtime.sampling_params import SamplingParams

FinishReason = Literal["length", "stop", "abort", "error"]


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
