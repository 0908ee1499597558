from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from speculation import ask, make_request

from octavo.runtime.batch import Batch, build_batch
from octavo.runtime.chunk import Chunk
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.request import Request
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.draft import NO_DRAFT, chain
from octavo.runtime.speculative.forced import Forced
from octavo.runtime.speculative.ngram import NGram
from octavo.runtime.token_state import TokenState


class OneText:
    """A grammar that lets one text follow."""

    def __init__(self, text: Sequence[int]) -> None:
        self.text = list(text)

    def accept(self, token_ids: Sequence[int]) -> None:
        del self.text[: len(token_ids)]

    def rollback(self, count: int) -> None:
        raise NotImplementedError

    def fork(self) -> "OneText":
        return OneText(self.text)

    def allowed(self, vocab_size: int) -> NDArray[np.bool_]:
        raise NotImplementedError

    def forced(self) -> list[int]:
        return list(self.text)


def request_with(text: Sequence[int] | None, tokens: Sequence[int] = (1, 2, 3, 1, 2)) -> Request:
    request = make_request(tokens)
    if text is not None:
        request.branches[0].state = TokenState(SamplingParams(), len(tokens), matcher=OneText(text))
    return request


def test_forced_tokens_come_first_and_others_are_drafted_by_the_inner_one() -> None:
    requests = [request_with([5, 6]), request_with(None), request_with([]), request_with([7])]
    requests.append(request_with(None, [4, 8, 9, 4, 8]))
    alone, both = Forced(), Forced(NGram())
    assert (alone.name, both.name, both.has_tree) == ("grammar", "ngram", False)
    forced = chain([5, 6], [1.0, 1.0])
    drafts = alone.propose([ask(request, 3) for request in requests])
    assert drafts == [forced, NO_DRAFT, NO_DRAFT, chain([7], [1.0]), NO_DRAFT]
    drafts = both.propose([ask(request, 3) for request in requests])
    assert [draft.token_ids for draft in drafts] == [(5, 6), (3, 1, 2), (3, 1, 2), (7,), (9, 4, 8)]


class Told(NGram):
    """Remembers what it was told of."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[object] = []

    def use_pages(self, memory: PagedMemory) -> None:
        self.calls.append(memory)

    def observe(self, chunks: Sequence[Chunk], batch: Batch, features: NDArray[np.generic] | None) -> None:
        self.calls.append(features)

    def move_pages(self, moves: Sequence[Move]) -> None:
        self.calls.append(moves)


def test_the_inner_one_is_told_of_pages_and_steps() -> None:
    inner, memory, features = Told(), PagedMemory(4, 4), np.zeros((1, 2), np.float32)
    request = make_request([1])
    chunk = Chunk(request, request.branches[0], 0, 1)
    memory.reserve(request.branches[0].table, 1)
    batch = build_batch([chunk], 4)
    for proposer in (Forced(inner), Forced()):
        proposer.use_pages(memory)
        proposer.observe([chunk], batch, features)
        proposer.move_pages([])
    assert inner.calls == [memory, features, []]


def test_a_long_forced_text_is_clipped() -> None:
    assert Forced().propose([ask(request_with(range(9)), 4)])[0].token_ids == (0, 1, 2, 3)
