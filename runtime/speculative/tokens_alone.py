"""What proposers that look at nothing but tokens have in common."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.batch import Batch
from octavo.runtime.chunk import Chunk
from octavo.runtime.page_moves import Move
from octavo.runtime.paged_memory import PagedMemory


class TokensAlone:
    """The part of a proposer's interface that is about pages and hidden states: nothing is done with them."""

    def use_pages(self, memory: PagedMemory) -> None:
        pass

    def observe(self, chunks: Sequence[Chunk], batch: Batch, features: NDArray[np.generic] | None) -> None:
        pass

    def move_pages(self, moves: Sequence[Move]) -> None:
        pass
