"""Calibration text as token sequences: what the user gives, or the text that Octavo brings along."""

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from octavo.compiler.calibration import SEQUENCE_TOKENS
from octavo.compiler.errors import OptionError
from octavo.compiler.options import CompileOptions
from octavo.compiler.quant_options import needs_calibration, uses_calibration

Calibration = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]
TEXTS = (
    "prose.txt",
    "dialogue.txt",
    "code.txt",
)


def default_texts() -> list[str]:
    """English prose, code and chats, about 6,000 tokens; calibration_text/LICENSE.txt says whose they are."""
    folder = files("octavo.compiler") / "calibration_text"
    return [(folder / name).read_text(encoding="utf-8") for name in TEXTS]


def sequences_of(
    options: CompileOptions, calibration: Calibration | None, tokenizer: Any, max_model_len: int
) -> list[list[int]] | None:
    """Calibration tokens, where the options make use of any. Raises OptionError where they need some."""
    config, carve = options.quantize, options.carve
    if config is None and carve is None:
        if calibration is not None:
            raise OptionError(
                "calibration: expected quantize or carve beside it, got none; nothing else reads it"
            )
        return None
    if carve is not None:
        needed = "carve chooses experts by what neurons do"
    else:
        assert config is not None
        needed = needs_calibration(config)
        if calibration is None and not uses_calibration(config):
            return None
    return calibration_sequences(calibration, tokenizer, max_model_len, needed)


def calibration_sequences(
    calibration: Calibration | None, tokenizer: Any, max_model_len: int, needed: str
) -> list[list[int]] | None:
    """Token sequences of at most 512 tokens and of the model's length; None where there is neither text nor tokenizer.

    calibration  None: the default texts
    needed       why there must be some, or ""
    Raises OptionError where there are none and some are needed, and for what is no text and no token ids.
    """
    given = default_texts() if calibration is None else _as_list(calibration)
    if tokenizer is None and any(isinstance(one, str) for one in given):
        if calibration is None and not needed:
            return None
        got = "text without a tokenizer" if calibration is not None else f"neither, and {needed}"
        raise OptionError(
            f"calibration: expected token ids, or a tokenizer, got {got}; pass calibration=[[1, 2, ...], ...], or "
            "tokenizer=... and, if the text that Octavo brings is not like yours, calibration=['some text', ...]"
        )
    length = min(SEQUENCE_TOKENS, max_model_len)
    sequences: list[list[int]] = []
    encode: Any = tokenizer
    for one in given:
        ids = list(encode(one)["input_ids"]) if isinstance(one, str) else list(one)
        sequences += [ids[start : start + length] for start in range(0, len(ids), length)]
    if not any(sequences):
        raise OptionError(
            "calibration: expected text, got none; give some thousand tokens of what will be served"
        )
    return sequences


def _as_list(calibration: Calibration) -> list[Any]:
    """Texts or sequences of ids, one of them too."""
    if isinstance(calibration, str):
        return [calibration]
    items: list[Any] = list(calibration)
    if all(isinstance(item, int) for item in items) and items:
        return [items]
    for index, item in enumerate(items):
        is_ids = (
            not isinstance(item, str) and isinstance(item, Sequence) and all(isinstance(i, int) for i in item)
        )
        if not isinstance(item, str) and not is_ids:
            raise OptionError(
                f"calibration: expected texts or sequences of token ids, got {type(item).__name__} at {index}"
            )
    return items
