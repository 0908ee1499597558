from collections import Counter
from typing import Any

import numpy as np
import pytest
from fake_runner import FakeRunner, logits_of, make_model
from scripted import SCRIPTS, Script, Scripted, drawn, off_the_first_path, right

from octavo.runtime.engine import Engine
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.request import Completion
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.accept import Rule
from octavo.runtime.speculative.draft import Draft
from octavo.runtime.speculative.model import DraftModel, ModelProposer
from octavo.runtime.speculative.policy import Adaptive, FixedLength, only
from octavo.runtime.speculative.proposer import Proposer
from octavo.runtime.speculative.speculator import Speculator
from octavo.runtime.stats import prometheus_text

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18], [23, 24], [1, 2, 3]]
ALL: dict[str, SamplingParams] = {
    "greedy": SamplingParams(max_tokens=12),
    "sampled": SamplingParams(max_tokens=12, temperature=1.0, seed=5),
    "cut": SamplingParams(max_tokens=12, temperature=0.7, top_k=9, top_p=0.8, min_p=0.02, seed=6),
    "penalties": SamplingParams(
        max_tokens=12,
        repetition_penalty=1.3,
        frequency_penalty=0.4,
        presence_penalty=0.3,
        logit_bias={3: 4.0},
    ),
    "min_tokens": SamplingParams(max_tokens=12, min_tokens=6, stop_token_ids=(3, 11, 17, 30, 40)),
    "logprobs": SamplingParams(max_tokens=12, logprobs=3),
    "several": SamplingParams(max_tokens=12, n=3, temperature=1.0, seed=2),
    "stop tokens": SamplingParams(max_tokens=12, stop_token_ids=tuple(range(0, 50, 4))),
}


def engine_with(proposer: Proposer | None, length: int = 4, rule: Rule = "block", **options: Any) -> Engine:
    runner: ModelRunner = FakeRunner(options.pop("num_pages", 60), 4, **options.pop("runner", {}))
    speculator = None if proposer is None else Speculator(proposer, FixedLength(length), rule)
    return Engine(runner, make_model(), speculator=speculator, seed=1, **options)


def answers(engine: Engine, params: SamplingParams) -> list[Completion]:
    """Of all prompts; the books are checked after every step."""
    step = engine.step

    def checked() -> Any:
        tokens = step()
        engine.scheduler.check()
        return tokens

    engine.step = checked  # type: ignore[method-assign]
    return engine.generate(PROMPTS, params)


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("name", SCRIPTS)
def test_output_is_that_of_plain_decoding_whatever_is_drafted(name: str, kind: str) -> None:
    proposer = Scripted(SCRIPTS[name])
    got = answers(engine_with(proposer, 6), ALL[kind])
    assert got == answers(engine_with(None), ALL[kind])
    assert proposer.num_asked > 0


@pytest.mark.parametrize("name", ["right", "half", "off_the_first_path"])
@pytest.mark.parametrize("pages", [{"num_pages": 11}, {"num_pages": 11, "runner": {"num_host_pages": 8}}])
def test_requests_that_give_way_and_come_back_answer_the_same(name: str, pages: dict[str, Any]) -> None:
    engine = engine_with(Scripted(SCRIPTS[name]), 6, **pages)
    assert answers(engine, ALL["greedy"]) == answers(engine_with(None), ALL["greedy"])
    assert engine.scheduler.stats.num_preemptions > 0


def test_windows_slide_past_accepted_tokens_only() -> None:
    runner = {"windows": (6, None)}
    got = answers(engine_with(Scripted(SCRIPTS["half"]), runner=runner), ALL["greedy"])
    assert got == answers(engine_with(None, runner=runner), ALL["greedy"])


def test_right_drafts_save_steps_and_are_counted() -> None:
    engine = engine_with(Scripted(right))
    engine.generate(PROMPTS[:1], ALL["greedy"])
    # 12 tokens: one with the prompt, twice 4 + 1, and the last, in front of which there is no room for a draft
    assert engine.stats.num_steps == 4 and engine.stats.generated_tokens == 12
    assert engine.speculator is not None
    figures = engine.speculator.figures
    assert (figures.rounds, figures.drafted, figures.accepted, figures.emitted) == (2, 8, 8, 10)
    assert figures.acceptance == (1.0,) * 4 and figures.mean_emitted == 5.0
    snapshot = engine.snapshot()
    assert (snapshot.drafted_tokens, snapshot.accepted_tokens) == (8, 8)
    assert 'octavo_draft_tokens_total{kind="accepted"} 8' in prometheus_text(snapshot)


def test_acceptance_is_counted_by_depth() -> None:
    engine = engine_with(Scripted(SCRIPTS["half"]))
    engine.generate([[4]], SamplingParams(max_tokens=24))
    assert engine.speculator is not None
    figures = engine.speculator.figures
    assert figures.offered[0] == figures.rounds and figures.offered[1:] == figures.accepted_at[:-1]
    assert (
        sum(figures.accepted_at) == figures.accepted and figures.emitted == figures.accepted + figures.rounds
    )


