"""Differences by lines: they rebuild the text, find what moved little, and do it fast."""

import difflib
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.compiler.line_diff import opcodes, unified

LINES = st.lists(st.sampled_from("abcdefgh"), max_size=30)


@given(LINES, LINES)
def test_opcodes_turn_one_text_into_the_other(before: list[str], after: list[str]) -> None:
    i = j = 0
    for tag, i1, i2, j1, j2 in opcodes(before, after):
        assert (i1, j1) == (i, j)
        assert (tag == "equal") == (before[i1:i2] == after[j1:j2])
        assert (tag == "insert") == (i1 == i2) and (tag == "delete") == (j1 == j2)
        i, j = i2, j2
    assert (i, j) == (len(before), len(after))


@given(LINES)
def test_equal_texts_differ_in_nothing(lines: list[str]) -> None:
    assert [tag for tag, *_ in opcodes(lines, lines)] == ["equal"] * bool(lines)
    assert unified(lines, lines, ("a", "b")) == ""


def test_one_changed_line_is_all_that_changes() -> None:
    before = [f"line {i}" for i in range(50)]
    after = [*before[:20], "new", *before[21:], "more"]
    assert [c for c in opcodes(before, after) if c[0] != "equal"] == [
        ("replace", 20, 21, 20, 21),
        ("insert", 50, 50, 50, 51),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [("abcdefgh", "abXdefgh"), ("abc", ""), ("", "abc"), ("ab", "cd"), ("abcdefghij", "j")],
)  # fmt: skip
def test_a_unified_diff_is_difflibs(before: str, after: str) -> None:
    expected = list(difflib.unified_diff(list(before), list(after), "a", "b", n=2, lineterm=""))
    ours = unified(list(before), list(after), ("a", "b")).splitlines()
    assert len(ours) == len(expected)
    assert [line for line in ours if line[0] in " +-"] == [line for line in expected if line[0] in " +-"]


def test_thousands_of_lines_take_no_time() -> None:
    before = [f"    # module {i // 9}" if i % 3 == 0 else f"    x{i} = f(x{i - 1})" for i in range(12_000)]
    after = [f"{line} + 1" if i % 7 == 0 else line for i, line in enumerate(before) if i % 5]
    start = time.perf_counter()
    found = opcodes(before, after)
    assert time.perf_counter() - start < 5
    kept = sum(i2 - i1 for tag, i1, i2, *_ in found if tag == "equal")
    assert kept > 0.6 * len(after)
