"""Hidden states as raw numbers: bf16 goes through uint16 and loses nothing that rounding to the nearest keeps."""

import ml_dtypes
import numpy as np
import pytest

from octavo.runtime.features import joined, narrow, wide


def test_bf16_rounds_to_the_nearest_and_of_two_to_the_even_one() -> None:
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) * 10
    values[0, :3] = 1 + 2.0**-8, 1 + 3 * 2.0**-8, -0.0  # halfway, down and up to an even one
    raw = narrow(values, "bf16")
    assert raw.dtype == np.uint16
    assert np.array_equal(raw, values.astype(ml_dtypes.bfloat16).view(np.uint16))
    assert np.array_equal(wide(raw), values.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_fp32_is_as_it_is() -> None:
    values = np.ones((2, 3), np.float32)
    assert narrow(values, "fp32") is values and wide(values) is values


@pytest.mark.parametrize("dtype", [np.float32, np.uint16])
def test_hidden_states_are_joined_in_their_order(dtype: type[np.generic]) -> None:
    first, second = np.ones((3, 2), dtype), np.zeros((3, 5), dtype)
    both = joined([first, second])
    assert both is not None and both.dtype == dtype and both.shape == (3, 7)
    assert np.array_equal(both[:, :2], first) and np.array_equal(both[:, 2:], second)
    assert joined([first]) is first and joined([]) is None
