"""Continuous batching: which tokens of which requests run in the next step, and what their result changes.

State changes only in `commit`; `schedule` hands out pages at most. So a step that was interrupted is simply
run again.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.compiler.errors import OutOfPages, RequestError
from octavo.runtime.kv_cache import PagePool
from octavo.runtime.request import FinishReason, Request, Status


@dataclass(frozen=True)
class Chunk:
    """Tokens `start : start + length` of a request, to be computed in this step."""

    request: Request
    start: int
    length: int

    @property
    def is_sampled(self) -> bool:
        """Whether the chunk ends with the request's newest token, so that its logits give the next."""
        return self.start + self.length == len(self.request.tokens)


class Scheduler:
    """First come, first served, within a budget of tokens a step; decodes go before any long prompt.

    A request gets the pages of all its tokens when admitted and one more page whenever it outgrows them. When
    none is free the youngest request gives up its pages, waits at the head of the queue, and is computed
    again later; the oldest always proceeds, so every admitted request ends.

    max_model_len     longest sequence
    max_batch_tokens  most tokens of a step
    max_requests      most requests that run at once, at most max_batch_tokens
    chunked_prefill   a prompt may be computed in pieces over several steps; otherwise only what a preempted
                      request has to compute again may be, and a prompt longer than max_batch_tokens is
                      refused
    """

    def __init__(
        self,
        pool: PagePool,
        page_size: int,
        max_model_len: int,
        max_batch_tokens: int,
        max_requests: int,
        chunked_prefill: bool = True,
    ) -> None:
        assert 1 <= max_requests <= max_batch_tokens, f"{max_requests} requests, {max_batch_tokens} tokens"
        self.pool = pool
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.max_batch_tokens = max_batch_tokens
        self.max_requests = max_requests
        self.chunked_prefill = chunked_prefill
        self.num_preemptions = 0
        self.requests: dict[int, Request] = {}  # every unfinished request, oldest first
        self.running: list[Request] = []  # oldest first
        self.waiting: deque[Request] = deque()  # oldest first, all younger than the running ones

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that the pool could hold alone; its newest token needs no page yet."""
        return self.pool.capacity * self.page_size + 1

    def max_len(self, prompt_len: int, max_tokens: int | None) -> int:
        """The length in tokens at which such a request ends; raises RequestError if it could never get there.

        An open answer (max_tokens None) ends where the model or the pool does, whichever is shorter.
        """
        if not self.chunked_prefill and prompt_len > self.max_batch_tokens:
            raise RequestError(
                f"prompt: expected at most {self.max_batch_tokens} tokens (one step) without chunked "
                f"prefill, got {prompt_len}; allow chunked prefill or shorten it"
            )
        wanted = prompt_len + (1 if max_tokens is None else max_tokens)
        asked = f"a prompt of {prompt_len}" + ("" if max_tokens is None else f" and max_tokens {max_tokens}")
        if wanted > self.max_model_len:
            raise RequestError(
                f"prompt: expected prompt and answer within the model's {self.max_model_len} tokens, "
                f"got {asked}; shorten the prompt or lower max_tokens"
            )
        if wanted > self.capacity_tokens:
            raise RequestError(
                f"prompt: expected prompt and answer within the pool's {self.capacity_tokens} tokens "
                f"({self.pool.capacity} pages of {self.page_size}), got {asked}; "
                "raise num_pages, shorten the prompt or lower max_tokens"
            )
        return wanted if max_tokens is not None else min(self.max_model_len, self.capacity_tokens)

    def add(self, request: Request) -> None:
        """Queue a request whose max_len this scheduler gave."""
        assert request.request_id not in self.requests, f"request {request.request_id} was added twice"
        assert request.prompt_len < request.max_len <= self.capacity_tokens, f"max_len {request.max_len}"
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, at most one a request; empty only when nothing is queued."""
        chunks: list[Chunk] = []
        budget = self.max_batch_tokens
        for request in [r for r in self.running if r.is_decoding]:
            if request.status is Status.RUNNING and self._grow(request):
                chunks.append(Chunk(request, request.num_computed, 1))
                budget -= 1
        for request in [r for r in self.running if not r.is_decoding]:
            budget -= self._add_prefill(request, budget, chunks)
        while self.waiting and budget > 0 and self._admit(budget):
            budget -= self._add_prefill(self.running[-1], budget, chunks)
        assert chunks or not self.requests, "requests are queued but the step is empty"
        return chunks

    def _grow(self, request: Request) -> bool:
        """Give a decoding request room for its newest token; False if it had to give up its own pages."""
        while len(request.pages) * self.page_size < len(request.tokens):
            try:
                request.pages.extend(self.pool.allocate(1))
            except OutOfPages:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is request:
                    return False
        return True

    def _preempt(self, request: Request) -> None:
        assert request is self.running[-1], "only the youngest request gives way"
        self.running.pop()
        self.waiting.appendleft(request)
        request.status = Status.WAITING
        self._release(request)
        self.num_preemptions += 1

    def _admit(self, budget: int) -> bool:
        request = self.waiting[0]
        if len(self.running) >= self.max_requests or self._chunk_len(request, budget) == 0:
            return False
        try:
            request.pages.extend(self.pool.allocate(-(-len(request.tokens) // self.page_size)))
        except OutOfPages:
            return False
        self.waiting.popleft()
        self.running.append(request)
        request.status = Status.RUNNING
        return True

    def _chunk_len(self, request: Request, budget: int) -> int:
        """How many of its tokens fit this step; 0 if it has to wait for a step with more room."""
        length = min(request.num_uncomputed, budget)
        must_be_whole = not self.chunked_prefill and request.num_uncomputed <= self.max_batch_tokens
        return 0 if must_be_whole and length < request.num_uncomputed else length

    def _add_prefill(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        length = self._chunk_len(request, budget)
        if length > 0:
            chunks.append(Chunk(request, request.num_computed, length))
        return length

    def commit(self, chunks: Sequence[Chunk], sampled: Sequence[int]) -> None:
        """Record a step: one sampled token for each chunk that `is_sampled`, in their order.

        Ends a request at a stop token ("stop") or at its max_len ("length"); others may call `finish`.
        """
        tokens = iter(sampled)
        for chunk in chunks:
            request = chunk.request
            is_sampled = chunk.is_sampled
            if is_sampled:
                # The token first: `recover` can tell what is computed, but not what was sampled.
                request.tokens.append(next(tokens))
            request.num_computed = chunk.start + chunk.length
            if reason := _end_reason(request):
                self.finish(request, reason)
        assert next(tokens, None) is None, "more tokens were sampled than chunks asked for"

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End an unfinished request in whatever state it is and take back its pages."""
        if request.status is Status.RUNNING:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        request.finish_reason = reason
        request.status = Status.FINISHED
        self._release(request)
        self.requests.pop(request.request_id, None)

    def _release(self, request: Request) -> None:
        pages, request.pages = request.pages, []
        request.num_computed = 0
        self.pool.free(pages)

    def recover(self) -> None:
        """Make the bookkeeping whole after an interrupt at any point: what requests hold is what counts."""
        for request in self.requests.values():
            request.finish_reason = request.finish_reason or _end_reason(request)
            if request.finish_reason:
                request.status, request.pages = Status.FINISHED, []
        unfinished = [r for r in self.requests.values() if r.status is not Status.FINISHED]
        self.requests = {r.request_id: r for r in unfinished}
        self.running = [r for r in unfinished if r.pages]
        self.waiting = deque(r for r in unfinished if not r.pages)
        for request in unfinished:
            request.status = Status.RUNNING if request.pages else Status.WAITING
            if not request.pages:
                request.num_computed = 0
            elif len(request.pages) * self.page_size < len(request.tokens):
                # A token without a page is one that a commit appended: all before it were computed.
                request.num_computed = len(request.tokens) - 1
        self.pool.rebuild([r.pages for r in unfinished])

    def check(self) -> None:
        """Assert that no page is lost, held twice by mistake or held by a request that does not run."""
        assert not any(r.pages for r in self.waiting), "a waiting request holds pages"
        assert [*self.running, *self.waiting] == list(self.requests.values()), (
            "requests are lost or out of order"
        )
        self.pool.check([r.pages for r in self.requests.values()])


def _end_reason(request: Request) -> FinishReason | None:
    """Why a request ends with the newest token it generated, if it does."""
    if len(request.tokens) == request.prompt_len:
        return None
    if request.tokens[-1] in request.stop_token_ids:
        return "stop"
    return "length" if len(request.tokens) >= request.max_len else None
