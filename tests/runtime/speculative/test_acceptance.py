import gc

import numpy as np
import pytest
from speculation import make_request

from octavo.runtime.speculative.acceptance import FIRST_RATE, Acceptance, Rates, path_rates
from octavo.runtime.speculative.draft import ROOT, Draft, chain


def test_rates_begin_at_the_prior_and_fade() -> None:
    rates = Rates(weight=2, decay=0.5)
    assert rates.rate(0, 0.75) == 0.75
    rates.add(0, True)
    assert rates.rate(0, 0.75) == pytest.approx((1 + 1.5) / 3)
    rates.add(0, False)
    assert rates.rate(0, 0.75) == pytest.approx((0.5 + 1.5) / 3.5)
    assert rates.rate(1, 0.25) == 0.25


def test_what_was_not_reached_says_nothing() -> None:
    acceptance, branch = Acceptance(), make_request([1]).branches[0]
    for _ in range(60):
        acceptance.record(branch, chain([5, 6, 7]), [9], False)
    first, second, third = acceptance.by_place(branch, 3)
    assert first < 0.05
    assert second < 0.05 and third < 0.05  # thought to be like the place before
    for _ in range(60):
        acceptance.record(branch, chain([5, 6, 7]), [5, 9], False)
    first, second, third = acceptance.by_place(branch, 3)
    assert first > 0.7 and second < 0.2 and third < 0.2


def test_behind_the_end_of_a_branch_nothing_was_tried() -> None:
    acceptance, branch = Acceptance(), make_request([1]).branches[0]
    for _ in range(50):
        acceptance.record(branch, chain([5, 6]), [5], True)
    first, second = acceptance.by_place(branch, 2)
    assert first > 0.9 and second > 0.9


def test_an_end_token_that_was_not_drafted_shows_a_miss() -> None:
    acceptance, branch = Acceptance(), make_request([1]).branches[0]
    for _ in range(50):
        acceptance.record(branch, chain([5, 6]), [5, 9], True)
    first, second = acceptance.by_place(branch, 2)
    assert first > 0.8 and second < 0.25


def test_estimates_find_a_process(seed: int = 5) -> None:
    random = np.random.default_rng(seed)
    true = [0.9, 0.5, 0.7]
    acceptance = Acceptance()
    found = []
    for _ in range(300):  # answers of 5 rounds each: what they have in common is learnt
        branch = make_request([1]).branches[0]
        found.append(acceptance.by_place(branch, 3))
        for _ in range(5):
            count = next((i for i, rate in enumerate(true) if random.random() >= rate), 3)
            acceptance.record(branch, chain([5, 6, 7]), [*[5, 6, 7][:count], 9], False)
    assert np.mean(found[100:], axis=0) == pytest.approx(true, abs=0.05)


def test_a_branch_differs_from_the_others() -> None:
    acceptance = Acceptance()
    good, bad = make_request([1]).branches[0], make_request([2]).branches[0]
    for _ in range(30):
        acceptance.record(good, chain([5, 6]), [5, 6, 9], False)
        acceptance.record(bad, chain([5, 6]), [9], False)
    assert acceptance.by_place(good, 1)[0] > 0.8
    assert acceptance.by_place(bad, 1)[0] < 0.2
    assert 0.3 < acceptance.by_place(make_request([3]).branches[0], 1)[0] < 0.7


def test_scores_are_believed_until_tried() -> None:
    acceptance, branch = Acceptance(), make_request([1]).branches[0]
    draft = chain([5, 6], scores=[0.93, 0.31])
    assert acceptance.by_score(branch, draft) == [0.93, 0.31]
    assert acceptance.by_score(branch, chain([5])) == [FIRST_RATE]
    for _ in range(60):
        acceptance.record(branch, draft, [9], False)
    assert acceptance.by_score(branch, draft)[0] < 0.1
    assert acceptance.by_score(branch, draft)[1] == 0.31  # never reached
    assert acceptance.by_score(branch, chain([5], scores=[1.0]))[0] > 0.9  # another group


def test_siblings_are_all_tried() -> None:
    acceptance, branch = Acceptance(), make_request([1]).branches[0]
    tree = Draft((5, 6, 7, 8), (ROOT, 0, ROOT, 2), (None,) * 4)
    for _ in range(80):
        acceptance.record(branch, tree, [7, 8, 9], False)
    rates = acceptance.by_place(branch, 4)
    assert rates[0] < 0.05 and rates[2] > 0.8 and rates[3] > 0.8
    assert path_rates([0.5, 0.5, 0.25, 1.0], tree.parents) == [0.5, 0.25, 0.25, 0.25]


def test_a_branch_is_forgotten_with_its_request() -> None:
    acceptance, request = Acceptance(), make_request([1])
    acceptance.record(request.branches[0], chain([5]), [9], False)
    assert len(acceptance._own) == 1
    del request
    gc.collect()
    assert len(acceptance._own) == 0