def test_drafts_behind_an_end_token_count_for_nothing() -> None:
    stop = right_tokens([4], 12)[5]
    engine = engine_with(Scripted(right))
    (answer,) = engine.generate([[4]], SamplingParams(max_tokens=12, stop_token_ids=(stop,)))
    expected = right_tokens([4], 12)
    assert list(answer.token_ids) == expected[: expected.index(stop) + 1] and answer.finish_reason == "stop"
    assert engine.stats.generated_tokens == len(answer.token_ids)
    assert engine.speculator is not None
    assert engine.speculator.figures.emitted == len(answer.token_ids) - 1


def right_tokens(prompt: list[int], count: int) -> list[int]:
    history = list(prompt)
    for _ in range(count):
        history.append(int(np.argmax(logits_of(history))))
    return history[len(prompt) :]


class Letters:
    """Token i is a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("A") for letter in text]

    def decode(self, token_ids: Any) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


@pytest.mark.parametrize("name", ["right", "half", "off_the_first_path"])
def test_stop_strings_cut_where_they_cut_without_drafts(name: str) -> None:
    """At every place of the answer, over the borders of rounds too; nothing behind counts as generated."""
    text = Letters().decode(right_tokens([4], 20))
    for start in range(12):
        for length in (1, 2, 5):
            params = SamplingParams(max_tokens=20, stop=(text[start : start + length],), logprobs=1)
            engines = [
                Engine(
                    FakeRunner(60, 4), make_model(), Letters(),
                    speculator=None if proposer is None else Speculator(proposer, FixedLength(6)),
                )
                for proposer in (None, Scripted(SCRIPTS[name]))
            ]  # fmt: skip
            plain, drafted = (engine.generate([[4]], params) for engine in engines)
            assert drafted == plain and plain[0].finish_reason == "stop"
            assert engines[0].stats.generated_tokens == engines[1].stats.generated_tokens


def test_rejected_tokens_never_come_to_the_prefix_cache() -> None:
    engine = engine_with(Scripted(SCRIPTS["half"]))
    plain = right_tokens([4], 30)
    engine.generate([[4]], SamplingParams(max_tokens=30))
    (again,) = engine.generate([[4, *plain[:20]]], SamplingParams(max_tokens=10))
    assert list(again.token_ids) == plain[20:]
    assert engine.snapshot().hit_tokens >= 16


@pytest.mark.parametrize("rule", ["block", "token"])
def test_drawn_drafts_leave_the_distribution_as_it_is(rule: Rule) -> None:
    """The first two tokens after a prompt, of 3,000 requests each, beside their exact law."""
    params = SamplingParams(max_tokens=3, temperature=1.0, top_k=4)
    engine = Engine(
        FakeRunner(400, 4), make_model(max_batch_tokens=512), max_requests=96, seed=3,
        speculator=Speculator(Scripted(drawn), FixedLength(2), rule),
    )  # fmt: skip
    found = Counter(answer.token_ids[1:] for answer in engine.generate([[9, 8]] * 3000, params))
    assert engine.speculator is not None and 0.1 < engine.speculator.figures.accepted / 3000 < 1.9
    law: Counter[tuple[int, ...]] = Counter()
    for first, p in top4([9, 8]).items():
        for second, q in top4([9, 8, first]).items():
            for third, r in top4([9, 8, first, second]).items():
                law[second, third] += p * q * r  # type: ignore[assignment]
    distance = sum(abs(found[key] / 3000 - law[key]) for key in {*found, *law}) / 2
    assert distance < 0.5 * np.sqrt(len(law) / 3000) + np.sqrt(np.log(1e6) / 6000)
    assert set(found) <= set(law)


def top4(history: list[int]) -> dict[int, float]:
    logits = logits_of(history).astype(np.float64)
    ids = np.argsort(-logits)[:4]
    weights = np.exp(logits[ids])
    return dict(zip(ids.tolist(), (weights / weights.sum()).tolist(), strict=True))


def test_same_seed_same_tokens_with_drawn_drafts_in_any_company() -> None:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=8)
    alone = engine_with(Scripted(drawn)).generate([PROMPTS[2]], params)
    assert answers(engine_with(Scripted(drawn), 2), params)[2].token_ids == alone[0].token_ids


def draft_model(runner: ModelRunner, **options: Any) -> ModelProposer:
    return ModelProposer(DraftModel(runner, 50, options.pop("max_tokens", 16), **options))


class Other(FakeRunner):
    """A draft model that is of the target's mind for about three tokens of four."""

    def _logits(self, history: list[int]) -> Any:
        logits = logits_of(history)
        return np.roll(logits, 1) if sum(history) % 4 == 0 else logits


