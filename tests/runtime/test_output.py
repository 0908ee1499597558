from collections import deque
from collections.abc import Sequence

from octavo.runtime.output import Output
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.prefix_cache import SHARED_KEY
from octavo.runtime.request import Branch, FinishReason, Request, Status, Token
from octavo.runtime.sampling_params import SamplingParams


class Letters:
    """Token i is the i-th capital letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("A") for letter in text]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("A") + token) for token in token_ids)


def make(stop: tuple[str, ...] = (), mailbox: deque[Token] | None = None) -> tuple[Request, Output]:
    branch = Branch(0, [0, 1], PagedMemory(2, 4).new_table(SHARED_KEY))
    request = Request(5, 2, SamplingParams(stop=stop), 9, [branch], frozenset({25}))
    return request, Output(request, 3, mailbox, Letters())


def finish(request: Request, reason: FinishReason) -> None:
    request.status, request.finish_reason = Status.FINISHED, reason
    request.branches[0].finish_reason = reason


def shown(tokens: Sequence[Token]) -> list[tuple[int | None, str, str | None]]:
    assert all((token.request_id, token.index) == (5, 3) for token in tokens)
    return [(token.token_id, token.text, token.finish_reason) for token in tokens]


def test_each_token_is_shown_once_and_prompts_never() -> None:
    request, output = make()
    assert output.show() == []
    request.branches[0].tokens += [2, 3]
    assert shown(output.show()) == [(2, "C", None), (3, "D", None)]
    assert output.show() == []
    request.branches[0].tokens.append(4)
    finish(request, "length")
    assert shown(output.show()) == [(4, "E", "length")]


def test_end_tokens_have_no_text() -> None:
    request, output = make()
    request.branches[0].tokens += [2, 25]
    finish(request, "stop")
    assert shown(output.show()) == [(2, "C", None), (25, "", "stop")]


def test_nothing_after_a_stop_string_is_shown_even_if_more_tokens_came_at_once() -> None:
    request, output = make(stop=("DE",))
    request.branches[0].tokens += [2, 3, 4, 5, 6]
    assert shown(output.show()) == [(2, "C", None), (3, "", None), (4, "", "stop")]


def test_a_stop_string_wins_over_the_length() -> None:
    request, output = make(stop=("C",))
    request.branches[0].tokens.append(2)
    finish(request, "length")
    assert shown(output.show()) == [(2, "", "stop")]


def test_text_held_back_comes_with_the_last_token() -> None:
    request, output = make(stop=("CDX",))
    request.branches[0].tokens += [2, 3]
    finish(request, "length")
    assert shown(output.show()) == [(2, "", None), (3, "CD", "length")]


def test_an_error_ends_without_a_token() -> None:
    request, output = make()
    request.branches[0].tokens.append(2)
    finish(request, "error")
    request.error = "broken"
    tokens = output.show()
    assert shown(tokens) == [(2, "C", None), (None, "", "error")] and tokens[-1].error == "broken"


def test_a_mailbox_gets_the_same_tokens_and_the_end_of_an_abort() -> None:
    mailbox: deque[Token] = deque()
    request, output = make(mailbox=mailbox)
    request.branches[0].tokens.append(2)
    tokens = output.show()
    output.show_abort()
    assert shown(mailbox) == [*shown(tokens), (None, "", "abort")]


def test_without_a_tokenizer_there_is_no_text() -> None:
    request, _ = make()
    output = Output(request, 3, None, None)
    request.branches[0].tokens.append(2)
    assert shown(output.show()) == [(2, "", None)]
