"""benchmarks/check_speculation.py at a fraction of its draws: what is right passes, what is wrong is seen."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import chisquare
from speculation_rounds import kept_bits

from octavo.runtime.sampler import RandomKey, random_bits

ROOT = Path(__file__).resolve().parents[1]
# Seen among few draws.
LARGE = (
    "residual is p",
    "equality test, then a fresh sample",
    "the best token told as drawn",
    "probs of another temperature",
    "siblings by p of the first",
    "ends before a doubtful token",
    "numbers collapse to 0 and 1",
    "temperature of another request",
    "softmax overflows when cold",
)


@pytest.fixture(scope="module")
def checker() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT)
        yield importlib.import_module("benchmarks.check_speculation")


def test_laws_lose_nothing(checker: Any) -> None:
    for case in checker.CASES:
        law = case.laws()
        assert law.sum() == pytest.approx(1, abs=1e-12), case.name
        assert (law >= -1e-15).all(), case.name


def test_a_law_of_sequences_is_a_product(checker: Any) -> None:
    case = checker.ROUNDS_OF_BLOCKS
    p = case._drafts(case.params[0]).p
    one, two, three = 2, 0, 1
    assert case.laws()[one * 9 + two * 3 + three] == pytest.approx(
        p(())[one] * p((one,))[two] * p((one, two))[three]
    )


def test_numbers_that_come_sooner_are_the_same() -> None:
    for key in (RandomKey(0, 0), RandomKey(2**64 - 1, 3)):
        for place in ((5, 1, 0, 1), (5, 2, 3, 9), (0, 3, 0, 1), (5, 1, 0, 1)):
            assert (kept_bits(key, *place) == random_bits(key, *place)).all()


def test_cases_pass(checker: Any) -> None:
    for case in checker.CASES:
        played, test = checker.run_case(case, 200)
        assert not checker.is_caught(played, test), case.name
        assert played.counts.sum() == 200


def test_biases_are_seen(checker: Any) -> None:
    biases = {bias.name: bias for bias in checker.BIASES}
    assert len(biases) == len(checker.BIASES) >= 12
    for name in LARGE:
        played, test = checker.run_bias(biases[name], 500)
        assert checker.is_caught(played, test), f"{name}: p {test.p_value}"


def test_chi_square_is_pearsons_with_few_expected_merged(checker: Any) -> None:
    law = np.array([[0.5, 0.3], [0.1, 0.06], [0.03, 0.01]])
    counts = np.array([[48, 29], [12, 6], [4, 1]])
    expected = chisquare([48, 29, 12, 11], [50, 30, 10, 10])  # 0.01 + 0.03 + 0.06 together
    statistic, freedom, p_value = checker.chi_square(counts, law)
    assert (statistic, p_value) == pytest.approx((expected.statistic, expected.pvalue)) and freedom == 3
    assert checker.chi_square(np.array([9, 1]), np.array([1.0, 0.0])).p_value == 0
    assert checker.chi_square(np.array([9, 0]), np.array([1.0, 0.0])).p_value == 1


def test_it_says_what_it_missed(
    checker: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = checker.Bias("none", checker.COLD)
    monkeypatch.setattr(checker, "BIASES", (wrong,))
    assert not checker.check_biases(100)
    assert capsys.readouterr().out.endswith("caught 0 / 1\n")
    monkeypatch.setattr(checker, "CASES", (checker.COLD,))
    assert checker.check_cases(100)
    monkeypatch.setattr(checker, "ALPHA", 2.0)
    assert not checker.check_cases(100)
    assert " MISS" in capsys.readouterr().out
