import numpy as np
from numpy.typing import NDArray

from octavo.runtime.speculative.draft import ROOT, Draft
from octavo.runtime.speculative.typical import HARD, SOFT, verify_typical
from octavo.runtime.speculative.verify import Verdict

SURE, UNSURE = np.array([0.85, 0.1, 0.05, 0.0]), np.full(4, 0.25)


def verdict(draft: Draft, rows: dict[int, NDArray[np.float64]]) -> Verdict:
    asked: list[int] = []

    def target(node: int) -> NDArray[np.float64]:
        asked.append(node)
        return rows[node]

    result = verify_typical(draft, target, lambda node: 100 + node)
    assert asked == sorted(set(asked)), "a row was asked for twice, or off the path"
    return result


def test_a_token_is_kept_by_its_probability_and_the_entropy_beside_it() -> None:
    # entropy of SURE: 0.52, so that its bound is min(0.09, 0.3 * 0.6); of UNSURE: log 4, 0.3 / 4
    assert min(HARD, SOFT * np.exp(-0.5181)) == HARD and SOFT / 4 < HARD
    rows = {ROOT: SURE, 0: UNSURE, 1: SURE}
    chain = (ROOT, 0, 1)
    assert verdict(Draft((1, 3, 2), chain, (None,) * 3), rows) == Verdict((0, 1), 101)
    assert verdict(Draft((2, 3, 2), chain, (None,) * 3), rows) == Verdict((), 99)


def test_the_first_child_that_is_typical_is_followed() -> None:
    draft = Draft((2, 1, 0), (ROOT, ROOT, ROOT), (None,) * 3)
    assert verdict(draft, {ROOT: SURE}) == Verdict((1,), 101)
