"""A runner that passes all on to another; tests put something in between."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.batch import Batch
from octavo.runtime.model_runner import ModelRunner
from octavo.runtime.page_moves import Move


class PassedOn:
    """Implements ModelRunner."""

    def __init__(self, inner: ModelRunner) -> None:
        self.inner = inner
        self.num_pages, self.page_size = inner.num_pages, inner.page_size
        self.num_host_pages, self.page_windows = inner.num_host_pages, inner.page_windows
        self.page_bytes = inner.page_bytes

    def move_pages(self, moves: Sequence[Move]) -> None:
        self.inner.move_pages(moves)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        return self.inner.run(batch)

    @property
    def features(self) -> NDArray[np.generic] | None:
        return self.inner.features
