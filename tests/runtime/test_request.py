import math
from typing import Any

import numpy as np
import pytest

from octavo.compiler.errors import RequestError
from octavo.runtime.request import SamplingParams, check_prompt


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("max_tokens", 0, "a whole number of 1 or more"),
        ("max_tokens", 1.5, "a whole number of 1 or more"),
        ("max_tokens", True, "a whole number of 1 or more"),
        ("temperature", -0.1, "a number of 0 or more"),
        ("temperature", math.nan, "a number of 0 or more"),
        ("temperature", math.inf, "a number of 0 or more"),
        ("temperature", "hot", "a number of 0 or more"),
        ("top_k", -1, "a whole number of 0 or more"),
        ("top_p", 0, "above 0 and at most 1"),
        ("top_p", 1.01, "a number of 0 to 1"),
        ("min_p", -0.5, "a number of 0 to 1"),
        ("min_p", math.nan, "a number of 0 to 1"),
        ("seed", -1, r"a whole number of 0 to 18446744073709551615"),
        ("seed", 2**64, r"a whole number of 0 to 18446744073709551615"),
        ("stop_token_ids", (-1,), "a whole number of 0 or more"),
        ("stop", ("",), "strings of 1 to 1024 characters"),
        ("stop", (3,), "strings of 1 to 1024 characters"),
        ("stop", ("x",) * 65, "at most 64 strings, got 65"),
    ],
)
def test_values_out_of_range_are_refused_with_the_field_s_name(field: str, value: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=f"{field}: expected {expected}"):
        SamplingParams(**{field: value})


def test_a_stop_string_may_be_given_alone() -> None:
    assert SamplingParams(stop="end").stop == ("end",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]
    assert hash(SamplingParams(stop_token_ids=[3])) == hash(SamplingParams(stop_token_ids=(3,)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "prompt", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.int32), [np.int64(1), 2]]
)
def test_prompts_of_any_whole_numbers_become_ints(prompt: Any) -> None:
    ids = check_prompt(prompt, 10)
    assert ids == [1, 2] and all(type(token) is int for token in ids)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([], "at least 1 token, got none"),
        ([1, 10], "token ids of 0 to 9, got 10 at position 1"),
        ([-1], "token ids of 0 to 9, got -1 at position 0"),
        ([2**70], f"token ids of 0 to 9, got {2**70}"),
        ([1.0], "whole numbers as token ids, got 1.0"),
        (["a"], "whole numbers as token ids, got 'a'"),
        ([None], "whole numbers as token ids, got None"),
        ([True], "whole numbers as token ids, got True"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, expected: str) -> None:
    with pytest.raises(RequestError, match=f"prompt: expected {expected}"):
        check_prompt(prompt, 10)
