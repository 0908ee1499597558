"""A runner without a model: its logits depend on every token of a request, read through the page table."""

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.artifact import ModelInfo
from octavo.runtime.batch import Batch
from octavo.runtime.page_moves import HostPages, Move

VOCAB_SIZE = 50


def logits_of(history: Sequence[int]) -> NDArray[np.float32]:
    """Logits (vocab,) after these tokens: random, the same for the same tokens in the same order."""
    seed = zlib.crc32(np.array(history, np.int64).tobytes())
    return np.random.default_rng(seed).standard_normal(VOCAB_SIZE).astype(np.float32) * 2


class FakeRunner:
    """Keeps (token, position) of each slot as a cache keeps keys and values, and checks what it is given.

    Unwritten and freed slots hold garbage, so a wrong page, slot, position or length changes the logits.
    """

    features: NDArray[np.generic] | None = None

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_host_pages: int = 0,
        windows: tuple[int | None, ...] = (None,),
        vocab_size: int = VOCAB_SIZE,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_host_pages = num_host_pages
        self.page_windows = windows
        self.page_bytes = page_size * 16
        self.cache = np.full((num_pages * page_size, 2), -77, np.int64)
        self._pages = HostPages([self.cache.reshape(num_pages, -1)], num_host_pages)
        self.batches: list[dict[str, int]] = []
        self.features = None
        self.fail_with: BaseException | None = None
        self.poison: dict[int, float] = {}  # last token of a history -> value written into its logits

    def move_pages(self, moves: Sequence[Move]) -> None:
        self._pages.move(moves)

    def run(self, batch: Batch) -> NDArray[np.float32]:
        if self.fail_with is not None:
            raise self.fail_with
        self.batches.append(batch.dims)
        assert all(array.flags.c_contiguous for array in batch.inputs.values())
        tables = [(batch.page_table, batch.slot_mapping), *batch.windowed]
        assert len(tables) == len(self.page_windows)
        slots = np.concatenate([slot_mapping for _, slot_mapping in tables])
        assert (slots >= self.page_size).all(), "the null page is written"
        assert len(set(slots.tolist())) == len(slots), "two tokens share a slot"
        self.cache[slots] = np.tile(np.stack([batch.input_ids, batch.positions], axis=1), (len(tables), 1))
        rows = []
        for row in batch.logit_rows.tolist():
            request = int(np.searchsorted(batch.cu_seqlens_q, row, side="right")) - 1
            context = int(batch.seq_lens[request]) - (int(batch.cu_seqlens_q[request + 1]) - 1 - row)
            if len(batch.tree) and batch.tree[row]:
                rows.append(self._logits(self._path(batch, request, row)))
                continue
            seen = [
                self._history(page_table[request], context, window)
                for (page_table, _), window in zip(tables, self.page_windows, strict=True)
            ]
            history = max(seen, key=len)
            assert all(history[-len(each) :] == each for each in seen), "groups hold different tokens"
            rows.append(self._logits(history))
        return np.array(rows, np.float32).reshape(len(rows), self.vocab_size)

    def _path(self, batch: Batch, request: int, row: int) -> list[int]:
        """What a token of a tree sees: the request's tokens before the step, then those of its mask."""
        first, end = batch.cu_seqlens_q[request : request + 2].tolist()
        before = int(batch.seq_lens[request]) - (end - first)
        mask = int(batch.tree[row]) % 2**64
        inside = [first + bit for bit in range(end - first) if mask >> bit & 1]
        assert inside[-1] == row, "a token does not see itself"
        positions = [int(batch.positions[one]) for one in inside]
        assert positions == list(range(before, before + len(inside))), "a path skips positions"
        return [
            *self._history(batch.page_table[request], before, None),
            *(int(batch.input_ids[one]) for one in inside),
        ]

    def _history(self, pages: NDArray[np.int32], length: int, window: int | None) -> list[int]:
        index = np.arange(0 if window is None else max(0, length - window), length)
        tokens, positions = self.cache[
            pages[index // self.page_size] * self.page_size + index % self.page_size
        ].T
        assert (positions == index).all(), "pages do not hold the request's tokens in order"
        return [int(token) for token in tokens]

    def _logits(self, history: list[int]) -> NDArray[np.float32]:
        logits = logits_of(history)
        if history[-1] in self.poison:
            logits[3] = self.poison[history[-1]]
        return logits


def make_model(**changes: Any) -> ModelInfo:
    fields = {"max_model_len": 64, "max_batch_tokens": 16, "eos_token_ids": (), **changes}
    return ModelInfo(name="fake", vocab_size=VOCAB_SIZE, num_layers=1, **fields)
