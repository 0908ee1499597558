"""A step as the arrays that a program reads: the runtime's side of STEP_INPUTS."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.program import FEATURES
from octavo.runtime.chunk import Chunk
from octavo.runtime.kv_cache import NULL_PAGE

# Tokens of a request in a step with a tree: a bit of a mask each.
MAX_TREE_TOKENS = 64


@dataclass(frozen=True)
class Batch:
    """The tokens of a step, request after request. T tokens, R requests, P page-table columns, L wanted rows.

    input_ids     (T,) i64
    positions     (T,) i64      of each token in its sequence
    slot_mapping  (T,) i64      where its key and value go: page * page_size + row
    page_table    (R, P) i32    pages of each request in order; unused columns hold the null page
    seq_lens      (R,) i32      tokens of each request with this step's included
    cu_seqlens_q  (R + 1,) i32  request r owns tokens cu_seqlens_q[r] : cu_seqlens_q[r + 1]
    logit_rows    (L,) i64      tokens whose logits are wanted; L may be 0 when every prompt is still
                  incomplete
    windowed      for each page group but the first, its (page_table, slot_mapping); a window that slid past a
                  page leaves the null page in its column
    row_ranks     (N,) i64      place along dp of the rank that each token of the step, of all these ranks, comes
                  from, ascending; empty where ranks share no experts by all-to-all
    features      (T, F)        what a draft head reads of its target: for the token at a position, the target's hidden
                  states of the token before it, zeros at position 0; in the program's dtype, bf16 as its bits in
                  uint16. None for a program that reads none
    tree          (T,) i64      of a token of a tree of drafts: bit j is set if it sees token j of its request in this
                  step, itself one of them; 0: it sees all before it

    A row for each branch: "request" above means one of its branches.
    """

    input_ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    slot_mapping: NDArray[np.int64]
    page_table: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    cu_seqlens_q: NDArray[np.int32]
    logit_rows: NDArray[np.int64]
    windowed: tuple[tuple[NDArray[np.int32], NDArray[np.int64]], ...] = ()
    row_ranks: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    features: NDArray[np.generic] | None = None
    tree: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def dims(self) -> dict[str, int]:
        """T, R, L, P, N; num_pages is the runner's."""
        num_requests, num_columns = self.page_table.shape
        return {
            "T": len(self.input_ids), "R": num_requests, "L": len(self.logit_rows), "P": num_columns,
            "N": len(self.row_ranks),
        }  # fmt: skip

    @property
    def inputs(self) -> Mapping[str, NDArray[Any]]:
        """The arrays by their names in STEP_INPUTS; all contiguous."""
        arrays: dict[str, NDArray[Any]] = {
            "input_ids": self.input_ids,
            "positions": self.positions,
            "slot_mapping": self.slot_mapping,
            "page_table": self.page_table,
            "seq_lens": self.seq_lens,
            "cu_seqlens_q": self.cu_seqlens_q,
            "logit_rows": self.logit_rows,
            "row_ranks": self.row_ranks,
            "tree": self.tree,
        }
        if self.features is not None:
            arrays[FEATURES] = self.features
        for group, (page_table, slot_mapping) in enumerate(self.windowed, 1):
            arrays[f"page_table_{group}"], arrays[f"slot_mapping_{group}"] = page_table, slot_mapping
        return arrays


def build_batch(
    chunks: Sequence[Chunk], page_size: int, num_wanted: Callable[[Chunk], int] | None = None
) -> Batch:
    """Lay out the chunks of a step one after another; their branches hold the pages for them already.

    num_wanted  of how many of a chunk's last tokens the logits are wanted; None: see `num_logit_rows`
    """
    lengths = np.array([chunk.length + len(chunk.draft.token_ids) for chunk in chunks], np.int64)
    starts = np.array([chunk.start for chunk in chunks], np.int64)
    ends = starts + lengths
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    rows = np.repeat(np.arange(len(chunks)), lengths)
    positions = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)
    groups = []
    for group in range(len(chunks[0].branch.table.groups)):
        page_table = _page_table(chunks, -(-ends // page_size), group)
        slots = page_table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size
        assert (slots >= (NULL_PAGE + 1) * page_size).all(), "a token was placed in the null page"
        groups.append((page_table, slots))
    input_ids: list[int] = []
    for _, branch, start, length, draft in chunks:
        input_ids += branch.tokens[start : start + length]
        input_ids += draft.token_ids
    tree = np.zeros(len(positions), np.int64)
    for chunk, end in zip(chunks, offsets[1:].tolist(), strict=True):
        if len(chunk.draft.token_ids) > 1 and not chunk.draft.is_chain:
            _lay_out_tree(chunk, positions[:end], tree[:end])
    return Batch(
        input_ids=np.array(input_ids, np.int64),
        positions=positions,
        slot_mapping=groups[0][1],
        page_table=groups[0][0],
        seq_lens=ends.astype(np.int32),
        cu_seqlens_q=offsets.astype(np.int32),
        logit_rows=_logit_rows([(num_wanted or num_logit_rows)(chunk) for chunk in chunks], offsets),
        windowed=tuple(groups[1:]),
        tree=tree,
    )


def _lay_out_tree(chunk: Chunk, positions: NDArray[np.int64], tree: NDArray[np.int64]) -> None:
    """Positions and masks of a chunk with a tree; both arrays end with its tokens. Slots stay in the order of nodes."""
    draft, known = chunk.draft, chunk.length
    assert chunk.num_tokens <= MAX_TREE_TOKENS, f"{chunk.num_tokens} tokens with a tree"
    masks = [(2 << index) - 1 for index in range(known)]
    for node, parent in enumerate(draft.parents):
        masks.append(masks[known + parent] | 1 << (known + node))
    first = len(tree) - chunk.num_tokens
    tree[first:] = np.array(masks, np.uint64).view(np.int64)
    positions[first:] = [chunk.start + mask.bit_count() - 1 for mask in masks]


def num_logit_rows(chunk: Chunk) -> int:
    """How many of a chunk's last tokens have wanted logits: its newest token's and all drafted ones', and the prompt's
    if it is reported."""
    if chunk.request.wants_prompt_report:
        return chunk.num_tokens
    return 1 + len(chunk.draft) if chunk.is_sampled else 0


def _logit_rows(wanted: Sequence[int], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    counts = np.array(wanted, np.int64)
    if counts.max() <= 1:
        return offsets[1:][counts > 0] - 1
    return np.concatenate(
        [np.arange(end - count, end) for end, count in zip(offsets[1:], counts, strict=True)]
    )


def _page_table(chunks: Sequence[Chunk], num_used: NDArray[np.int64], group: int) -> NDArray[np.int32]:
    table = np.full((len(chunks), int(num_used.max())), NULL_PAGE, np.int32)
    for row, (chunk, count) in enumerate(zip(chunks, num_used.tolist(), strict=True)):
        table[row, :count] = chunk.branch.table.groups[group][:count]
    return table
