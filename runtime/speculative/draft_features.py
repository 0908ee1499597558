"""Hidden states of the target that a draft head has yet to read."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.chunk import Chunk

Features = NDArray[Any]


def by_chunk(chunks: Sequence[Chunk], features: Features) -> Iterator[tuple[Chunk, Features]]:
    """Each chunk of a step with the features of its own tokens."""
    offset = 0
    for chunk in chunks:
        yield chunk, features[offset : offset + chunk.num_tokens]
        offset += chunk.num_tokens


class PendingFeatures:
    """Of one branch: the target's features of neighbouring tokens, first : first + len(rows)."""

    def __init__(self) -> None:
        self.first = 0
        self.rows: Features | None = None

    @property
    def end(self) -> int:
        return self.first + (0 if self.rows is None else len(self.rows))

    def add(self, start: int, rows: Features) -> None:
        """The target computed tokens from `start` on; what was known of them, or of others behind them, is dropped."""
        if self.rows is None or not self.first <= start <= self.end:
            self.first, self.rows = start, rows.copy()
        else:
            self.rows = np.concatenate([self.rows[: start - self.first], rows])

    def of(self, start: int, end: int, like: Features) -> Features:
        """Rows (end - start, F) of these tokens; zeros where none are known, as in front of the first token.

        like  features of any tokens, for width and dtype
        """
        result = np.zeros((end - start, like.shape[1]), like.dtype)
        if self.rows is not None:
            low, high = max(start, self.first), min(end, self.end)
            if low < high:
                result[low - start : high - start] = self.rows[low - self.first : high - self.first]
        return result

    def forget(self, before: int) -> None:
        """Tokens before this one are not asked for again."""
        if self.rows is not None and before > self.first:
            self.rows = self.rows[before - self.first :]
            self.first = before
