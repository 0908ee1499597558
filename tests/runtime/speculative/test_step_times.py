import json

import numpy as np
import pytest

from octavo.compiler.errors import ArtifactError
from octavo.runtime.speculative.step_times import Times, flat_then_linear, linear, read_step_times


def at(times: Times, *counts: float) -> list[float]:
    seconds: list[float] = times.seconds(np.array(counts, np.float64)).tolist()
    return seconds


def test_before_anything_is_known_steps_are_flat_then_linear() -> None:
    times = Times(flat_then_linear)
    assert not times.is_known
    assert at(times, 1, 8, 16, 32) == [1, 1, 2, 4]
    assert at(Times(linear), 1, 8) == [1, 8]


def test_a_table_is_read_and_goes_on_beyond_its_end() -> None:
    curve = read_step_times(json.dumps({"tokens": [1, 4, 8], "seconds": [2.0, 1.5, 4.0], "source": "here"}))
    times = Times(curve, is_absolute=True)
    assert times.is_known
    assert at(times, 1, 4, 6, 8, 10) == [2, 2, 3, 4, 5]  # what falls is levelled


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"tokens": [1]}',
        '{"tokens": [], "seconds": []}',
        '{"tokens": [2, 1], "seconds": [1, 1]}',
        '{"tokens": [0, 1], "seconds": [1, 1]}',
        '{"tokens": [1, 2], "seconds": [1]}',
        '{"tokens": [1], "seconds": [0]}',
        '{"tokens": [1], "seconds": [NaN]}',
        '{"tokens": ["a"], "seconds": [1]}',
    ],
)
def test_another_file_is_refused(text: str) -> None:
    with pytest.raises(ArtifactError, match=r"file\.json: expected"):
        read_step_times(text, "file.json")


def test_measurements_scale_the_curve_and_bend_it() -> None:
    times = Times(flat_then_linear)
    times.observe(1, 0.02)
    assert at(times, 1, 8, 16) == pytest.approx([0.02, 0.02, 0.04])
    times.observe(5, 0.04)
    assert at(times, 1, 3, 5) == pytest.approx([0.02, 0.03, 0.04], rel=1e-5)
    assert at(times, 8, 16) == pytest.approx([0.04, 0.08], rel=1e-5)  # the curve from 5 on
    times.observe(40, 0.5)
    assert at(times, 40, 80) == pytest.approx([0.5, 1.0], rel=1e-5)


def test_outliers_do_not_count_and_the_latest_do() -> None:
    times = Times(flat_then_linear)
    for seconds in [9.0, 1.0]:  # the first step warms up
        times.observe(1, seconds)
    assert at(times, 1) == [1.0]
    for seconds in [1.0, 30.0, 1.0, 1.0, 0.0, float("nan"), float("inf"), -1.0]:
        times.observe(1, seconds)
    assert at(times, 1) == [1.0]
    for _ in range(12):
        times.observe(1, 2.0)  # the context grew
    assert at(times, 1) == [2.0]


def test_seconds_never_fall(seed: int = 3) -> None:
    random = np.random.default_rng(seed)
    for _ in range(50):
        times = Times(flat_then_linear)
        for _ in range(int(random.integers(1, 30))):
            times.observe(int(random.integers(1, 300)), float(random.lognormal()))
        seconds = times.seconds(np.arange(1, 400, dtype=np.float64))
        assert (seconds > 0).all()
        assert (np.diff(seconds) >= -1e-12).all()


def test_of_two_that_fall_the_middle_is_taken() -> None:
    times = Times(flat_then_linear)
    for count, seconds in [(1, 4.0), (2, 1.0), (2, 1.0), (2, 1.0), (3, 5.0)]:
        times.observe(count, seconds)
    assert at(times, 1, 2, 3) == pytest.approx([1.75, 1.75, 5.0], rel=1e-6)


def test_the_age_of_a_size_is_counted_in_steps() -> None:
    times = Times(flat_then_linear)
    assert times.age(1) is None
    times.observe(1, 1.0)
    times.tick()
    times.tick()
    times.observe(4, 1.0)
    assert (times.age(1), times.age(4), times.age(2)) == (2, 0, None)


def test_a_single_slow_step_is_doubted_after_a_while() -> None:
    times = Times(flat_then_linear)
    for _ in range(3):
        times.observe(1, 1.0)
    times.observe(4, 9.0)
    for _ in range(32):
        times.tick()
    assert at(times, 4) == pytest.approx([9.0])
    for _ in range(4):
        times.tick()
    assert at(times, 4) == pytest.approx([1.0])
    times.observe(4, 1.1)
    assert at(times, 4) == pytest.approx([1.1])
    times = Times(flat_then_linear)
    for _ in range(3):
        times.observe(1, 1.0)
        times.observe(4, 9.0)
    for _ in range(1000):
        times.tick()
    assert at(times, 4) == pytest.approx([9.0])
