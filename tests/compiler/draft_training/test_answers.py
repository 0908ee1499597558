from pathlib import Path

import pytest
from fake_runner import FakeRunner, make_model

from octavo.compiler.draft_training import answers
from octavo.compiler.draft_training.answers import generate_answers, jobs
from octavo.compiler.draft_training.prompts import is_held_out
from octavo.compiler.draft_training.work import WorkDirectory
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

PROMPTS = [[place + 1, 7, place + 3] for place in range(12)]


def engine() -> Engine:
    return Engine(FakeRunner(60, 4), make_model(max_model_len=64), max_requests=3, seed=0)


def quiet(name: str, done: int, total: int) -> None:
    assert 0 <= done <= total


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_ANSWER_TOKENS", 10)


def test_jobs_ask_held_out_prompts_once() -> None:
    made = jobs(12)
    assert [job.number for job in made] == list(range(len(made)))
    assert sorted(job.prompt for job in made[:12]) == list(range(12))
    assert all(job.temperature == 0 for job in made[:12])
    assert [is_held_out(job.prompt) for job in made[:4]] == [True, True, False, False]
    later = [job for job in made[12:]]
    assert later and not any(is_held_out(job.prompt) or job.temperature == 0 for job in later)
    assert jobs(12) == made


def test_answers_are_the_targets_own(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path / "w", {}, False)
    generate_answers(engine(), PROMPTS, work, 200, 1e9, quiet)
    assert sum(len(one.token_ids) - one.prompt_len for one in work.answers) >= 200 - 3
    assert work.seconds["answers"] > 0
    made = jobs(len(PROMPTS))
    for one in work.answers:
        job = made[one.job]
        assert one.token_ids[: one.prompt_len] == PROMPTS[job.prompt]
        params = SamplingParams(max_tokens=10, temperature=job.temperature, seed=job.number)
        [expected] = engine().generate([PROMPTS[job.prompt]], params)
        assert list(expected.token_ids)[: len(one.token_ids) - 3] == one.token_ids[3:]


def test_an_interrupt_keeps_what_there_is_and_no_answer_is_made_twice(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path / "w", {}, False)
    calls = [0]

    def interrupting(name: str, done: int, total: int) -> None:
        calls[0] += 1
        if calls[0] == 19:  # the second answers have nine tokens
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate_answers(engine(), PROMPTS, work, 400, 1e9, interrupting)
    again = WorkDirectory(tmp_path / "w", {}, True)
    assert [len(one.token_ids) - one.prompt_len for one in again.answers] == [10] * 3 + [9] * 3
    generate_answers(engine(), PROMPTS, again, 150, 1e9, quiet)
    numbers = [one.job for one in again.answers]
    assert len(set(numbers)) == len(numbers)


def test_time_and_prompts_end(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path / "w", {}, False)
    generate_answers(engine(), PROMPTS, work, 10**9, 0.0, quiet)
    assert work.answers == []
    generate_answers(engine(), [[1, 2], list(range(1, 49)) * 2], work, 10**9, 1e9, quiet)
    assert {one.prompt_len for one in work.answers} == {2}  # the other has no room for an answer
