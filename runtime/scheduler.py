"""Continuous batching: which tokens of which requests run in the next step, and what their result changes.

State changes only in `commit`; `schedule` hands out pages and queues moves at most. So a step that was
interrupted is simply run again.
"""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.compiler.errors import OutOfPages, RequestError
from octavo.runtime.chunk import Chunk, newest_chunks
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.recompute import share_at_windows, share_computed
from octavo.runtime.request import Branch, FinishReason, Request, Status
from octavo.runtime.sampler import Sampled
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.draft import Draft

# A request that this many later ones were admitted before goes first, whatever its priority.
MAX_OVERTAKEN = 64


@dataclass
class SchedulerStats:
    """Counts since the scheduler was made.

    num_preemptions  of requests; num_swaps of them went to host memory, the others are computed again
    lookup_tokens    that prefixes were looked up for; hit_tokens of them were found
    """

    num_preemptions: int = 0
    num_swaps: int = 0
    lookup_tokens: int = 0
    hit_tokens: int = 0


class Scheduler:
    """By priority, then first come, first served, within a budget of tokens a step; decodes go before prompts.

    A request gets the pages of all its tokens when admitted (in windowed page groups, those of a step) and more
    when it outgrows them. When none is free the last of the running requests gives up its pages, to host memory
    if there is room, waits in its old place, and goes on later. The first always proceeds, so every admitted
    request ends; and no request is overtaken by more than MAX_OVERTAKEN later ones.

    max_model_len     longest sequence
    max_batch_tokens  most tokens of a step
    max_requests      most sequences that run at once, at most max_batch_tokens
    chunked_prefill   a prompt may be computed in pieces over several steps; otherwise only what a preempted
                      request has to compute again may be, and a prompt longer than max_batch_tokens is
                      refused
    """

    def __init__(
        self,
        memory: PagedMemory,
        max_model_len: int,
        max_batch_tokens: int,
        max_requests: int,
        chunked_prefill: bool = True,
    ) -> None:
        assert 1 <= max_requests <= max_batch_tokens, f"{max_requests} requests, {max_batch_tokens} tokens"
        self.memory = memory
        self.max_model_len = max_model_len
        self.max_batch_tokens = max_batch_tokens
        self.max_requests = max_requests
        self.chunked_prefill = chunked_prefill
        self.stats = SchedulerStats()
        self.requests: dict[int, Request] = {}  # every unfinished request, oldest first
        self.running: list[Request] = []  # both by rank
        self.waiting: list[Request] = []

    @property
    def capacity_tokens(self) -> int:
        """Longest sequence that the pool could hold alone; its newest token needs no page yet."""
        return self._longest(0, SamplingParams())

    def _longest(self, prompt_len: int, params: SamplingParams) -> int:
        shares = params.beam_width is not None
        branches = params.num_branches
        return self.memory.most_tokens(prompt_len, branches, self.max_batch_tokens, shares) + 1

    def max_len(self, prompt_len: int, params: SamplingParams) -> int:
        """The length in tokens at which such a request ends; raises RequestError if it could never get there.

        An open answer (max_tokens None) ends where the model or the pool does, whichever is shorter.
        """
        max_tokens = params.max_tokens
        if params.num_branches > self.max_requests:
            name = "beam_width" if params.beam_width else "best_of" if params.best_of else "n"
            raise RequestError(
                f"{name}: expected at most {self.max_requests} sequences (max_requests), got "
                f"{params.num_branches}; ask for fewer or raise max_requests"
            )
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
        longest = self._longest(prompt_len, params)
        if wanted > longest:
            pool, answers = self.memory.pool, params.num_branches
            raise RequestError(
                f"prompt: expected prompt and answer within the pool's {longest} tokens "
                f"({pool.capacity} pages of {self.memory.page_size}), got {asked}"
                + (f" in {answers} sequences; " if answers > 1 else "; ")
                + "raise num_pages, shorten the prompt or lower max_tokens"
            )
        return wanted if max_tokens is not None else min(self.max_model_len, longest)

    def add(self, request: Request) -> None:
        """Queue a request whose max_len this scheduler gave."""
        assert request.request_id not in self.requests, f"request {request.request_id} was added twice"
        assert request.prompt_len < request.max_len, f"max_len {request.max_len}"
        self.requests[request.request_id] = request
        insort(self.waiting, request, key=rank)

    def schedule(self) -> list[Chunk]:
        """The next step's chunks, at most one a branch; empty only when nothing is queued, or when the one request
        left had to end."""
        num_preemptions = self.stats.num_preemptions
        decoding: list[Request] = []
        prompts: list[Request] = []
        for request in self.running:
            (decoding if request.is_decoding else prompts).append(request)
        for request in decoding:
            if not request.has_room and request.status is Status.RUNNING:
                self._planned(request, self.max_batch_tokens)
        chunks = newest_chunks(decoding)
        budget = self.max_batch_tokens - len(chunks)
        for request in prompts:
            if request.status is Status.RUNNING:
                own = self._planned(request, budget)
                budget -= sum(chunk.length for chunk in own)
                chunks += own
        has_room = self.stats.num_preemptions == num_preemptions
        if not has_room:  # a decoding request may have given way to an earlier one that was planned after it
            chunks = [chunk for chunk in chunks if chunk.request.status is Status.RUNNING]
        while self.waiting and budget > 0 and (has_room or not self.running):
            own = self._admit(self.waiting[0], budget)
            if not own:
                break
            budget -= sum(chunk.length for chunk in own)
            chunks += own
        assert chunks or not self.requests, "requests are queued but the step is empty"
        return chunks

    def _planned(self, request: Request, budget: int) -> list[Chunk]:
        """A running request's chunks, with room for them; [] if it had to give way or waits for budget."""
        while True:
            try:
                return self._plan(request, budget)
            except OutOfPages as error:
                victim = self.running[-1]
                if len(self.running) == 1:
                    request.error = f"{error}; the request is alone in the pool: raise num_pages"
                    self.finish(request, "error")
                    return []
                self._preempt(victim)
                if victim is request:
                    return []

    def _plan(self, request: Request, budget: int) -> list[Chunk]:
        live = request.live
        if request.is_decoding:
            return self._plan_newest(request, budget)
        # Several branches go on together, so each stops before its newest token.
        left_out = 1 if len(live) > 1 else 0
        for branch in live:
            target = len(branch.tokens) - left_out
            if branch.table.num_tokens < target:
                if branch.table.num_tokens == 0 and branch.table.is_empty:
                    if self._chunk_len(target, budget) == 0:
                        return []
                    self._begin(request, branch, share_at_windows(self.memory, live, branch, target))
                    if branch.table.num_tokens == target:
                        continue  # all that it needs is its sibling's too
                stop = share_at_windows(self.memory, live, branch, target)
                length = self._chunk_len(stop - branch.table.num_tokens, budget)
                if length == 0:
                    return []
                start = branch.table.num_tokens
                self.memory.reserve(branch.table, start + length)
                return [Chunk(request, branch, start, length)]
        assert request.is_decoding, "a request that does not decode has nothing to compute"
        return self._plan_newest(request, budget)

    def _plan_newest(self, request: Request, budget: int) -> list[Chunk]:
        """The newest token of each branch, all or none."""
        live = request.live
        if len(live) > budget:
            return []
        for branch in live:
            self.memory.reserve(branch.table, len(branch.tokens))
        return newest_chunks([request])

    def _begin(self, request: Request, branch: Branch, stop: int) -> None:
        """Give a branch its pages: those of the sibling it has most in common with, or what the prefix cache has of
        it up to `stop`."""
        if share_computed(self.memory, request.live, branch):
            return
        most = 0 if request.wants_prompt_report else stop
        self.stats.hit_tokens += self.memory.admit(branch.table, branch.tokens, request.key, most)
        self.stats.lookup_tokens += len(branch.tokens)

    def _chunk_len(self, num_uncomputed: int, budget: int) -> int:
        """How many of its tokens fit this step; 0 if it has to wait for a step with more room."""
        length = min(num_uncomputed, budget)
        must_be_whole = not self.chunked_prefill and num_uncomputed <= self.max_batch_tokens
        return 0 if must_be_whole and length < num_uncomputed else length

    def _preempt(self, request: Request) -> None:
        assert request is self.running[-1], "only the last request gives way"
        tables = [branch.table for branch in request.live]
        self.running.pop()
        insort(self.waiting, request, key=rank)
        request.status = Status.WAITING
        self.stats.num_preemptions += 1
        try:
            self.memory.swap_out(tables)
            self.stats.num_swaps += 1
        except OutOfPages:
            self.release(request)

    def _admit(self, request: Request, budget: int) -> list[Chunk]:
        """Let the first waiting request run, if there is room: its chunks; [] if it has to wait."""
        num_running = sum(r.num_branches for r in self.running)
        if num_running + request.num_branches > self.max_requests:
            return []
        was_swapped = request.is_swapped
        try:
            if was_swapped:
                self._swap_in(request)
            chunks = self._plan(request, budget)
        except OutOfPages:
            chunks = []
        if not chunks:
            self._put_back(request)
            return self._admit(request, budget) if was_swapped and not request.is_swapped else []
        self.waiting.remove(request)
        insort(self.running, request, key=rank)
        request.status = Status.RUNNING
        for other in self.waiting:
            other.num_overtaken += other.request_id < request.request_id
        self.waiting.sort(key=rank)
        return chunks

    def _swap_in(self, request: Request) -> None:
        """Bring a request back to the pool; OutOfPages unless a token more of each branch has room too."""
        tables = [branch.table for branch in request.live]
        needed = self.memory.num_held(tables) + len(tables) * len(self.memory.windows)
        if self.running and self.memory.pool.num_free < needed:
            raise OutOfPages(f"page pool: expected {needed} free pages, got {self.memory.pool.num_free}")
        self.memory.swap_in(tables)

    def _put_back(self, request: Request) -> None:
        """Undo what admitting a request has begun. With nobody else in the pool, what was swapped is let go."""
        tables = [branch.table for branch in request.live]
        if self.running and request.is_swapped:
            return
        if self.running and request.is_decoding:
            try:
                return self.memory.swap_out(tables)
            except OutOfPages:
                pass
        self.release(request)

    def commit(self, chunks: Sequence[Chunk], sampled: Sequence[Sequence[Sampled]]) -> int:
        """Record a step; returns how many tokens branches went on with.

        sampled  for each chunk that `is_sampled`, in their order, the token that its branch goes on with; several
                 behind a draft, all of which it goes on with; several otherwise, and the request forks; none, and the
                 caller calls `replace` next
        Ends a branch at a stop token ("stop") or at its max_len ("length"), where the rest of several tokens is
        dropped; others may call `finish`.
        """
        results = iter(sampled)
        num_taken = 0
        for request, branch, start, length, draft in chunks:
            tokens = next(results) if start + length == len(branch.tokens) else ()
            if len(draft):
                num_taken += self._take_run(request, branch, draft, tokens, start + length)
                continue
            num_taken += len(tokens)
            if len(tokens) == 1:
                # The token first: `recovery` can tell what is computed, but not what was sampled.
                branch.take(tokens[0], request.prompt_len)
            self.memory.commit(branch.table, branch.tokens, start + length)
            if len(tokens) > 1:
                self._fork(request, branch, tokens)
            if tokens:
                for each in request.branches if len(tokens) > 1 else (branch,):
                    if reason := end_reason(request, each):
                        self.finish_branch(request, each, reason)
        assert next(results, None) is None, "more tokens were sampled than chunks asked for"
        return num_taken

    def _take_run(
        self, request: Request, branch: Branch, draft: Draft, tokens: Sequence[Sampled], computed: int
    ) -> int:
        """Go on with what was verified, up to where the branch ends. What lies in the pages' order is computed."""
        for sampled in tokens:
            branch.take(sampled, request.prompt_len)
            if reason := end_reason(request, branch):
                break
        else:
            reason = None
        num_taken = len(branch.tokens) - computed
        accepted = branch.tokens[computed:-1] if reason is None else branch.tokens[computed:]
        computed += draft.num_in_order(accepted)
        self.memory.commit(branch.table, branch.tokens, computed)
        if reason is not None:
            self.finish_branch(request, branch, reason)
        return num_taken

    def _fork(self, request: Request, first: Branch, tokens: Sequence[Sampled]) -> None:
        others = [
            first.child(index, sampled, self.memory.fork(first.table), request.prompt_len)
            for index, sampled in enumerate(tokens)
            if index > 0
        ]
        request.branches = [first, *others]
        first.take(tokens[0], request.prompt_len)

    def replace(self, request: Request, branches: list[Branch]) -> None:
        """Put beams in the place of those they come from, whose pages they share."""
        old, request.branches = request.branches, branches
        for branch in old:
            self.memory.release(branch.table)

    def finish_branch(self, request: Request, branch: Branch, reason: FinishReason) -> None:
        """End a branch and take back its pages; with its last branch the request ends."""
        branch.finish_reason = reason
        self.memory.release(branch.table)
        if not request.live:
            self.finish(request, reason)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End an unfinished request in whatever state it is and take back its pages."""
        if request in self.running:
            self.running.remove(request)
        elif request in self.waiting:
            self.waiting.remove(request)
        for branch in request.live:
            branch.finish_reason = reason
        request.finish_reason = reason
        request.status = Status.FINISHED
        self.release(request)
        self.requests.pop(request.request_id, None)

    def release(self, request: Request) -> None:
        """Take back the pages of all branches; what they held has to be computed again."""
        for branch in request.branches:
            self.memory.release(branch.table)

    def check(self) -> None:
        """Assert that no page is lost, held twice by mistake or held by a request that does not run."""
        tables = [branch.table for request in self.requests.values() for branch in request.branches]
        waiting = [branch.table for request in self.waiting for branch in request.branches]
        assert all(table.is_empty or table.in_host for table in waiting), "a waiting request holds pages"
        assert sorted(r.request_id for r in [*self.running, *self.waiting]) == sorted(self.requests), (
            "requests are lost"
        )
        for queue in (self.running, self.waiting):
            assert queue == sorted(queue, key=rank), "requests are out of order"
        self.memory.check(tables)


def rank(request: Request) -> tuple[bool, int, int]:
    """What requests are ordered by, lower first."""
    is_overdue = request.num_overtaken >= MAX_OVERTAKEN
    return not is_overdue, 0 if is_overdue else request.priority, request.request_id


def end_reason(request: Request, branch: Branch) -> FinishReason | None:
    """Why a branch ends with the newest token it generated, if it does."""
    tokens = branch.tokens
    if len(tokens) == request.prompt_len:
        return None
    if tokens[-1] in request.stop_token_ids:
        return "stop"
    return "length" if len(tokens) >= request.max_len else None
