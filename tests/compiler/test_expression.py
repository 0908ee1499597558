import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.compiler.errors import ArtifactError
from octavo.compiler.expression import MAX_LENGTH, at_most, evaluate, holds, validate, validate_condition

DIMS = {"T": 7, "R": 3, "num_pages": 100}


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        (12, 12),
        ("12", 12),
        ("T", 7),
        ("R + 1", 4),
        ("T - R * 2", 1),
        ("(T - R) * 2", 8),
        ("(T + 63) // 64 * 64", 64),
        ("-T // 2", -4),
        ("num_pages*3*16*64", 307200),
        (" T ", 7),
    ],
)
def test_values(expression: int | str, value: int) -> None:
    assert evaluate(expression, DIMS) == value
    validate(expression, DIMS)


@pytest.mark.parametrize(
    "expression",
    [
        "T / 2",
        "T ** 2",
        "T % 2",
        "T << 9",
        "max(T, 2)",
        "T.bit_length",
        "[T][0]",
        "__import__('os')",
        "lambda: 1",
        "1.5",
        "True",
        "'T'",
        "T if T else R",
        "T < 2",
        "~T",
        "+T",
        "(T := 3)",
        "",
        "T T",
        "T\nR",
        "1" * (MAX_LENGTH + 1),
        "+".join(["T"] * 300),
        "(" * 300 + "T" + ")" * 300,
        "9" * 4000,
        2**63,
        1.5,
        True,
        None,
    ],
)
def test_refuses_anything_else(expression: int | str) -> None:
    with pytest.raises(ArtifactError, match=r"expression .*: expected"):
        evaluate(expression, DIMS)
    with pytest.raises(ArtifactError, match=r"expression .*: expected"):
        validate(expression, DIMS)


def test_bounds_every_intermediate_value() -> None:
    with pytest.raises(ArtifactError, match=r"within \+-\(2\*\*63 - 1\)"):
        evaluate("T * 4000000000 * 4000000000 * 4000000000 // 4000000000 // 4000000000", DIMS)
    with pytest.raises(ArtifactError, match=r"within \+-\(2\*\*63 - 1\)"):
        evaluate("9223372036854775807 + 1", DIMS)


def test_names_the_unknown_name_and_the_known_ones() -> None:
    for check in (validate, evaluate):
        with pytest.raises(ArtifactError, match=r"expected names among R, T, num_pages, got 'S'"):
            check("T + S", DIMS)


def test_division_by_zero_is_an_artifact_error() -> None:
    with pytest.raises(ArtifactError, match="divisor other than 0"):
        evaluate("T // (R - 3)", DIMS)


@pytest.mark.parametrize(
    ("condition", "value"),
    [
        ("", True),
        ("T <= 16", True),
        ("T > 16", False),
        ("T == 7 and R != 3", False),
        ("T == 7 or R != 3", True),
        ("1 < T <= 7", True),
        ("1 < T < 7", False),
        ("(T < 4 or T * 2 >= 14) and R == 3", True),
    ],
)
def test_conditions(condition: str, value: bool) -> None:
    assert holds(condition, DIMS) is value
    validate_condition(condition, DIMS)


@pytest.mark.parametrize(
    "condition", ["T", "1", "not T < 3", "T in R", "T is R", "T < 3 and R", "T < f(R)", "T <"]
)
def test_refuses_other_conditions(condition: str) -> None:
    with pytest.raises(ArtifactError, match=r"expression .*: expected"):
        holds(condition, DIMS)
    with pytest.raises(ArtifactError, match=r"expression .*: expected"):
        validate_condition(condition, DIMS)


@pytest.mark.parametrize("limit", [1, 7, 128])
def test_at_most_is_the_lesser_of_both(limit: int) -> None:
    text = at_most("T * 2", limit)
    assert [evaluate(text, {"T": t}) for t in range(400)] == [min(2 * t, limit) for t in range(400)]


def test_conditions_check_names() -> None:
    with pytest.raises(ArtifactError, match="got 'S'"):
        validate_condition("T < 3 or S > 1", DIMS)


_leaf = st.one_of(st.integers(0, 1000).map(str), st.sampled_from(sorted(DIMS)))
_tree = st.recursive(
    _leaf,
    lambda sub: st.builds("({} {} {})".format, sub, st.sampled_from(["+", "-", "*", "//"]), sub),
    max_leaves=8,
)


@settings(deadline=None)
@given(_tree)
def test_agrees_with_python(expression: str) -> None:
    try:
        expected = eval(expression, {}, dict(DIMS))
    except ZeroDivisionError:
        with pytest.raises(ArtifactError, match="divisor"):
            evaluate(expression, DIMS)
        return
    if abs(expected) < 2**63:
        assert evaluate(expression, DIMS) == expected


@settings(deadline=None)
@given(st.text(max_size=30))
def test_any_text_gives_a_number_or_an_artifact_error(text: str) -> None:
    try:
        assert isinstance(evaluate(text, DIMS), int)
    except ArtifactError:
        pass
