"""What drafts: the interface of all proposers."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.batch import Batch
from octavo.runtime.chunk import Chunk
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.request import Branch, Request
from octavo.runtime.sampler import RandomKey
from octavo.runtime.speculative.draft import Draft


class Asked(NamedTuple):
    """A branch whose next tokens are to be drafted.

    most   nodes at most, at least 1; a slot of its pages is reserved for each
    key    its stream of random numbers: noise comes from random_bits(key, position, DRAFT_STREAM, round, ...)
    round  how many rounds it had; a round and a position name each random number once
    is_coupled  the target's choice at a position is what plain decoding would choose there, whatever is drafted:
           argmax, or a draw with `uniform(key, position)`. A draft is best made alike then, and gives no probs.
           Otherwise tokens are drawn with the noise above, and probs tell from what
    """

    request: Request
    branch: Branch
    most: int
    key: RandomKey
    round: int
    is_coupled: bool


class Proposer(Protocol):
    """Drafts tokens. What it keeps of a branch it keeps by the branch itself (weakly), as branches end anywhere.

    A draft may be anything: output does not depend on it beyond chance, only speed does.
    """

    @property
    def name(self) -> str:
        """For people: ngram, suffix, model, ..."""
        ...

    @property
    def has_tree(self) -> bool:
        """Whether its drafts may be other than chains."""
        ...

    def use_pages(self, memory: PagedMemory) -> None:
        """The target's pages; told once, before all else."""
        ...

    def propose(self, asked: Sequence[Asked]) -> list[Draft]:
        """For each branch at most `most` nodes, or NO_DRAFT. Tokens are below the target's vocabulary."""
        ...

    def observe(self, chunks: Sequence[Chunk], batch: Batch, features: NDArray[np.generic] | None) -> None:
        """A step of the target ran, and nothing is committed yet: its chunks, what it was given, and the features of
        its T tokens if it makes some."""
        ...

    def move_pages(self, moves: Sequence[Move]) -> None:
        """Pages of the target moved; the proposer's own, under the same numbers, have to follow."""
        ...
