from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from octavo.compiler.errors import ExecutionError, OptionError, RequestError
from octavo.runtime.engine import Engine
from octavo.runtime.request import Completion, Token
from octavo.runtime.sampling_params import SamplingParams

Make = Callable[..., Engine]
Greedy = Callable[..., list[int]]

PROMPTS = [
    [1, 2, 3],
    [4],
    [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22],
    [23, 24],
    [1, 2, 3],
]
TEN = SamplingParams(max_tokens=10)
HOT = SamplingParams(max_tokens=10, temperature=1.0, top_p=0.9)


class Letters:
    """Token i is a letter; 49 is the first and 48 the second byte of a character, shown only together."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("A") for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        text = "".join(chr(ord("A") + token) for token in token_ids)
        return text.replace("ra", "é")[:-1] + "\ufffd" if text.endswith("r") else text.replace("ra", "é")


def is_idle(engine: Engine) -> bool:
    engine.scheduler.check()
    return (
        not engine.has_unfinished
        and engine.memory.pool.num_free == engine.memory.pool.capacity
        and not engine._outputs
    )


@pytest.mark.parametrize("is_chunked", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_pages", [12, 200])
def test_a_batch_of_unequal_prompts_equals_each_alone(
    make_engine: Make, greedy: Greedy, is_chunked: bool, page_size: int, num_pages: int
) -> None:
    engine = make_engine(
        num_pages * 4 // page_size + 1,
        page_size,
        max_batch_tokens=16 if is_chunked else None,
        chunked_prefill=is_chunked,
    )
    prompts = PROMPTS if is_chunked else [prompt for prompt in PROMPTS if len(prompt) <= 16]
    answers = engine.generate(prompts, TEN)
    assert [list(answer.token_ids) for answer in answers] == [greedy(prompt, 10) for prompt in prompts]
    assert [list(answer.prompt_token_ids) for answer in answers] == prompts
    assert is_idle(engine)


def test_preemption_does_not_change_the_tokens(make_engine: Make, greedy: Greedy) -> None:
    engine = make_engine(num_pages=9, page_size=4)
    answers = engine.generate(PROMPTS, TEN)
    assert engine.stats.num_preemptions > 0
    assert [list(answer.token_ids) for answer in answers] == [greedy(prompt, 10) for prompt in PROMPTS]


def test_a_seed_gives_the_same_tokens_whatever_else_runs(make_engine: Make) -> None:
    mine = SamplingParams(max_tokens=10, temperature=1.0, seed=7)
    [alone] = make_engine(seed=1).generate([[1, 2, 3]], mine)
    crowded = make_engine(num_pages=9, max_batch_tokens=6, seed=2)
    together = crowded.generate([*PROMPTS, [1, 2, 3]], [HOT] * 5 + [mine])
    assert crowded.stats.num_preemptions > 0
    assert together[-1].token_ids == alone.token_ids
    [other] = make_engine(seed=1).generate(
        [[1, 2, 3]], SamplingParams(max_tokens=10, temperature=1.0, seed=8)
    )
    assert other.token_ids != alone.token_ids


def test_requests_without_a_seed_follow_the_engine_s(make_engine: Make) -> None:
    first, again, other = (make_engine(seed=seed).generate([[1, 2]] * 3, HOT) for seed in (5, 5, 6))
    assert [a.token_ids for a in first] == [a.token_ids for a in again]
    assert len({a.token_ids for a in (*first, *other)}) == 6, "streams of one engine and of two differ"
    assert make_engine().seed != make_engine().seed


def test_end_tokens(make_engine: Make, greedy: Greedy) -> None:
    tokens = greedy([1, 2, 3], 10)
    eos = tokens[4]
    first = tokens.index(eos)
    engine = make_engine(eos_token_ids=(eos,))
    [answer] = engine.generate([[1, 2, 3]], TEN)
    assert list(answer.token_ids) == tokens[: first + 1] and answer.finish_reason == "stop"
    [answer] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=10, ignore_eos=True))
    assert list(answer.token_ids) == tokens and answer.finish_reason == "length"
    stop = SamplingParams(max_tokens=10, ignore_eos=True, stop_token_ids=(tokens[2],))
    [answer] = engine.generate([[1, 2, 3]], stop)
    assert list(answer.token_ids) == tokens[: tokens.index(tokens[2]) + 1] and answer.finish_reason == "stop"


def test_an_end_token_in_the_prompt_or_as_the_last_allowed_token(make_engine: Make, greedy: Greedy) -> None:
    tokens = greedy([1, 2, 3], 3)
    assert len(set(tokens)) == 3
    [answer] = make_engine(eos_token_ids=(3, tokens[2])).generate([[1, 2, 3]], SamplingParams(max_tokens=3))
    assert list(answer.token_ids) == tokens and answer.finish_reason == "stop"


def test_an_end_token_at_the_end_of_a_prompt_in_pieces(make_engine: Make, greedy: Greedy) -> None:
    prompt = [*PROMPTS[2], 49]
    [answer] = make_engine(eos_token_ids=(49,), max_batch_tokens=4).generate(
        prompt, SamplingParams(max_tokens=3)
    )
    assert list(answer.token_ids) == greedy(prompt, 3, stop=[49])


def test_an_open_answer_ends_with_the_model_or_the_pool(make_engine: Make) -> None:
    [answer] = make_engine(max_model_len=20).generate([[1, 2, 3]])
    assert len(answer.token_ids) == 17 and answer.finish_reason == "length"
    [answer] = make_engine(num_pages=4).generate([[1, 2, 3]])
    assert len(answer.token_ids) == 3 * 4 + 1 - 3


def test_stream_gives_the_same_tokens_one_by_one(make_engine: Make, greedy: Greedy) -> None:
    engine = make_engine(tokenizer=Letters())
    tokens = list(engine.stream(PROMPTS, TEN))
    for index, prompt in enumerate(PROMPTS):
        own = [token for token in tokens if token.index == index]
        assert [token.token_id for token in own] == greedy(prompt, 10)
        assert [token.finish_reason for token in own] == [None] * 9 + ["length"]
    assert is_idle(engine)


def test_text_in_and_out(make_engine: Make, greedy: Greedy) -> None:
    engine = make_engine(tokenizer=Letters())
    [answer] = engine.generate("ABC", TEN)
    assert answer.text == Letters().decode(greedy([0, 1, 2], 10)) and answer.prompt_token_ids == (0, 1, 2)
    streamed = [token.text for token in engine.stream("ABC", TEN)]
    assert "".join(streamed) == answer.text
    assert make_engine().generate([[0, 1, 2]], TEN)[0].text is None


def test_half_a_character_is_never_shown(make_engine: Make) -> None:
    engine = make_engine(tokenizer=Letters())
    first, second = 49, 32  # "r", "a"
    script = iter([7, first, second, 8, first])

    def run(batch: Any) -> Any:
        return np.eye(50, dtype=np.float32)[[next(script)]]

    engine.runner.run = run  # type: ignore[method-assign]
    texts = [token.text for token in engine.stream("ABC", SamplingParams(max_tokens=5))]
    assert texts == ["H", "", "é", "I", "\ufffd"]


def test_end_tokens_have_no_text(make_engine: Make, greedy: Greedy) -> None:
    tokens = greedy([0, 1, 2], 4)
    [answer] = make_engine(tokenizer=Letters(), eos_token_ids=(tokens[3],)).generate("ABC")
    assert answer.token_ids == tuple(tokens) and answer.text == Letters().decode(tokens[:3])


def test_stop_strings_cut_the_text_and_end_the_request(make_engine: Make, greedy: Greedy) -> None:
    text = Letters().decode(greedy([0, 1, 2], 10))
    stop = text[3:5]
    at = text.index(stop)
    engine = make_engine(tokenizer=Letters())
    [answer] = engine.generate("ABC", SamplingParams(max_tokens=10, stop=(stop,)))
    assert answer.text == text[:at] and answer.finish_reason == "stop"
    assert len(answer.token_ids) == at + 2 and is_idle(engine)
    assert (
        stop[0]
        not in "".join(t.text for t in engine.stream("ABC", SamplingParams(max_tokens=10, stop=(stop,))))[at:]
    )


def test_a_stop_string_ends_the_work_too(make_engine: Make, greedy: Greedy) -> None:
    text = Letters().decode(greedy([0, 1, 2], 10))
    engine = make_engine(tokenizer=Letters())
    engine.add_request("ABC", SamplingParams(max_tokens=10, stop=(text[3],)))
    for _ in range(text.index(text[3]) + 1):
        assert engine.has_unfinished
        engine.step()
    assert is_idle(engine)


def test_a_stop_string_in_the_last_allowed_token_still_stops(make_engine: Make, greedy: Greedy) -> None:
    text = Letters().decode(greedy([0, 1, 2], 4))
    [answer] = make_engine(tokenizer=Letters()).generate("ABC", SamplingParams(max_tokens=4, stop=(text[3],)))
    assert answer.finish_reason == "stop" and answer.text == text[: text.index(text[3])]


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(make_engine: Make, greedy: Greedy) -> None:
    text = Letters().decode(greedy([0, 1, 2], 4))
    [answer] = make_engine(tokenizer=Letters()).generate(
        "ABC", SamplingParams(max_tokens=4, stop=(text[2:] + "#",))
    )
    assert answer.text == text and answer.finish_reason == "length"


def test_closing_a_stream_returns_its_pages(make_engine: Make) -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS, TEN)
    for _ in range(4):
        next(stream)
    assert engine.memory.pool.num_free < engine.memory.pool.capacity
    stream.close()  # type: ignore[attr-defined]
    assert is_idle(engine)


def test_a_stream_that_is_never_started_holds_nothing(make_engine: Make) -> None:
    engine = make_engine()
    stream = engine.stream(PROMPTS, TEN)
    assert is_idle(engine)
    del stream
    assert is_idle(engine)


def test_streams_may_be_read_in_turns(make_engine: Make, greedy: Greedy) -> None:
    engine = make_engine()
    streams = [engine.stream([prompt], TEN) for prompt in PROMPTS[:3]]
    answers: list[list[Any]] = [[], [], []]
    for _ in range(10):
        for stream, answer in zip(streams, answers, strict=True):
            answer.append(next(stream).token_id)
    assert answers == [greedy(prompt, 10) for prompt in PROMPTS[:3]]
    assert all(next(stream, None) is None for stream in streams) and is_idle(engine)


def test_aborting_a_request_ends_its_stream(make_engine: Make) -> None:
    engine = make_engine()
    stream = engine.stream([[1, 2]], TEN)
    first = next(stream)
    assert engine.abort(first.request_id) and not engine.abort(first.request_id) and not engine.abort(99)
    [last] = list(stream)
    assert last == Token(first.request_id, 0, None, "", "abort") and is_idle(engine)


def test_requests_added_one_by_one(make_engine: Make, greedy: Greedy) -> None:
    engine = make_engine()
    first = engine.add_request([1, 2], TEN)
    engine.step()
    second = engine.add_request([3, 4], TEN)
    seen: dict[int, list[Any]] = {first: [greedy([1, 2], 1)[0]], second: []}
    while engine.has_unfinished:
        for token in engine.step():
            seen[token.request_id].append(token.token_id)
    assert seen == {first: greedy([1, 2], 10), second: greedy([3, 4], 10)}
    assert engine.step() == []


def test_an_error_in_a_step_leaves_the_engine_usable(make_engine: Make, greedy: Greedy) -> None:
    engine = make_engine()
    engine.runner.fail_with = MemoryError("no room")  # type: ignore[attr-defined]
    with pytest.raises(MemoryError):
        engine.generate(PROMPTS, TEN)
    assert is_idle(engine)
    engine.runner.fail_with = None  # type: ignore[attr-defined]
    assert list(engine.generate([[1, 2]], TEN)[0].token_ids) == greedy([1, 2], 10)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_end_their_request_only(make_engine: Make, greedy: Greedy, value: float) -> None:
    engine = make_engine()
    engine.runner.poison = {41: value}  # type: ignore[attr-defined]
    good, bad = engine.add_request([1, 2], TEN), engine.add_request([40, 41], TEN)
    tokens = []
    while engine.has_unfinished:
        tokens += engine.step()
    [failed] = [token for token in tokens if token.request_id == bad]
    assert failed.finish_reason == "error" and failed.token_id is None
    assert failed.error is not None and "logits: expected finite numbers" in failed.error
    assert [token.token_id for token in tokens if token.request_id == good] == greedy([1, 2], 10)
    with pytest.raises(
        ExecutionError, match=r"prompt 1: logits: expected finite numbers, got .* at position 2"
    ):
        engine.generate([[1, 2], [40, 41]], TEN)
    assert is_idle(engine)


@pytest.mark.parametrize(
    ("prompts", "params", "expected"),
    [
        ([[]], None, "prompt: expected at least 1 token, got none"),
        ("x", None, "this engine has no tokenizer"),
        ([[1]], SamplingParams(stop=("x",)), "this engine has no tokenizer"),
        ([[1, 50]], None, "token ids of 0 to 49, got 50 at position 1"),
        ([[1] * 64], None, "within the model's 64 tokens, got a prompt of 64"),
        (
            [[1] * 60],
            SamplingParams(max_tokens=5),
            "within the model's 64 tokens, got a prompt of 60 and max_tokens 5",
        ),
        ([[1] * 40], None, "within the pool's 37 tokens"),
        ([[1]], SamplingParams(stop_token_ids=(50,)), "stop_token_ids: expected ids below 50, got 50"),
        ([[1], [2]], [TEN], "params: expected one for all or one for each of 2 prompts, got 1"),
        ([[1], []], None, "request 1: prompt: expected at least 1 token"),
    ],
)
def test_bad_requests_are_refused_before_anything_starts(
    make_engine: Make, prompts: Any, params: Any, expected: str
) -> None:
    engine = make_engine(num_pages=10)
    for call in (engine.generate, engine.stream):
        with pytest.raises(RequestError, match=expected):
            call(prompts, params)
    assert is_idle(engine) and engine.stats.num_steps == 0


def test_an_empty_text_is_refused_too(make_engine: Make) -> None:
    with pytest.raises(RequestError, match="expected at least 1 token, got none"):
        make_engine(tokenizer=Letters()).generate("")


def test_bad_options_are_refused(make_engine: Make) -> None:
    with pytest.raises(OptionError, match=r"max_batch_tokens: expected 1 to 16 \(compiled in\), got 17"):
        make_engine(max_batch_tokens=17)
    with pytest.raises(OptionError, match="max_requests: expected 1 or more, got 0"):
        make_engine(max_requests=0)


def test_one_prompt_may_be_given_alone(make_engine: Make, greedy: Greedy) -> None:
    engine = make_engine()
    for prompt in ([1, 2], (1, 2), np.array([1, 2]), [[1, 2]], [np.array([1, 2])]):
        [answer] = engine.generate(prompt, TEN)  # type: ignore[arg-type]
        assert isinstance(answer, Completion) and list(answer.token_ids) == greedy([1, 2], 10)
    assert engine.generate([], TEN) == []


def test_stats(make_engine: Make) -> None:
    engine = make_engine(max_batch_tokens=8)
    engine.generate([[1, 2, 3], [4] * 12], TEN)
    stats = engine.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.num_preemptions) == (15, 20, 0)
    assert stats.computed_tokens == 15 + 18, "the last token of each is never fed back"
    assert stats.num_steps == 11 and stats.seconds > 0
    assert stats.tokens_per_second == 20 / stats.seconds
