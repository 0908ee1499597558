"""What a request shows to its reader: tokens with the text they complete, cut before a stop string."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from octavo.runtime.beam import ranked_branches
from octavo.runtime.request import Answer, Branch, Completion, FinishReason, Request, Status, Token
from octavo.runtime.sampler import Sampled
from octavo.runtime.tokenizer import IncrementalDecoder, StopFinder, Tokenizer


@dataclass(eq=False)
class BranchOutput:
    """The reader's side of a branch."""

    request: Request
    branch: Branch
    index: int
    tokenizer: Tokenizer | None
    num_shown: int = 0
    is_stopped: bool = False
    is_counted: bool = False
    _decoder: IncrementalDecoder | None = field(init=False)
    _finder: StopFinder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = IncrementalDecoder(self.tokenizer.decode) if self.tokenizer else None
        self._finder = StopFinder(self.request.params.stop)

    def show(self) -> list[Token]:
        """The tokens that came since the last call; the last one tells whether, and why, the branch ends.

        It may end here, with "stop", while the scheduler still runs it: a stop string shows in text only.
        """
        request, branch = self.request, self.branch
        tokens = []
        while not self.is_stopped and self.num_shown < len(branch.tokens) - request.prompt_len:
            place = self.num_shown
            self.num_shown += 1
            token_id = branch.tokens[request.prompt_len + place]
            is_newest = request.prompt_len + self.num_shown == len(branch.tokens)
            is_last = is_newest and branch.finish_reason is not None and request.error is None
            text, self.is_stopped = self._text(token_id, is_last)
            reason = "stop" if self.is_stopped else branch.finish_reason if is_last else None
            chosen = branch.chosen[place] if request.params.logprobs is not None else None
            tokens.append(
                Token(
                    request.request_id, self.index, token_id, text, reason, None, branch.index,
                    chosen.logprob if chosen else None, chosen.top_logprobs if chosen else (),
                )
            )  # fmt: skip
        return tokens

    def _text(self, token_id: int, is_last: bool) -> tuple[str, bool]:
        """What a token lets show, and whether it completed a stop string. End tokens have no text."""
        if self._decoder is None:
            return "", False
        piece = "" if token_id in self.request.stop_token_ids else self._decoder.push(token_id)
        if is_last:
            piece += self._decoder.flush()
        text, is_stopped = self._finder.push(piece)
        if is_last and not is_stopped:
            text += self._finder.flush()
        return text, is_stopped


@dataclass(eq=False)
class Output:
    """The reader's side of a request. Answers that are ranked are shown when all have ended, the best first.

    index    which prompt of the call it is
    mailbox  where a stream finds its tokens; None: only Engine.step returns them
    """

    request: Request
    index: int
    mailbox: deque[Token] | None
    tokenizer: Tokenizer | None
    _outputs: dict[int, BranchOutput] = field(default_factory=dict)
    _held: dict[int, list[Token]] = field(default_factory=dict)

    def show(self) -> list[Token]:
        """What may be shown since the last call. A token of a branch may tell that it ends by a stop string."""
        request = self.request
        tokens: list[Token] = []
        if request.params.beam_width is None:
            for branch in request.branches:
                tokens += self._output(branch).show()
        if request.params.is_ranked and request.error is None:
            self._hold(tokens)
            tokens = self._ranked() if request.status is Status.FINISHED else []
        if request.error:
            tokens.append(Token(request.request_id, self.index, None, "", "error", request.error))
        if self.mailbox is not None:
            self.mailbox.extend(tokens)
        return tokens

    def stopped(self) -> list[Branch]:
        """Branches that the scheduler still runs though their text holds a stop string."""
        return [
            output.branch
            for output in self._outputs.values()
            if output.branch.finish_reason is None and output.is_stopped
        ]

    def num_dropped(self) -> int:
        """Tokens that came with the one that completed a stop string, and after it; each counts once."""
        outputs = [output for output in self._outputs.values() if output.is_stopped and not output.is_counted]
        for output in outputs:
            output.is_counted = True
        ends = [len(output.branch.tokens) - self.request.prompt_len for output in outputs]
        return sum(end - output.num_shown for end, output in zip(ends, outputs, strict=True))

    def show_abort(self) -> None:
        """Tell the reader that nothing more will come."""
        if self.mailbox is not None:
            self.mailbox.append(Token(self.request.request_id, self.index, None, "", "abort"))

    def _output(self, branch: Branch) -> BranchOutput:
        if branch.index not in self._outputs:
            self._outputs[branch.index] = BranchOutput(self.request, branch, self.index, self.tokenizer)
        return self._outputs[branch.index]

    def _hold(self, tokens: Sequence[Token]) -> None:
        for token in tokens:
            self._held.setdefault(token.branch, []).append(token)

    def _ranked(self) -> list[Token]:
        """All answers, numbered by rank."""
        tokens = []
        for rank, branch in enumerate(ranked_branches(self.request)):
            own = self._held.pop(branch.index, None)
            if self.request.params.beam_width is not None:
                own = BranchOutput(self.request, branch, self.index, self.tokenizer).show()
            tokens += [replace(token, branch=rank) for token in own or []]
        self._held.clear()
        return tokens


def completion_of(request: Request, tokens: Sequence[Token], has_text: bool) -> Completion:
    """A request that ended, from all tokens that it showed."""
    branches = enumerate(ranked_branches(request))
    answers = [_answer(request, branch, rank, tokens, has_text) for rank, branch in branches]
    reports = None if request.params.prompt_logprobs is None else tuple(request.prompt_report)
    prompt = tuple(request.branches[0].tokens[: request.prompt_len])
    return Completion(request.request_id, prompt, tuple(answers), reports)


def _answer(request: Request, branch: Branch, rank: int, tokens: Sequence[Token], has_text: bool) -> Answer:
    own = [token for token in tokens if token.branch == rank and token.token_id is not None]
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = tuple(Sampled(token.token_id or 0, token.logprob, token.top_logprobs) for token in own)
    ends: list[FinishReason] = [
        token.finish_reason for token in own or tokens if token.finish_reason is not None
    ]
    return Answer(
        token_ids=tuple(token.token_id for token in own if token.token_id is not None),
        text="".join(token.text for token in own) if has_text else None,
        finish_reason=ends[-1] if ends else branch.finish_reason or "abort",
        logprobs=logprobs,
        score=branch.score,
    )
