"""One step: moves of pages -> drafts -> Batch -> run -> choose or verify tokens -> commit."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.runtime.batch import build_batch, num_logit_rows
from octavo.runtime.beam import advance
from octavo.runtime.chunk import Chunk
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.page_moves import Move
from octavo.runtime.request import Branch, Request
from octavo.runtime.sampler import RandomKey, Row, Sampled, prompt_logprobs, sample
from octavo.runtime.scheduler import Scheduler
from octavo.runtime.speculative.speculator import Speculator

# Answers of a request draw from streams of their own: bits above those of a request's id.
_BRANCH_BITS = 48


class _Rows(NamedTuple):
    """A chunk with its rows of the step's logits, `first : last + 1`."""

    chunk: Chunk
    first: int
    last: int


class Stepper:
    """Runs what the scheduler planned, and tells it what came out.

    seed        of requests without their own
    speculator  None: a token a step
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, seed: int, speculator: Speculator | None = None
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.seed = seed
        self.speculator = speculator

    def run(self, chunks: Sequence[Chunk]) -> int:
        """Run a step; returns how many tokens were generated. A request whose logits are broken ends with "error"."""
        if self.speculator is None:
            self.scheduler.memory.run_moves(self.runner.move_pages)
            logits = self.runner.run(build_batch(chunks, self.runner.page_size))
        else:
            chunks, logits = self._speculate(chunks, self.speculator)
        rows = _rows_of(chunks)
        for each in rows:
            if each.chunk.request.wants_prompt_report:
                self._report_prompt(each, logits)
        sampled = [each for each in rows if each.chunk.is_sampled]
        searched = [each for each in sampled if each.chunk.request.params.beam_width is not None]
        drawn = [each for each in sampled if each.chunk.request.params.beam_width is None]
        chosen = self._draw([each for each in drawn if not len(each.chunk.draft)], logits)
        chosen |= self._verify([each for each in drawn if len(each.chunk.draft)], logits)
        alive = [chunk for chunk in chunks if chunk.request.error is None]
        results = [chosen.get(id(chunk.branch), []) for chunk in alive if chunk.is_sampled]
        num_taken = self.scheduler.commit(alive, results)
        for request in {each.chunk.request.request_id: each.chunk.request for each in searched}.values():
            self._search(request, [logits[e.last] for e in searched if e.chunk.request is request])
        return num_taken + len(searched)

    def _speculate(
        self, chunks: Sequence[Chunk], speculator: Speculator
    ) -> tuple[Sequence[Chunk], NDArray[np.float32]]:
        """The chunks with drafts, and the logits of the step. Room comes first: a draft model writes pages too."""
        memory = self.scheduler.memory
        asked = speculator.ask(chunks, memory, self.scheduler.max_batch_tokens, self.key)
        memory.run_moves(self._move_pages)
        chunks = speculator.draft(chunks, asked)
        batch = build_batch(chunks, self.runner.page_size)
        began = time.perf_counter()
        logits = self.runner.run(batch)
        seconds = time.perf_counter() - began
        speculator.observe(chunks, batch, self.runner.features, seconds)
        return chunks, logits

    def _move_pages(self, moves: Sequence[Move]) -> None:
        assert self.speculator is not None
        self.runner.move_pages(moves)
        self.speculator.proposer.move_pages(moves)

    def key(self, request: Request, branch: int) -> RandomKey:
        """The stream of a request's answer; the first answer's is that of a request with one."""
        offset = branch << _BRANCH_BITS
        if request.params.seed is not None:
            return RandomKey(request.params.seed, offset)
        return RandomKey(self.seed, request.request_id + 1 + offset)

    def _draw(self, drawn: Sequence[_Rows], logits: NDArray[np.float32]) -> dict[int, list[Sampled]]:
        """For each branch (by id) its token, or one for each answer if it is about to fork."""
        places: list[int] = []
        rows: list[Row] = []
        owners: list[Branch] = []
        for each in drawn:
            request, branch = each.chunk.request, each.chunk.branch
            if branch.state is not None:
                branch.state.sync(branch.tokens)
            forks = len(request.branches) == 1 and len(branch.tokens) == request.prompt_len
            for index in range(request.num_branches) if forks else [branch.index]:
                places.append(each.last)
                rows.append(Row(request.params, self.key(request, index), len(branch.tokens), branch.state))
                owners.append(branch)
        is_all = places == list(range(len(logits)))
        results = sample(logits if is_all else logits[places], rows)
        requests = {id(each.chunk.branch): each.chunk.request for each in drawn}
        chosen: dict[int, list[Sampled]] = {}
        for owner, result in zip(owners, results, strict=True):
            if isinstance(result, ExecutionError):
                self._fail(requests[id(owner)], result)
            else:
                chosen.setdefault(id(owner), []).append(result)
        return chosen

    def _verify(self, drafted: Sequence[_Rows], logits: NDArray[np.float32]) -> dict[int, list[Sampled]]:
        """For each branch (by id) with a draft the tokens that it goes on with."""
        chosen = {}
        for chunk, first, last in drafted:
            assert self.speculator is not None, "a draft that nobody made"
            try:
                key = self.key(chunk.request, chunk.branch.index)
                chosen[id(chunk.branch)] = self.speculator.verify(chunk, logits[first : last + 1], key)
            except ExecutionError as error:
                self._fail(chunk.request, error)
        return chosen

    def _search(self, request: Request, logits: Sequence[NDArray[np.float32]]) -> None:
        """Beams go on, or the search ends."""
        try:
            beams = advance(request, logits, self.key(request, 0), self.scheduler.memory.fork)
        except ExecutionError as error:
            self._fail(request, error)
            return
        if beams:
            self.scheduler.replace(request, beams)
        elif request.finished:
            best = max(request.finished.values(), key=lambda branch: branch.score or 0.0)
            self.scheduler.finish(request, best.finish_reason or "stop")
        else:
            self._fail(request, ExecutionError("beam search: expected a token that may follow, got none"))

    def _report_prompt(self, rows: _Rows, logits: NDArray[np.float32]) -> None:
        """Log-probabilities of the prompt's tokens that follow those of this chunk."""
        chunk = rows.chunk
        request, tokens = chunk.request, chunk.branch.tokens
        known = max(0, len(request.prompt_report) - chunk.start)
        end = min(chunk.start + chunk.length, request.prompt_len - 1)
        following = tokens[chunk.start + known + 1 : end + 1]
        own = logits[rows.first + known : rows.first + known + len(following)]
        results = prompt_logprobs(own, following, request.params.prompt_logprobs or 0)
        if errors := [each for each in results if isinstance(each, ExecutionError)]:
            self._fail(request, errors[0])
        else:
            request.prompt_report += [each for each in results if isinstance(each, Sampled)]

    def _fail(self, request: Request, error: ExecutionError) -> None:
        request.error = str(error)
        self.scheduler.finish(request, "error")


def _rows_of(chunks: Sequence[Chunk]) -> list[_Rows]:
    rows, first = [], 0
    for chunk in chunks:
        count = num_logit_rows(chunk)
        rows.append(_Rows(chunk, first, first + count - 1))
        first += count
    return rows
