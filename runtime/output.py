"""What a request shows to its reader: tokens with the text they complete, cut before a stop string."""

from collections import deque
from dataclasses import dataclass, field

from octavo.runtime.request import Request, Status, Token
from octavo.runtime.tokenizer import IncrementalDecoder, StopFinder, Tokenizer


@dataclass(eq=False)
class Output:
    """The reader's side of a request.

    index    which prompt of the call it is
    mailbox  where a stream finds its tokens; None: only Engine.step returns them
    """

    request: Request
    index: int
    mailbox: deque[Token] | None
    tokenizer: Tokenizer | None
    num_shown: int = 0
    _decoder: IncrementalDecoder | None = field(init=False)
    _finder: StopFinder = field(init=False)

    def __post_init__(self) -> None:
        self._decoder = IncrementalDecoder(self.tokenizer.decode) if self.tokenizer else None
        self._finder = StopFinder(self.request.params.stop)

    def show(self) -> list[Token]:
        """The tokens that came since the last call; the last one tells whether, and why, the request ends.

        It may end here, with "stop", while the scheduler still runs it: a stop string shows in text only.
        """
        request = self.request
        tokens = []
        is_stopped = False
        while not is_stopped and self.num_shown < len(request.tokens) - request.prompt_len:
            self.num_shown += 1
            token_id = request.tokens[request.prompt_len + self.num_shown - 1]
            is_newest = request.prompt_len + self.num_shown == len(request.tokens)
            is_last = is_newest and request.status is Status.FINISHED and request.error is None
            text, is_stopped = self._text(token_id, is_last)
            reason = "stop" if is_stopped else request.finish_reason if is_last else None
            tokens.append(Token(request.request_id, self.index, token_id, text, reason))
        if request.error:
            tokens.append(Token(request.request_id, self.index, None, "", "error", request.error))
        if self.mailbox is not None:
            self.mailbox.extend(tokens)
        return tokens

    def show_abort(self) -> None:
        """Tell the reader that nothing more will come."""
        if self.mailbox is not None:
            self.mailbox.append(Token(self.request.request_id, self.index, None, "", "abort"))

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
