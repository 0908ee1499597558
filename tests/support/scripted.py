"""Proposers without sense or state, for the fake model of fake_runner."""

from collections.abc import Callable, Sequence

import numpy as np
from fake_runner import VOCAB_SIZE, logits_of
from numpy.typing import NDArray

from octavo.runtime.batch import Batch
from octavo.runtime.chunk import Chunk
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.sampler import DRAFT_STREAM, draw, random_bits
from octavo.runtime.speculative.draft import NO_DRAFT, ROOT, Draft, chain
from octavo.runtime.speculative.proposer import Asked

Script = Callable[[Asked], Draft]


class Scripted:
    """Drafts what a function says."""

    name = "scripted"
    has_tree = True

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_asked = 0

    def use_pages(self, memory: PagedMemory) -> None:
        pass

    def move_pages(self, moves: Sequence[Move]) -> None:
        pass

    def observe(self, chunks: Sequence[Chunk], batch: Batch, features: NDArray[np.generic] | None) -> None:
        pass

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        self.num_asked += len(asked)
        return [self._script(each) for each in asked]


def best(history: Sequence[int]) -> int:
    return int(np.argmax(logits_of(history)))


def right(asked: Asked) -> Draft:
    """What greedy decoding will choose."""
    history = list(asked.branch.tokens)
    for _ in range(asked.most):
        history.append(best(history))
    return chain(history[-asked.most :])


def wrong(asked: Asked) -> Draft:
    return chain([(token + 1) % VOCAB_SIZE for token in right(asked).token_ids])


def repeated(asked: Asked) -> Draft:
    return chain([7] * asked.most)


def half(asked: Asked) -> Draft:
    """Right up to a depth that changes from place to place."""
    good = right(asked).token_ids
    count = len(asked.branch.tokens) % (asked.most + 1)
    return chain([*good[:count], *((token + 1) % VOCAB_SIZE for token in good[count:])])


def nothing(asked: Asked) -> Draft:
    return NO_DRAFT


def off_the_first_path(asked: Asked) -> Draft:
    """A tree whose right path begins with the second child; behind it, a wrong one and a right one again."""
    if asked.most < 5:
        return NO_DRAFT
    first, second, third = right(asked).token_ids[:3]
    tokens = ((first + 1) % VOCAB_SIZE, first, (second + 1) % VOCAB_SIZE, second, third)
    return Draft(tokens, (ROOT, ROOT, 1, 1, 3), (None,) * 5)


def drawn(asked: Asked) -> Draft:
    """A chain that is really drawn, from another distribution than the target's and without processing."""
    history, tokens, probs = list(asked.branch.tokens), [], []
    for _ in range(asked.most):
        weights = np.exp(logits_of([*history, 1]).astype(np.float64) + logits_of(history))
        q = weights / weights.sum()
        bits = random_bits(asked.key, len(history), DRAFT_STREAM, asked.round, 1)
        tokens.append(draw(q, (int(bits[0]) >> 11) * 2.0**-53))
        probs.append(q)
        history.append(tokens[-1])
    return Draft(tuple(tokens), tuple(range(ROOT, len(tokens) - 1)), tuple(probs))


SCRIPTS: dict[str, Script] = {
    script.__name__: script for script in (right, wrong, repeated, half, nothing, off_the_first_path)
}
