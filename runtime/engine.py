"""Ties it together: schedule -> Batch -> run -> sample -> commit, and requests in, tokens and text out.

An engine belongs to one thread at a time.
"""

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.compiler.artifact import Artifact, ModelInfo
from octavo.compiler.errors import ExecutionError, OptionError, RequestError
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.open_runner import open_runner
from octavo.runtime.output import Output, completion_of
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.prefix_cache import SHARED_KEY, CacheKey
from octavo.runtime.recovery import recover
from octavo.runtime.request import Branch, Completion, Request, Status, Token, check_prompt
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Scheduler
from octavo.runtime.speculative.open_speculator import open_speculator
from octavo.runtime.speculative.options import Speculate
from octavo.runtime.speculative.speculator import Speculator
from octavo.runtime.stats import EngineStats, Snapshot, take_snapshot
from octavo.runtime.stepper import Stepper
from octavo.runtime.structured import GrammarMatcher, Grammars
from octavo.runtime.token_state import new_token_state
from octavo.runtime.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
DEFAULT_MAX_REQUESTS = 64


class Engine:
    """Serves many requests at once over one runner.

    runner            computes logits and owns the pages
    model             vocabulary, lengths, end tokens
    tokenizer         for prompts and stop strings given as text, and for text in answers; None: token ids
                      only
    max_requests      most requests that run at once
    max_batch_tokens  most tokens of a step, at most the model's
    chunked_prefill   spread long prompts over several steps, so that running requests go on
    prefix_caching    share pages with earlier requests whose prompts began alike
    seed              of requests without their own; None: a fresh one
    speculator        drafts tokens and verifies them, several in a step; None: a token a step
    """

    def __init__(
        self,
        runner: ModelRunner,
        model: ModelInfo,
        tokenizer: Tokenizer | None = None,
        *,
        max_requests: int = DEFAULT_MAX_REQUESTS,
        max_batch_tokens: int | None = None,
        chunked_prefill: bool = True,
        prefix_caching: bool = True,
        seed: int | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        budget = model.max_batch_tokens if max_batch_tokens is None else max_batch_tokens
        if not 1 <= budget <= model.max_batch_tokens:
            raise OptionError(
                f"max_batch_tokens: expected 1 to {model.max_batch_tokens} (compiled in), got {budget}; "
                "compile with a larger max_batch_tokens for more"
            )
        if max_requests < 1:
            raise OptionError(f"max_requests: expected 1 or more, got {max_requests}")
        self.runner = runner
        self.model = model
        self.tokenizer = tokenizer
        self.seed = secrets.randbits(64) if seed is None else seed % 2**64
        self.stats = EngineStats()
        self.memory = PagedMemory(
            runner.num_pages,
            runner.page_size,
            runner.page_windows,
            num_host_pages=runner.num_host_pages,
            use_prefix_cache=prefix_caching,
        )
        self.scheduler = Scheduler(
            self.memory,
            max_model_len=model.max_model_len,
            max_batch_tokens=budget,
            max_requests=min(max_requests, budget),
            chunked_prefill=chunked_prefill,
        )
        self.speculator = speculator
        if speculator is not None:
            speculator.proposer.use_pages(self.memory)
        self._stepper = Stepper(runner, self.scheduler, self.seed, speculator)
        self._grammars: Grammars | None = None  # made for the first request that wants one
        self._outputs: dict[int, Output] = {}
        self._next_id = 0

    @classmethod
    def from_artifact(
        cls,
        artifact: Artifact | Path | str,
        *,
        num_pages: int | None = None,
        num_host_pages: int = 0,
        num_threads: int | None = None,
        use_tokenizer: bool = True,
        max_requests: int = DEFAULT_MAX_REQUESTS,
        max_batch_tokens: int | None = None,
        chunked_prefill: bool = True,
        prefix_caching: bool = True,
        seed: int | None = None,
        graphs: bool = True,
        speculate: Speculate | None = None,
    ) -> "Engine":
        """An engine for an artifact, on this machine's processor or on its GPU as the artifact wants.

        num_pages    None: 8 sequences of full length on a processor, what free memory holds on a GPU
        num_host_pages  in this machine's memory, for preempted requests and cached pages that the pool needs
        speculate    draft tokens and verify several in a step; None: a token a step
        num_threads  of a processor; graphs: steps of one token a request as CUDA graphs
        """
        opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
        runner = open_runner(
            opened,
            num_pages,
            num_threads,
            max_requests=max_requests,
            max_batch_tokens=max_batch_tokens,
            graphs=graphs,
            num_host_pages=num_host_pages,
        )
        return cls(
            runner,
            opened.model,
            load_tokenizer(opened) if use_tokenizer else None,
            max_requests=max_requests,
            max_batch_tokens=max_batch_tokens,
            chunked_prefill=chunked_prefill,
            prefix_caching=prefix_caching,
            seed=seed,
            speculator=None if speculate is None else open_speculator(speculate, opened, runner, num_threads),
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.requests)

    def snapshot(self) -> Snapshot:
        """Live figures: pages by state, waste, requests, hits, preemptions, tokens a second."""
        return take_snapshot(self.scheduler, self.stats, self.runner.page_bytes)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> int:
        """Queue a request and return its id; `step` brings its tokens. RequestError if it can never run.

        priority    lower goes first
        cache_salt  share cached pages only with requests of the same salt
        """
        request = self._make_request(prompt, params or SamplingParams(), CacheKey(cache_salt))
        request.priority = priority
        self._start(request, 0, None)
        return request.request_id

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer every prompt, in their order. Raises ExecutionError if the model fails on one of them."""
        requests = self._make_requests(prompts, params)
        tokens: list[list[Token]] = [[] for _ in requests]
        for token in self._run(requests):
            tokens[token.index].append(token)
        has_text = self.tokenizer is not None
        return [completion_of(request, own, has_text) for request, own in zip(requests, tokens, strict=True)]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Token]:
        """Tokens as they come, `Token.index` telling whose; closing the iterator ends its requests.

        Bad prompts raise at once, not at the first token. Answers that are ranked come when all have ended, the
        best first. Raises ExecutionError if the model fails on one.
        """
        return self._run(self._make_requests(prompts, params))

    def _run(self, requests: list[Request]) -> Iterator[Token]:
        mailbox: deque[Token] = deque()
        try:
            for index, request in enumerate(requests):
                self._start(request, index, mailbox)
            while mailbox or any(request.request_id in self._outputs for request in requests):
                while not mailbox and any(request.request_id in self._outputs for request in requests):
                    self.step()
                while mailbox:
                    token = mailbox.popleft()
                    if token.error:
                        raise ExecutionError(f"prompt {token.index}: {token.error}")
                    yield token
        finally:
            for request in requests:
                self.abort(request.request_id)

    def abort(self, request_id: int) -> bool:
        """End a request and take back its pages; False if it was not there (any more)."""
        output = self._outputs.pop(request_id, None)
        if output is None:
            return False
        if output.request.status is not Status.FINISHED:
            self.scheduler.finish(output.request, "abort")
        output.show_abort()
        return True

    def step(self) -> list[Token]:
        """Run one step and return the tokens it brought, of every request; [] when there is nothing to do."""
        began = time.perf_counter()
        tokens: list[Token] = []
        try:
            chunks = self.scheduler.schedule()
            if chunks:
                self.stats.count_chunks(chunks)
                first = [
                    c.request for c in chunks if len(c.branch.tokens) == c.request.prompt_len and c.is_sampled
                ]
                self.stats.generated_tokens += self._stepper.run(chunks)
                self.stats.prompt_tokens += sum(request.prompt_len for request in first)
                self.stats.num_steps += 1
            for output in list(self._outputs.values()):
                if output.request.status is not Status.WAITING:
                    tokens += self._show(output)
        except BaseException:
            # An interrupt may come anywhere. Make the books whole, so that the other requests can go on.
            recover(self.scheduler)
            for output in list(self._outputs.values()):
                self._show(output)
            raise
        finally:
            self.stats.seconds += time.perf_counter() - began
            self.stats.num_preemptions = self.scheduler.stats.num_preemptions
            if self.speculator is not None:
                figures = self.speculator.figures
                self.stats.drafted_tokens, self.stats.accepted_tokens = figures.drafted, figures.accepted
        if not self.scheduler.requests:
            assert self.memory.pool.num_free == self.memory.pool.capacity, "pages are held at idle"
        return tokens

    def _show(self, output: Output) -> list[Token]:
        """A request's new tokens; ends a branch if its text says so, and forgets a request once it ended."""
        tokens = output.show()
        request = output.request
        self.stats.generated_tokens -= output.num_dropped()
        stopped = output.stopped()
        for branch in stopped:
            self.scheduler.finish_branch(request, branch, "stop")
        if stopped and request.params.is_ranked:
            tokens += output.show()
        if request.status is Status.FINISHED:
            del self._outputs[request.request_id]
        return tokens

    def _start(self, request: Request, index: int, mailbox: deque[Token] | None) -> None:
        self._outputs[request.request_id] = Output(request, index, mailbox, self.tokenizer)
        self.scheduler.add(request)

    def checked(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> tuple[list[Prompt], list[SamplingParams]]:
        """Prompts and parameters, one for each. RequestError if one can never run."""
        many, requests = _as_prompts(prompts), self._make_requests(prompts, params)
        return many, [request.params for request in requests]

    def _make_requests(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[Request]:
        many = _as_prompts(prompts)
        each = [params or SamplingParams()] * len(many) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(many):
            raise RequestError(
                f"params: expected one for all or one for each of {len(many)} prompts, got {len(each)}"
            )
        requests = []
        for index, (prompt, own) in enumerate(zip(many, each, strict=True)):
            try:
                requests.append(self._make_request(prompt, own))
            except RequestError as error:
                raise RequestError(f"request {index}: {error}" if len(many) > 1 else str(error)) from None
        return requests

    def _make_request(self, prompt: Prompt, params: SamplingParams, key: CacheKey = SHARED_KEY) -> Request:
        if self.tokenizer is None and (isinstance(prompt, str) or params.stop):
            raise RequestError(
                "prompt: expected token ids and no stop strings, as this engine has no tokenizer, got text; "
                "compile with the model's tokenizer or encode the text yourself"
            )
        encoded = self.tokenizer.encode(prompt) if self.tokenizer and isinstance(prompt, str) else prompt
        assert not isinstance(encoded, str)
        tokens = check_prompt(encoded, self.model.vocab_size)
        params.check_ids(self.model.vocab_size)
        end_ids = () if params.ignore_eos else self.model.eos_token_ids
        if params.stop and params.beam_width is not None:
            raise RequestError("stop: expected no stop strings with beam_width; use stop_token_ids")
        max_len = self.scheduler.max_len(len(tokens), params)
        stop_ids = frozenset({*end_ids, *params.stop_token_ids})
        state = new_token_state(params, len(tokens), stop_ids, self._matcher(params))
        branch = Branch(0, tokens, self.memory.new_table(key), state)
        request = Request(self._next_id, len(tokens), params, max_len, [branch], stop_ids, key)
        self._next_id += 1
        return request

    def _matcher(self, params: SamplingParams) -> GrammarMatcher | None:
        if params.structured is None:
            return None
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.model)
        return self._grammars.matcher(params.structured)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or as token ids, or several."""
    if isinstance(prompts, str):
        return [prompts]
    is_several = all(isinstance(prompt, str | Sequence) or hasattr(prompt, "__len__") for prompt in prompts)
    return list(prompts) if is_several else [prompts]  # type: ignore[arg-type, list-item]
