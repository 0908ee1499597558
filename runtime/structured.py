"""Structured output: which tokens keep a text within its schema, expression or grammar.

The only place that imports the optional `llguidance` library (Rust; it knows the tokenizer's bytes, parses with
Earley's algorithm and lexes with derivatives of expressions, so no grammar is expanded beforehand).
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.artifact import ModelInfo
from octavo.compiler.errors import ExecutionError, MissingDependencyError, RequestError
from octavo.runtime.sampling_params import Structured
from octavo.runtime.tokenizer import FileTokenizer, Tokenizer

# Grammars kept ready; the least recently used one is dropped.
MAX_GRAMMARS = 64

# Between two parts of a JSON text: blanks, or a line break and an indentation of this many blanks at most. Without
# a bound small models go on with white space for ever.
MAX_BLANKS = 32


class Grammars:
    """The grammars of an engine: each is compiled once, and each branch follows it by a matcher of its own."""

    def __init__(self, tokenizer: Tokenizer | None, model: ModelInfo) -> None:
        if not isinstance(tokenizer, FileTokenizer):
            raise RequestError(
                f"structured: expected an engine with a tokenizer.json, got {type(tokenizer).__name__}; "
                "compile with the model's tokenizer"
            )
        if not model.eos_token_ids:
            raise RequestError(
                "structured: expected a model with an end-of-sequence token, got none, so no text could end"
            )
        try:
            self._library: Any = import_module("llguidance")
        except ImportError:
            raise MissingDependencyError(
                "structured: expected the library 'llguidance', which is not installed; "
                "pip install 'octavo[structured]'"
            ) from None
        try:
            self._tokenizer = self._library.LLTokenizer(
                tokenizer.to_json(), eos_token=list(model.eos_token_ids)
            )
        except ValueError as error:
            raise RequestError(
                f"structured: expected a tokenizer that llguidance knows, got: {error}"
            ) from None
        self._limits = self._library.LLParserLimits(verbose_errors=False)
        self._first = lru_cache(MAX_GRAMMARS)(self._compile)

    def matcher(self, structured: Structured) -> "GrammarMatcher":
        """At the beginning of a text. RequestError if it is no schema, expression or grammar that can be met."""
        return GrammarMatcher(self._first(structured).deep_copy())

    def _compile(self, structured: Structured) -> Any:
        compiled = self._library.LLMatcher(
            self._tokenizer, self._grammar(structured), log_level=0, limits=self._limits
        )
        if compiled.is_error():
            raise RequestError(
                f"structured: expected a {structured.kind} that compiles, got: {_message(compiled)}"
            )
        return compiled

    def _grammar(self, structured: Structured) -> str:
        make = self._library.LLMatcher
        if structured.kind == "regex":
            return str(make.grammar_from_regex(structured.text))
        if structured.kind == "grammar":
            return str(make.grammar_from_lark(structured.text))
        text = structured.text or "{}"
        try:
            schema = json.loads(text)
        except ValueError as error:
            raise RequestError(f"structured: expected a schema that is JSON, got: {error}") from None
        if not isinstance(schema, dict):
            raise RequestError(f"structured: expected a schema that is a JSON object, got {text[:80]!r}")
        spaces = {"whitespace_pattern": rf"([ \t]{{1,{MAX_BLANKS}}}|\r?\n[ \t]{{0,{MAX_BLANKS}}})"}
        return str(make.grammar_from_json_schema(text, defaults=spaces))


class GrammarMatcher:
    """How far the text of one branch is. End tokens may follow exactly where the grammar can end."""

    def __init__(self, state: Any) -> None:
        self._state = state

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take in tokens. One that may not follow shows at the next call of `allowed`."""
        self._state.consume_tokens(list(token_ids))

    def rollback(self, count: int) -> None:
        self._state.rollback(count)

    def fork(self) -> "GrammarMatcher":
        return GrammarMatcher(self._state.deep_copy())

    def forced(self) -> list[int]:
        """Tokens of the only text that may follow, written as the tokenizer would."""
        return [int(token_id) for token_id in self._state.compute_ff_tokens()]

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        """Which tokens (vocab,) may follow; ids that the tokenizer does not have may not. ExecutionError where the
        grammar was left or is too complex here.
        """
        packed = np.frombuffer(self._state.compute_bitmask(), np.uint8)
        if self._state.is_error():
            raise ExecutionError(f"structured: the text cannot go on: {_message(self._state)}")
        bits: NDArray[np.bool_] = np.unpackbits(packed, count=vocab_size, bitorder="little").view(np.bool_)
        return bits


def _message(state: Any) -> str:
    return str(state.get_error()).partition("<non-verbose/>")[0].strip()
