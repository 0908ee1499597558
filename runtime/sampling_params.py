"""What a caller asks for: how to choose tokens, when to stop, what the text must be, what is reported."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.compiler.errors import RequestError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARACTERS = 1 << 20

StructuredKind = Literal["json", "json_schema", "regex", "grammar"]


@dataclass(frozen=True)
class Structured:
    """What the generated text must be, whatever the logits: made by one of the four methods below.

    text  the schema as JSON, the expression, or the grammar; empty for "json"
    """

    kind: StructuredKind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("json", "json_schema", "regex", "grammar"):
            raise RequestError(
                f"structured: expected the kind json, json_schema, regex or grammar, got {self.kind!r}"
            )
        if not isinstance(self.text, str) or len(self.text) > MAX_GRAMMAR_CHARACTERS:
            got = f"{len(self.text)}" if isinstance(self.text, str) else repr(self.text)
            raise RequestError(
                f"structured: expected a text of at most {MAX_GRAMMAR_CHARACTERS} characters, got {got}"
            )
        if (self.kind == "json") != (not self.text):
            raise RequestError(f"structured: expected a text for all kinds but json, got {self.text!r}")

    @classmethod
    def json(cls) -> "Structured":
        """Any JSON value."""
        return cls("json")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> "Structured":
        """A JSON value that a JSON Schema accepts; properties come in the schema's order."""
        if isinstance(schema, str):
            return cls("json_schema", schema)
        try:
            return cls("json_schema", json.dumps(schema))
        except (TypeError, ValueError) as error:
            raise RequestError(f"structured: expected a schema that is JSON, got: {error}") from None

    @classmethod
    def regex(cls, pattern: str) -> "Structured":
        """A text that the whole regular expression matches."""
        return cls("regex", pattern)

    @classmethod
    def grammar(cls, text: str) -> "Structured":
        """A text of an EBNF grammar in Lark's notation, whose rule `start` is the beginning."""
        return cls("grammar", text)


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

    Several answers to a prompt:
    n               answers that are returned
    best_of         sample this many and return the n of the highest mean log-probability; None: n
    beam_width      beam search over this many beams; with temperature > 0, beams are sampled without
                    replacement (Kool et al. 2019); None: no beams. Beams share pages as far as they are
                    alike; where they differ more than a whole pool holds, the request ends with an error
    length_penalty  a beam's log-probability is divided by its length to this power
    early_stopping  when beams end (as in Hugging Face): True with beam_width finished ones; False when no
                    running one is likely to do better; "never" only when none can

    What is done to logits (token_state.py tells the order):
    min_tokens          end tokens and stop_token_ids cannot be chosen before this many were generated; a stop
                        string still ends the answer
    presence_penalty    subtracted from the logit of every token that was generated, -2 to 2
    frequency_penalty   subtracted as often as the token was generated, -2 to 2
    repetition_penalty  logits of tokens of prompt and answer are divided by it if positive, else multiplied
    logit_bias          token id -> added to its logit, -100 to 100; kept as pairs sorted by id
    structured          what the text must be; needs a tokenizer

    What is reported:
    logprobs         log-probabilities of the chosen token and of this many best ones, 0 to 20; None: none
    prompt_logprobs  the same for the prompt's tokens
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
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    structured: Structured | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _sorted_bias(self.logit_bias))
        self._check_choice()
        self._check_end()
        self._check_branches()
        self._check_processing()

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def num_branches(self) -> int:
        """How many sequences run for one request."""
        return self.beam_width or self.best_of or self.n

    @property
    def is_ranked(self) -> bool:
        """Answers are ordered, so none is known before all have ended."""
        return self.beam_width is not None or self.best_of is not None

    @property
    def needs_logprobs(self) -> bool:
        """The chosen token's log-probability is reported, or ranks the answers."""
        return self.logprobs is not None or self.best_of is not None

    def check_ids(self, vocab_size: int) -> None:
        """RequestError for token ids that the model does not have."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", dict(self.logit_bias))):
            if too_large := [token_id for token_id in ids if token_id >= vocab_size]:
                raise RequestError(f"{name}: expected ids below {vocab_size}, got {too_large[0]}")

    def _check_choice(self) -> None:
        if self.seed is not None:
            _whole("seed", self.seed, 0, 2**64 - 1)
        _whole("top_k", self.top_k, 0)
        _number("temperature", self.temperature, 0.0, math.inf)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RequestError("top_p: expected above 0 and at most 1, got 0; for greedy use temperature=0")

    def _check_end(self) -> None:
        if self.max_tokens is not None:
            _whole("max_tokens", self.max_tokens, 1)
        for token_id in self.stop_token_ids:
            _whole("stop_token_ids", token_id, 0)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise RequestError(f"stop: expected at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise RequestError(
                    f"stop: expected strings of 1 to {MAX_STOP_CHARACTERS} characters, got {text!r}"
                )
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)

    def _check_branches(self) -> None:
        _whole("n", self.n, 1)
        for name, value in (("best_of", self.best_of), ("beam_width", self.beam_width)):
            if value is not None and (type(value) is not int or value < self.n):
                raise RequestError(
                    f"{name}: expected None or a whole number of n={self.n} or more, got {value!r}"
                )
        _number("length_penalty", self.length_penalty, -math.inf, math.inf)
        if self.early_stopping not in (False, True, "never"):
            raise RequestError(
                f'early_stopping: expected False, True or "never", got {self.early_stopping!r}'
            )
        if self.beam_width is not None:
            if self.best_of is not None:
                raise RequestError(
                    "best_of: expected None with beam_width, which ranks its own beams; give one of them"
                )
            return
        if self.length_penalty != 1 or self.early_stopping is not False:
            name = "early_stopping" if self.length_penalty == 1 else "length_penalty"
            raise RequestError(f"{name}: expected its default without beam search; set beam_width to search")
        if self.is_greedy and self.num_branches > 1:
            name = "n" if self.best_of is None else "best_of"
            raise RequestError(
                f"{name}: expected 1 with temperature=0, whose answers are all the same, got {self.num_branches}; "
                "set temperature above 0, or beam_width"
            )

    def _check_processing(self) -> None:
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, math.inf)
        if self.repetition_penalty == 0:
            raise RequestError("repetition_penalty: expected above 0, got 0; 1 leaves logits as they are")
        for name, value in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if value is not None:
                _whole(name, value, 0, MAX_LOGPROBS)
        if self.structured is None:
            return
        if not isinstance(self.structured, Structured):
            raise RequestError(
                f"structured: expected a Structured, got {self.structured!r}; use Structured.json_schema(schema)"
            )
        if self.ignore_eos:
            raise RequestError(
                "ignore_eos: expected False with structured, whose text ends by an end token; leave one of them out"
            )
        if self.min_tokens:
            raise RequestError(
                f"min_tokens: expected 0 with structured, got {self.min_tokens}; "
                "say in the schema or grammar what the text must hold"
            )


def _sorted_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    try:
        pairs = list(bias.items() if isinstance(bias, Mapping) else bias)
        each = dict(pairs)
    except (TypeError, ValueError):
        raise RequestError(f"logit_bias: expected a mapping of token id to number, got {bias!r}") from None
    if len(each) < len(pairs):
        raise RequestError(f"logit_bias: expected each token id once, got {bias!r}")
    for token_id, value in each.items():
        _whole("logit_bias", token_id, 0)
        _number(f"logit_bias of token {token_id}", value, -100.0, 100.0)
    return tuple((token_id, float(each[token_id])) for token_id in sorted(each))


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
        limits = f"{low:g} to {high:g}" if not math.isinf(high) else f"{low:g} or more"
        if math.isinf(low):
            limits = "any finite size"
        raise RequestError(f"{name}: expected a number of {limits}, got {value!r}")
