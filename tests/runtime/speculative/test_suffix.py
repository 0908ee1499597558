from collections.abc import Sequence

import numpy as np
import pytest
from speculation import ask, make_request, paths

from octavo.runtime.prefix_cache import CacheKey
from octavo.runtime.request import Request
from octavo.runtime.speculative import suffix
from octavo.runtime.speculative.acceptance import path_rates
from octavo.runtime.speculative.draft import NO_DRAFT, Draft
from octavo.runtime.speculative.occurrences import Occurrences
from octavo.runtime.speculative.suffix import Suffix


def draft_of(proposer: Suffix, request: Request, most: int) -> Draft:
    [draft] = proposer.propose([ask(request, most)])
    return draft


def answered(proposer: Suffix, prompt: Sequence[int], answer: Sequence[int], key: str | None = None) -> None:
    """A request that ran and ended."""
    request = make_request(prompt, key=CacheKey(key))
    draft_of(proposer, request, 1)
    request.branches[0].tokens += answer
    request.branches[0].finish_reason = "stop"
    proposer.propose([])


def path_scores(tokens: Sequence[int], most_depth: int) -> dict[tuple[int, ...], float]:
    """Of every continuation: products of shares of squared match lengths, beside 2 for what is new."""
    places = []
    for end in range(2, len(tokens)):
        length = next((i for i in range(end) if tokens[end - 1 - i] != tokens[-1 - i]), end)
        if length >= 2:
            following = [
                tokens[end + i % (len(tokens) - end)] for i in range(most_depth)
            ]  # it repeats itself
            places.append((following, min(length, suffix.LONGEST)))
    scores: dict[tuple[int, ...], float] = {(): 1.0}
    for depth in range(1, most_depth + 1):
        for path in {tuple(following[:depth]) for following, _ in places}:
            before = sum((n + depth - 1) ** 2 for f, n in places if tuple(f[: depth - 1]) == path[:-1])
            own = sum((n + depth - 1) ** 2 for f, n in places if tuple(f[:depth]) == path)
            scores[path] = scores[path[:-1]] * own / (2 + before)
    return scores


def test_trees_hold_the_most_probable_continuations(seed: int = 8) -> None:
    random = np.random.default_rng(seed)
    for _ in range(40):
        tokens = random.integers(0, 3, 30).tolist()
        draft = draft_of(Suffix(is_tree=True), make_request(tokens), 6)
        scores = path_scores(tokens, 6)
        del scores[()]
        assert sorted(path_rates(draft.scores or (), draft.parents), reverse=True) == pytest.approx(
            sorted(scores.values(), reverse=True)[: len(draft)]
        )
        assert paths(draft) <= set(scores)
        assert len(draft) == min(6, len(scores)) and draft.is_fixed
        assert all(parent < node for node, parent in enumerate(draft.parents))


def test_the_first_path_is_the_most_probable() -> None:
    tokens = [1, 2, 3, 4, 1, 2, 5, 6, 1, 2, 3, 7, 1, 2]
    tree = draft_of(Suffix(is_tree=True), make_request(tokens), 6)
    line = draft_of(Suffix(), make_request(tokens), 3)
    assert line.is_chain and not tree.is_chain
    assert line.token_ids == tree.token_ids[:3]
    assert line.token_ids[0] == 3


def test_earlier_answers_are_drafted_from() -> None:
    proposer = Suffix()
    fresh = make_request([1, 9, 5, 6])
    assert draft_of(proposer, fresh, 3) == NO_DRAFT
    answered(proposer, [40, 41, 42], [5, 6, 7, 8])
    assert draft_of(proposer, make_request([1, 9, 5, 6]), 3).token_ids == (7, 8)
    assert draft_of(proposer, make_request([40, 41]), 3) == NO_DRAFT  # a prompt is no answer
    answered(proposer, [1], [20, 21])
    assert draft_of(proposer, make_request([7, 8]), 3) == NO_DRAFT  # not beyond the end of an answer


def test_no_text_crosses_to_another_tenant() -> None:
    proposer = Suffix()
    answered(proposer, [1], [5, 6, 7, 8], key="a")
    for key, found in (("a", (7, 8)), ("b", ()), (None, ())):
        assert draft_of(proposer, make_request([9, 5, 6], key=CacheKey(key)), 3).token_ids == found
    other = make_request([9, 5, 6], key=CacheKey("a", "adapter"))
    assert draft_of(proposer, other, 3) == NO_DRAFT


def test_a_branch_that_is_gone_leaves_its_answer() -> None:
    proposer = Suffix()
    request = make_request([1])
    draft_of(proposer, request, 1)
    request.branches[0].tokens += [5, 6, 7]
    del request
    assert draft_of(proposer, make_request([5, 6]), 2).token_ids == (7,)


def test_the_oldest_answers_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_ANSWER_TOKENS", 40)
    monkeypatch.setattr(suffix, "MAX_KEYS", 2)
    proposer = Suffix()
    for first in range(10, 200, 10):
        answered(proposer, [1], [first, first + 1, first + 2])
        [answers] = proposer._answers.values()
        assert len(answers.index.text) <= 40
    assert draft_of(proposer, make_request([190, 191]), 1).token_ids == (192,)
    assert draft_of(proposer, make_request([10, 11]), 1) == NO_DRAFT
    for key in ("a", "b"):
        answered(proposer, [1], [5, 6, 7], key)
    assert list(proposer._answers) == [CacheKey("a"), CacheKey("b")]
    assert proposer._own == {}


def test_work_on_a_text_of_one_token_is_bounded() -> None:
    draft = draft_of(Suffix(), make_request([7] * 500), 5)
    assert draft.token_ids == (7,) * 5
    assert len(suffix._places(Occurrences([7] * 500, 2), [7, 7])) == 0  # not indexed yet
    text = [7] * 500
    index = Occurrences(text, 2)
    index.extend()
    assert len(suffix._places(index, text)) == 4


def test_a_history_gives_one_draft() -> None:
    def drafts() -> list[Draft]:
        random, proposer = np.random.default_rng(3), Suffix(is_tree=True)
        made = []
        for _ in range(12):
            request = make_request(random.integers(0, 4, 12).tolist())
            for _ in range(6):
                made.append(draft_of(proposer, request, 5))
                request.branches[0].tokens += random.integers(0, 4, 3).tolist()
        return made

    assert drafts() == drafts()
