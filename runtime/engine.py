"""Ties it together: schedule -> Batch -> run -> sample -> commit, and requests in, tokens and text out.

An engine belongs to one thread at a time.
"""

import secrets
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.compiler.artifact import Artifact, ModelInfo
from octavo.compiler.errors import ExecutionError, OptionError, RequestError
from octavo.runtime.batch import build_batch
from octavo.runtime.kv_cache import PagePool
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.open_runner import open_runner
from octavo.runtime.output import Output
from octavo.runtime.request import Completion, Request, Status, Token, check_prompt
from octavo.runtime.sampler import RandomKey, Row, Sampled, sample
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.scheduler import Chunk, Scheduler
from octavo.runtime.tokenizer import Tokenizer, load_tokenizer

Prompt = str | Sequence[int]
DEFAULT_MAX_REQUESTS = 64


@dataclass
class EngineStats:
    """Counts since the engine was made. seconds is the time spent in steps.

    prompt_tokens    of requests whose first token was generated
    computed_tokens  all that went through the model, with what preemption made it compute again
    """

    num_steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    num_preemptions: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens a second, prefill time included."""
        return self.generated_tokens / self.seconds if self.seconds else 0.0


class Engine:
    """Serves many requests at once over one runner.

    runner            computes logits and owns the pages
    model             vocabulary, lengths, end tokens
    tokenizer         for prompts and stop strings given as text, and for text in answers; None: token ids
                      only
    max_requests      most requests that run at once
    max_batch_tokens  most tokens of a step, at most the model's
    chunked_prefill   spread long prompts over several steps, so that running requests go on
    seed              of requests without their own; None: a fresh one
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
        seed: int | None = None,
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
        self.pool = PagePool(runner.num_pages)
        self.scheduler = Scheduler(
            self.pool,
            page_size=runner.page_size,
            max_model_len=model.max_model_len,
            max_batch_tokens=budget,
            max_requests=min(max_requests, budget),
            chunked_prefill=chunked_prefill,
        )
        self._outputs: dict[int, Output] = {}
        self._next_id = 0

    @classmethod
    def from_artifact(
        cls,
        artifact: Artifact | Path | str,
        *,
        num_pages: int | None = None,
        num_threads: int | None = None,
        use_tokenizer: bool = True,
        max_requests: int = DEFAULT_MAX_REQUESTS,
        max_batch_tokens: int | None = None,
        chunked_prefill: bool = True,
        seed: int | None = None,
        graphs: bool = True,
    ) -> "Engine":
        """An engine for an artifact, on this machine's processor or on its GPU as the artifact wants.

        num_pages    None: 8 sequences of full length on a processor, what free memory holds on a GPU
        num_threads  of a processor; graphs: steps of one token a request as CUDA graphs
        """
        opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
        return cls(
            open_runner(
                opened,
                num_pages,
                num_threads,
                max_requests=max_requests,
                max_batch_tokens=max_batch_tokens,
                graphs=graphs,
            ),
            opened.model,
            load_tokenizer(opened) if use_tokenizer else None,
            max_requests=max_requests,
            max_batch_tokens=max_batch_tokens,
            chunked_prefill=chunked_prefill,
            seed=seed,
        )

    @property
    def has_unfinished(self) -> bool:
        return bool(self.scheduler.requests)

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None) -> int:
        """Queue a request and return its id; `step` brings its tokens. RequestError if it can never run."""
        request = self._make_request(prompt, params or SamplingParams())
        self._start(request, 0, None)
        return request.request_id

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Answer every prompt, in their order. Raises ExecutionError if the model fails on one of them."""
        requests = self._make_requests(prompts, params)
        ends: dict[int, Token] = {}
        tokens: list[list[int]] = [[] for _ in requests]
        texts: list[list[str]] = [[] for _ in requests]
        for token in self._run(requests):
            texts[token.index].append(token.text)
            if token.token_id is not None:
                tokens[token.index].append(token.token_id)
            if token.finish_reason:
                ends[token.index] = token
        return [
            Completion(
                request_id=request.request_id,
                prompt_token_ids=tuple(request.tokens[: request.prompt_len]),
                token_ids=tuple(tokens[index]),
                text="".join(texts[index]) if self.tokenizer else None,
                finish_reason=ends[index].finish_reason or "abort",
            )
            for index, request in enumerate(requests)
        ]

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[Token]:
        """Tokens as they come, `Token.index` telling whose; closing the iterator ends its requests.

        Bad prompts raise at once, not at the first token. Raises ExecutionError if the model fails on one.
        """
        return self._run(self._make_requests(prompts, params))

    def _run(self, requests: list[Request]) -> Iterator[Token]:
        mailbox: deque[Token] = deque()
        pending = len(requests)
        try:
            for index, request in enumerate(requests):
                self._start(request, index, mailbox)
            while pending:
                while not mailbox:
                    self.step()
                    assert mailbox or self.has_unfinished, "a request ended without telling its reader"
                token = mailbox.popleft()
                if token.error:
                    raise ExecutionError(f"prompt {token.index}: {token.error}")
                pending -= token.finish_reason is not None
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
        try:
            chunks = self.scheduler.schedule()
            if not chunks:
                return []
            tokens = self._run_chunks(chunks)
        except BaseException:
            # An interrupt may come anywhere. Make the books whole, so that the other requests can go on.
            self.scheduler.recover()
            for output in list(self._outputs.values()):
                self._show(output)
            raise
        finally:
            self.stats.seconds += time.perf_counter() - began
            self.stats.num_preemptions = self.scheduler.num_preemptions
        self.stats.num_steps += 1
        if not self.scheduler.requests:
            assert self.pool.num_free == self.pool.capacity, "pages are held at idle"
        return tokens

    def _run_chunks(self, chunks: list[Chunk]) -> list[Token]:
        batch = build_batch(chunks, self.runner.page_size)
        logits = self.runner.run(batch)
        requests = batch.requests
        rows = [Row(request.params, self._key(request), len(request.tokens)) for request in requests]
        results = sample(logits, rows)
        failed = {
            r.request_id: e for r, e in zip(requests, results, strict=True) if isinstance(e, ExecutionError)
        }
        for request in requests:
            if request.request_id in failed:
                request.error = str(failed[request.request_id])
                self.scheduler.finish(request, "error")
        kept = [chunk for chunk in chunks if chunk.request.request_id not in failed]
        self.stats.computed_tokens += len(batch.input_ids)
        self.stats.prompt_tokens += sum(r.prompt_len for r in requests if len(r.tokens) == r.prompt_len)
        self.scheduler.commit(kept, [chosen.token_id for chosen in results if isinstance(chosen, Sampled)])
        self.stats.generated_tokens += len(requests) - len(failed)
        return [token for request in requests for token in self._show(self._outputs[request.request_id])]

    def _key(self, request: Request) -> RandomKey:
        if request.params.seed is not None:
            return RandomKey(request.params.seed, 0)
        return RandomKey(self.seed, request.request_id + 1)

    def _show(self, output: Output) -> list[Token]:
        """A request's new tokens; ends the request if its text says so, and forgets it once it ended."""
        tokens = output.show()
        request = output.request
        if tokens and tokens[-1].finish_reason and request.status is not Status.FINISHED:
            self.scheduler.finish(request, tokens[-1].finish_reason)
        if request.status is Status.FINISHED:
            del self._outputs[request.request_id]
        return tokens

    def _start(self, request: Request, index: int, mailbox: deque[Token] | None) -> None:
        self._outputs[request.request_id] = Output(request, index, mailbox, self.tokenizer)
        self.scheduler.add(request)

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

    def _make_request(self, prompt: Prompt, params: SamplingParams) -> Request:
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
        max_len = self.scheduler.max_len(len(tokens), params.max_tokens)
        request = Request(
            self._next_id, len(tokens), tokens, params, max_len, frozenset({*end_ids, *params.stop_token_ids})
        )
        self._next_id += 1
        return request


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt, as text or as token ids, or several."""
    if isinstance(prompts, str):
        return [prompts]
    is_several = all(isinstance(prompt, str | Sequence) or hasattr(prompt, "__len__") for prompt in prompts)
    return list(prompts) if is_several else [prompts]  # type: ignore[arg-type, list-item]
