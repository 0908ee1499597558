"""Options that make targets of drafts and drafts: what they take, and what comes of it."""

import pytest
import typer

from octavo.compiler.cli_drafts import features_of, layers_of


@pytest.mark.parametrize(("text", "numbers"), [("-1", (-1,)), ("2,15, -1", (2, 15, -1)), ("0", (0,))])
def test_numbers_of_hidden_states(text: str, numbers: tuple[int, ...]) -> None:
    assert features_of(text).numbers == numbers


@pytest.mark.parametrize("text", ["", "1,", "a", "1-3", "1;2"])
def test_what_is_no_list_of_numbers_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected numbers such as 2,15,-1"):
        features_of(text)


@pytest.mark.parametrize(("text", "numbers"), [("8-11", (8, 9, 10, 11)), ("3,5-6", (3, 5, 6)), ("0-0", (0,))])
def test_ranges_of_layers_have_both_ends(text: str, numbers: tuple[int, ...]) -> None:
    assert layers_of(text).numbers == numbers


@pytest.mark.parametrize("text", ["", "5-3", "-1", "1,,2", "a-b"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match=r"expected layers such as 8-20,25"):
        layers_of(text)
