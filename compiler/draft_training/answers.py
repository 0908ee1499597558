"""The target's own answers, many at once by a compiled engine: what a head must guess is what its target says."""

import random
import time
from collections.abc import Sequence
from typing import NamedTuple

from octavo.compiler.draft_training.prompts import is_held_out
from octavo.compiler.draft_training.work import Answer, WorkDirectory
from octavo.compiler.progress import Report
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

MAX_ANSWER_TOKENS = 256

# An answer that was cut off by the end of time is used if it has this many tokens.
_MIN_TOKENS = 2

# Of the first answer to each prompt, and of further ones: requests are made with both.
TEMPERATURES = (0.0, 0.8, 0.5, 1.0)


class Job(NamedTuple):
    """An answer to be made. number: its place in the order, and the seed that it is drawn with."""

    number: int
    prompt: int
    temperature: float


def jobs(num_prompts: int) -> list[Job]:
    """Rounds over all prompts in random order, greedy first. Held-out prompts are answered once, before all others, so
    that even little time brings some of both."""
    found: list[tuple[int, float]] = []
    for number, temperature in enumerate((*TEMPERATURES, *TEMPERATURES[1:] * 6)):
        asked = [prompt for prompt in range(num_prompts) if number == 0 or not is_held_out(prompt)]
        random.Random(number).shuffle(asked)
        asked.sort(key=lambda prompt: not is_held_out(prompt))
        found += [(prompt, temperature) for prompt in asked]
    return [Job(number, *job) for number, job in enumerate(found)]


def generate_answers(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    work: WorkDirectory,
    num_tokens: int,
    seconds: float,
    report: Report,
) -> None:
    """Answers until they have `num_tokens` tokens, or for so many seconds. An interrupt keeps what there is."""
    maker = _Maker(engine, prompts, work)
    began = time.perf_counter()
    try:
        while maker.num_tokens < num_tokens and time.perf_counter() - began < seconds and maker.step():
            report("answers", min(maker.num_tokens, num_tokens), num_tokens)
    finally:
        maker.close()
        work.spend("answers", time.perf_counter() - began)


class _Maker:
    """Keeps an engine full."""

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], work: WorkDirectory) -> None:
        self._engine, self._prompts, self._work = engine, prompts, work
        done = {answer.job for answer in work.answers}
        self._waiting = [job for job in jobs(len(prompts)) if job.number not in done][::-1]
        self._running: dict[int, tuple[Job, list[int]]] = {}
        self.num_tokens = sum(len(one.token_ids) - one.prompt_len for one in work.answers)

    def step(self) -> bool:
        """False: all jobs are done."""
        while self._waiting and len(self._running) < self._engine.scheduler.max_requests:
            job = self._waiting.pop()
            prompt = self._prompts[job.prompt]
            room = self._engine.model.max_model_len - len(prompt)
            if room < 1:
                continue
            params = SamplingParams(
                max_tokens=min(MAX_ANSWER_TOKENS, room), temperature=job.temperature, seed=job.number
            )
            self._running[self._engine.add_request(prompt, params)] = (job, [])
        for token in self._engine.step():
            answer = self._running[token.request_id][1]
            if token.token_id is not None:
                answer.append(token.token_id)
                self.num_tokens += 1
            if token.finish_reason is not None:
                self._keep(token.request_id)
        return bool(self._running or self._waiting)

    def _keep(self, request_id: int) -> None:
        job, answer = self._running.pop(request_id)
        if answer:
            prompt = list(self._prompts[job.prompt])
            self._work.add_answer(Answer(job.number, len(prompt), prompt + answer))

    def close(self) -> None:
        for request_id, (_, answer) in list(self._running.items()):
            self._engine.abort(request_id)
            if len(answer) >= _MIN_TOKENS:
                self._keep(request_id)
