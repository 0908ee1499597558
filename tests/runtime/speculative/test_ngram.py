import gc
from collections.abc import Sequence

import numpy as np
from speculation import ask, make_request

from octavo.runtime.speculative.draft import NO_DRAFT
from octavo.runtime.speculative.ngram import NGram


def searched(tokens: Sequence[int], longest: int, shortest: int, most: int) -> list[int]:
    """What prompt lookup means, by looking everywhere."""
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if tokens[end - length : end] == tokens[-length:]:
                found = list(tokens[end:])
                return [found[i % len(found)] for i in range(most)]
    return []


def test_drafts_are_what_a_search_finds(seed: int = 6) -> None:
    random = np.random.default_rng(seed)
    proposer = NGram(longest=4, shortest=2)
    for _ in range(30):
        request = make_request(random.integers(0, 4, 5).tolist())
        [branch] = request.branches
        for _ in range(20):
            most = int(random.integers(1, 9))
            [draft] = proposer.propose([ask(request, most)])
            assert list(draft.token_ids) == searched(branch.tokens, 4, 2, most)
            assert draft.is_chain and draft.is_fixed
            branch.tokens += random.integers(0, 4, int(random.integers(1, 4))).tolist()


def test_longer_matches_score_higher_and_scores_rise_with_depth() -> None:
    proposer = NGram(longest=6, shortest=1)
    [short], [long] = (
        proposer.propose([ask(make_request(tokens), 3)])
        for tokens in ([1, 2, 3, 4, 9, 2], [1, 2, 3, 4, 5, 6, 1, 2, 3])
    )
    assert short.token_ids == (3, 4, 9) and long.token_ids == (4, 5, 6)
    assert short.scores is not None and long.scores is not None
    assert 0 < short.scores[0] < short.scores[1] < long.scores[0] < long.scores[2] < 1


def test_there_may_be_nothing_to_draft() -> None:
    proposer = NGram()
    requests = [make_request(tokens) for tokens in ([1], [1, 2, 3], [1, 2, 3, 1])]
    assert proposer.propose([ask(request, 4) for request in requests]) == [NO_DRAFT] * 3


def test_tokens_of_another_text_are_not_drafted() -> None:
    proposer, request = NGram(), make_request([1, 2, 3, 4, 5, 1, 2])
    [branch] = request.branches
    assert proposer.propose([ask(request, 2)])[0].token_ids == (3, 4)
    branch.tokens[:] = [1, 2, 8, 4, 5, 6, 1, 2]
    assert proposer.propose([ask(request, 2)])[0].token_ids == (8, 4)


def test_a_branch_is_forgotten_with_its_request() -> None:
    proposer, request = NGram(), make_request([1, 2, 1, 2])
    proposer.propose([ask(request, 1)])
    del request
    gc.collect()
    assert len(proposer._texts) == 0
