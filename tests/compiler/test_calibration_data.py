"""Calibration as users give it, cut to sequences; and the text that comes with the package."""

from typing import Any

import pytest
from tiny_llama import build_tokenizer

from octavo.compiler.calibration_data import calibration_sequences, default_texts
from octavo.compiler.errors import OptionError

NEEDED = 'activations="static" takes its scales from what the model computes'


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ("abcdefg", [5, 2]),
        (["abcdefgh", "ij"], [5, 3, 2]),
        ([7, 8, 9, 10, 11, 12], [5, 1]),
        ([[7, 8], range(11)], [2, 5, 5, 1]),
        ([[7], "abcdef"], [1, 5, 1]),
    ],
)
def test_pieces_are_no_longer_than_the_model(given: Any, lengths: list[int]) -> None:
    tokenizer = build_tokenizer()
    sequences = calibration_sequences(given, tokenizer, 5, NEEDED)
    assert sequences is not None and [len(s) for s in sequences] == lengths
    if given == "abcdefg":
        assert [i for s in sequences for i in s] == tokenizer(given)["input_ids"]


def test_pieces_are_at_most_512_tokens() -> None:
    assert [len(s) for s in calibration_sequences(range(1100), None, 4096, "") or []] == [512, 512, 76]


def test_without_calibration_the_packages_text_is_used() -> None:
    texts = default_texts()
    assert len(texts) == 3 and all(4000 < len(text) < 12000 for text in texts)
    sequences = calibration_sequences(None, build_tokenizer(), 512, NEEDED)
    assert sequences is not None
    assert sum(map(len, sequences)) == sum(len(text.encode()) for text in texts)  # a token is a byte


def test_without_a_tokenizer_what_does_not_need_calibration_goes_without() -> None:
    assert calibration_sequences(None, None, 512, "") is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (None, f"token ids, or a tokenizer, got neither, and {NEEDED}; pass calibration=.*or tokenizer="),
        ("text", "token ids, or a tokenizer, got text without a tokenizer"),
        ([[1, 2], "text"], "token ids, or a tokenizer, got text without a tokenizer"),
        ([[1], 2.5], "texts or sequences of token ids, got float at 1"),
        ([[1], ["a"]], "texts or sequences of token ids, got list at 1"),
        ([], "text, got none; give some thousand tokens"),
        ([[], []], "text, got none; give some thousand tokens"),
    ],
)
def test_what_is_no_calibration_is_refused(given: Any, said: str) -> None:
    with pytest.raises(OptionError, match=f"^calibration: expected {said}"):
        calibration_sequences(given, None, 512, NEEDED)
