"""CompileOptions are values: frozen, hashable, comparable, and documented by name."""

from dataclasses import FrozenInstanceError, fields
from pathlib import Path

import pytest

from octavo.compiler.options import CompileOptions


def test_defaults() -> None:
    options = CompileOptions()
    assert (options.target, options.dtype, options.page_size, options.max_model_len) == (
        "cpu",
        None,
        None,
        None,
    )
    assert (options.max_batch_tokens, options.verify, options.dump) == (2048, "full", None)


def test_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        CompileOptions().page_size = 3  # type: ignore[misc]


def test_equal_options_are_one_key() -> None:
    first, second = (CompileOptions(page_size=16, dump=Path("a")) for _ in range(2))
    assert {first: "found"}[second] == "found"
    assert first != CompileOptions(page_size=32, dump=Path("a"))


def test_every_option_is_described() -> None:
    described = [line.split()[0] for line in (CompileOptions.__doc__ or "").splitlines()[2:] if line.strip()]
    assert described == [field.name for field in fields(CompileOptions)]
