"""Answers that a grammar bounds, with drafts that it does not know."""

import json
import zlib
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner
from json_tokenizer import tokenizer

from octavo.compiler.artifact import ModelInfo
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams, Structured
from octavo.runtime.speculative.accept import Rule
from octavo.runtime.speculative.forced import Forced
from octavo.runtime.speculative.model import DraftModel, ModelProposer
from octavo.runtime.speculative.ngram import NGram
from octavo.runtime.speculative.policy import FixedLength
from octavo.runtime.speculative.proposer import Proposer
from octavo.runtime.speculative.speculator import Speculator
from octavo.runtime.speculative.suffix import Suffix

VOCAB = 257 + 150
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Wild(FakeRunner):
    """Random logits of the tokenizer's size."""

    def __init__(self, salt: bytes = b"") -> None:
        super().__init__(300, 4, vocab_size=VOCAB)
        self._salt = salt

    def _logits(self, history: list[int]) -> Any:
        seed = zlib.crc32(self._salt + np.array(history[-6:], np.int64).tobytes())
        return np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 3


def answers(proposer: Proposer | None, rule: Rule = "block", **params: Any) -> tuple[list[str | None], int]:
    """Texts, and how many steps they took."""
    model = ModelInfo("m", VOCAB, 1, 512, 64, (0,))
    speculator = None if proposer is None else Speculator(proposer, FixedLength(4), rule)
    engine = Engine(Wild(), model, tokenizer(), speculator=speculator, seed=1)
    given = SamplingParams(structured=Structured.json_schema(SCHEMA), **params)
    found = engine.generate([[5, 6], [7], [8, 9, 10]], given)
    return [answer.text for answer in found], engine.stats.num_steps


@pytest.mark.parametrize(
    "params", [{}, {"temperature": 1.0, "seed": 3}, {"n": 2, "temperature": 1.0, "seed": 4}]
)
def test_drafts_change_no_answer_and_forced_tokens_save_steps(params: dict[str, Any]) -> None:
    plain, num_steps = answers(None, **params)
    for proposer in (
        NGram(shortest=1),
        Suffix(is_tree=True, shortest=1),
        draft_model(b"other"),
        draft_model(b""),
    ):
        assert answers(Forced(proposer), **params)[0] == plain
    texts, forced_steps = answers(Forced(), **params)
    assert texts == plain and forced_steps < num_steps


def draft_model(salt: bytes) -> ModelProposer:
    return ModelProposer(DraftModel(Wild(salt), VOCAB, 64))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_drawn_drafts_stay_within_the_grammar(rule: Rule) -> None:
    for salt in (b"other", b""):
        texts, _ = answers(draft_model(salt), rule, temperature=1.0, n=4)
        assert all({"name", "age"} == set(json.loads(text or "")) for text in texts)
