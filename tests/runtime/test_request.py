from typing import Any

import numpy as np
import pytest

from octavo.compiler.errors import RequestError
from octavo.runtime.request import check_prompt


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