@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("max_tokens", [5, 16])
def test_a_draft_model_follows_the_targets_pages(kind: str, max_tokens: int) -> None:
    proposer = draft_model(Other(60, 4), max_tokens=max_tokens)
    engine = engine_with(proposer)
    assert answers(engine, ALL[kind]) == answers(engine_with(None), ALL[kind])
    figures = engine.speculator.figures if engine.speculator else None
    assert figures is not None and 0.2 < figures.accepted / figures.drafted < 0.95


class Cut(FixedLength):
    """Asks for more than it lets through: what follows a cut draft may be what was drafted."""

    def trim(self, branches: Any, drafts: Any, num_known: int) -> list[Draft]:
        return [only(draft, [0]) for draft in drafts]


def test_a_draft_that_is_cut_may_go_on_as_it_was_drafted() -> None:
    engine = Engine(
        FakeRunner(60, 4), make_model(), speculator=Speculator(draft_model(FakeRunner(60, 4)), Cut(4))
    )
    assert answers(engine, ALL["greedy"]) == answers(engine_with(None), ALL["greedy"])
    figures = engine.speculator.figures if engine.speculator else None
    assert figures is not None and figures.accepted == figures.drafted == figures.rounds > 0


def test_accepted_tokens_are_not_computed_again_by_the_draft_model() -> None:
    runner = FakeRunner(60, 4)
    engine = engine_with(draft_model(runner))
    engine.generate(PROMPTS[:1], ALL["greedy"])
    # the prompt and the first token; 3 drafted ones alone; the last draft and the newest, 3 again
    assert [batch["T"] for batch in runner.batches] == [4, 1, 1, 1, 2, 1, 1, 1]


@pytest.mark.parametrize("pages", [{"num_pages": 11}, {"num_pages": 11, "runner": {"num_host_pages": 8}}])
def test_a_draft_model_follows_requests_that_give_way(pages: dict[str, Any]) -> None:
    """Its pages hold garbage where the target's were new, so a slot that is taken for filled would show."""
    proposer = draft_model(FakeRunner(pages["num_pages"], 4, **pages.get("runner", {})))
    engine = engine_with(proposer, **pages)
    got = [answer.token_ids for answer in engine.generate(PROMPTS * 2, ALL["greedy"])]
    assert got == [tuple(right_tokens(prompt, 12)) for prompt in PROMPTS * 2]
    assert engine.scheduler.stats.num_preemptions > 0
    figures = engine.speculator.figures if engine.speculator else None
    assert figures is not None and figures.accepted == figures.drafted > 0


def test_a_draft_model_knows_few_of_the_targets_tokens() -> None:
    ids = np.arange(0, 50, 2)

    class Few(FakeRunner):
        def run(self, batch: Any) -> Any:
            return super().run(batch)[:, ids].copy()

    engine = engine_with(draft_model(Few(60, 4), target_ids=ids))
    assert answers(engine, ALL["cut"]) == answers(engine_with(None), ALL["cut"])
    figures = engine.speculator.figures if engine.speculator else None
    assert figures is not None and 0 < figures.accepted < figures.drafted


@pytest.mark.parametrize("kind", ["greedy", "sampled", "penalties"])
def test_a_broken_draft_model_only_drafts_nothing(kind: str) -> None:
    class Broken(FakeRunner):
        def _logits(self, history: list[int]) -> Any:
            return np.full(50, np.nan, np.float32)

    speculator = Speculator(draft_model(Broken(60, 4)), Adaptive(4, lambda counts: 1 + 0.01 * counts))
    engine = Engine(FakeRunner(60, 4), make_model(), speculator=speculator, seed=1)
    assert answers(engine, ALL[kind]) == answers(engine_with(None), ALL[kind])


def test_trees_need_no_more_room_than_their_masks() -> None:
    """A tree may come behind known tokens that are computed again; both fit 64 bits."""
    got = answers(engine_with(Scripted(off_the_first_path), 5, max_batch_tokens=16), ALL["greedy"])
    assert got == answers(engine_with(None), ALL["greedy"])


@pytest.mark.parametrize("script", SCRIPTS.values())
def test_an_interrupt_anywhere_loses_nothing(script: Script) -> None:
    engine = engine_with(Scripted(script))
    ids = [engine.add_request(prompt, ALL["greedy"]) for prompt in PROMPTS]
    tokens: dict[int, list[int]] = {each: [] for each in ids}
    runner = engine.runner
    assert isinstance(runner, FakeRunner)
    for turn in range(200):
        runner.fail_with = KeyboardInterrupt() if turn % 3 == 0 else None
        try:
            for token in engine.step():
                if token.token_id is not None:
                    tokens[token.request_id].append(token.token_id)
        except KeyboardInterrupt:
            engine.scheduler.check()
        if not engine.has_unfinished:
            break
    assert list(tokens.values()) == [right_tokens(prompt, 12) for prompt in PROMPTS]
