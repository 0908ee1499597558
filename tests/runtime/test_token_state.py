from collections.abc import Collection, Sequence

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from octavo.runtime.sampling_params import SamplingParams, Structured
from octavo.runtime.token_state import TokenState, new_token_state

VOCAB = 12
LOGITS = np.random.default_rng(5).standard_normal(VOCAB).astype(np.float32) * 4

Row = NDArray[np.float32]


class OddFirst:
    """A grammar: odd ids at odd places of the answer, even ids at even ones."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def accept(self, token_ids: Sequence[int]) -> None:
        self.count += len(token_ids)

    def rollback(self, count: int) -> None:
        self.count -= count

    def fork(self) -> "OddFirst":
        return OddFirst(self.count)

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        is_odd: NDArray[np.bool_] = np.arange(vocab_size) % 2 == 1
        return is_odd if self.count % 2 == 0 else ~is_odd

    def forced(self) -> list[int]:
        return []


def applied(
    params: SamplingParams, prompt: list[int], answer: list[int], stop_ids: Collection[int] = ()
) -> Row:
    state = new_token_state(params, len(prompt), stop_ids)
    assert state is not None
    state.sync(prompt + answer)
    return state.apply(LOGITS)


def by_hugging_face(processor: object, tokens: list[int], logits: Row = LOGITS) -> Row:
    scores = processor(torch.tensor([tokens]), torch.from_numpy(logits.copy())[None])  # type: ignore[operator]
    result: Row = scores[0].numpy()
    return result


_tokens = st.lists(st.integers(0, VOCAB - 1), max_size=15)


def test_params_that_ask_for_nothing_need_no_state() -> None:
    idle = SamplingParams(temperature=2, top_k=3, stop_token_ids=(1,), logprobs=3, n=2)
    assert new_token_state(idle, 3, {1}) is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(min_tokens=1),
        SamplingParams(logit_bias={3: 1}),
        SamplingParams(repetition_penalty=1.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(presence_penalty=-0.1),
    ],
)
def test_whatever_is_asked_for_needs_a_state(params: SamplingParams) -> None:
    assert new_token_state(params, 3, {1}) is not None
    assert new_token_state(SamplingParams(), 3, {1}, OddFirst()) is not None


@settings(deadline=None)
@given(_tokens.filter(len), _tokens, st.floats(0.3, 3))
def test_repetition_is_hugging_face_s_of_prompt_and_answer(
    prompt: list[int], answer: list[int], penalty: float
) -> None:
    expected = by_hugging_face(RepetitionPenaltyLogitsProcessor(penalty), prompt + answer)
    params = SamplingParams(repetition_penalty=penalty)
    state = TokenState(params, len(prompt))
    state.sync(prompt + answer)
    assert np.allclose(state.apply(LOGITS), expected, rtol=1e-6)


@settings(deadline=None)
@given(_tokens.filter(len), _tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_count_the_answer_only(
    prompt: list[int], answer: list[int], presence: float, frequency: float
) -> None:
    state = TokenState(SamplingParams(presence_penalty=presence, frequency_penalty=frequency), len(prompt))
    state.sync(prompt + answer)
    expected = [
        logit - frequency * answer.count(token) - presence * (token in answer)
        for token, logit in enumerate(LOGITS.tolist())
    ]
    assert np.allclose(state.apply(LOGITS), expected, rtol=1e-5, atol=1e-5)


def test_bias_is_hugging_face_s() -> None:
    bias = {3: 2.5, 7: -100.0, 0: 0.25}
    processor = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    assert np.array_equal(
        applied(SamplingParams(logit_bias=bias), [1], [2]), by_hugging_face(processor, [1, 2])
    )


@pytest.mark.parametrize("generated", [0, 1, 2, 3, 4])
def test_end_tokens_are_forbidden_as_long_as_in_hugging_face(generated: int) -> None:
    processor = MinNewTokensLengthLogitsProcessor(2, 3, [4, 9])
    tokens = [1, 2, *[5] * generated]
    expected = by_hugging_face(processor, tokens)
    actual = applied(SamplingParams(min_tokens=3), tokens[:2], tokens[2:], {9, 4})
    assert np.array_equal(actual, expected)
    assert np.isneginf(actual[[4, 9]]).all() == (generated < 3)


def test_the_order_is_masks_then_bias_then_repetition_then_the_other_penalties() -> None:
    """Token 1 is biased across zero before it is divided; token 2 is masked and stays so."""
    logits = np.array([1, -1, 1, 1], np.float32)
    params = SamplingParams(
        logit_bias={1: 4, 2: 100},
        repetition_penalty=2,
        frequency_penalty=0.5,
        presence_penalty=0.25,
        min_tokens=9,
    )
    state = TokenState(params, 1, {2})
    state.sync([0, 1, 1, 3])
    assert state.apply(logits).tolist() == [0.5, 3 / 2 - 1 - 0.25, -np.inf, 0.5 - 0.5 - 0.25]


def test_a_grammar_s_mask_follows_the_answer() -> None:
    params = SamplingParams(structured=Structured.json(), logit_bias={0: 100})
    state = new_token_state(params, 2, (), OddFirst())
    assert state is not None
    state.sync([4, 4])
    assert np.flatnonzero(np.isneginf(state.apply(LOGITS))).tolist() == [0, 2, 4, 6, 8, 10]
    state.sync([4, 4, 7])
    assert np.flatnonzero(np.isneginf(state.apply(LOGITS))).tolist() == [1, 3, 5, 7, 9, 11]


_ALL = SamplingParams(
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, min_tokens=4, logit_bias={3: 1.0}
)


def fresh(tokens: list[int]) -> Row:
    state = TokenState(_ALL, 2, {5}, OddFirst())
    state.sync(tokens)
    return state.apply(LOGITS)


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("adfs"), st.integers(0, VOCAB - 1)), max_size=30))
@example([("f", 0), ("a", 1), ("a", 2), ("a", 3)])
def test_any_course_of_events_gives_what_the_tokens_give(events: list[tuple[str, int]]) -> None:
    """Append, drop, fork and go on with the fork, and sync twice; branches left behind stay as they were."""
    tokens = [1, 8, 3, 6]
    state = TokenState(_ALL, 2, {5}, OddFirst())
    state.sync(tokens)
    left: list[tuple[TokenState, list[int]]] = []
    for event, value in events:
        if event == "a":
            tokens = [*tokens, value]
            state.sync(tokens)
        elif event == "d":
            count = min(value, len(tokens) - 2)
            tokens = tokens[: len(tokens) - count]
            state.rollback(count)
        elif event == "f":
            left.append((state, tokens))
            state = state.fork()
        else:
            state.sync(tokens)
        assert np.array_equal(state.apply(LOGITS), fresh(tokens))
    for other, its_tokens in left:
        assert np.array_equal(other.apply(LOGITS), fresh(its_tokens))


def test_apply_leaves_its_row_and_itself_as_they_were() -> None:
    state = TokenState(_ALL, 2, {5}, OddFirst())
    state.sync([1, 8, 2, 2])
    given_row = LOGITS.copy()
    first = state.apply(given_row)
    assert np.array_equal(given_row, LOGITS)
    assert np.array_equal(state.apply(LOGITS), first) and not np.array_equal(first, LOGITS)


def test_tokens_lost_without_a_rollback_are_a_bug_that_shows() -> None:
    state = TokenState(_ALL, 2)
    state.sync([1, 8, 2, 2])
    with pytest.raises(AssertionError, match="without a rollback"):
        state.sync([1, 8, 2])
    with pytest.raises(AssertionError, match="more tokens dropped than were generated"):
        state.rollback(3)
