import numpy as np

from octavo.compiler.program import STEP_INPUTS
from octavo.runtime.batch import build_batch
from octavo.runtime.chunk import Chunk
from octavo.runtime.paged_memory import PageTable
from octavo.runtime.prefix_cache import SHARED_KEY, PrefixCache
from octavo.runtime.request import Branch, Request
from octavo.runtime.sampling_params import SamplingParams


def chunk(request_id: int, tokens: list[int], pages: list[int], start: int, length: int) -> Chunk:
    root = PrefixCache(4, [None]).root(SHARED_KEY)
    branch = Branch(0, tokens, PageTable([pages], root, root, num_tokens=start))
    return Chunk(Request(request_id, 1, SamplingParams(), 99, [branch]), branch, start, length)


CHUNKS = [
    chunk(7, [10, 11, 12, 13, 14, 15], [3, 9], 5, 1),  # a decode
    chunk(8, [20, 21, 22, 23, 24, 25, 26, 27, 28, 29], [5, 2, 8], 2, 4),  # the middle of a prompt
    chunk(9, [30, 31, 32, 33], [4], 0, 4),  # a whole prompt that fills its page
]


def test_layout() -> None:
    batch = build_batch(CHUNKS, page_size=4)
    assert batch.input_ids.tolist() == [15, 22, 23, 24, 25, 30, 31, 32, 33]
    assert batch.positions.tolist() == [5, 2, 3, 4, 5, 0, 1, 2, 3]
    assert batch.slot_mapping.tolist() == [9 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 2 * 4, 2 * 4 + 1, 16, 17, 18, 19]
    assert batch.page_table.tolist() == [[3, 9], [5, 2], [4, 0]], "used pages only, then the null page"
    assert batch.seq_lens.tolist() == [6, 6, 4]
    assert batch.cu_seqlens_q.tolist() == [0, 1, 5, 9]
    assert batch.logit_rows.tolist() == [0, 8], "the prompt in the middle wants no logits yet"
    assert batch.dims == {"T": 9, "R": 3, "L": 2, "P": 2, "N": 0}


def test_inputs_have_the_dtypes_and_ranks_the_program_declares() -> None:
    batch = build_batch(CHUNKS, page_size=4)
    kinds = {"i64": np.int64, "i32": np.int32}
    assert list(batch.inputs) == list(STEP_INPUTS)
    for name, (dtype, shape) in STEP_INPUTS.items():
        array = batch.inputs[name]
        assert array.dtype == kinds[dtype] and array.ndim == len(shape) and array.flags.c_contiguous, name


def test_a_step_of_incomplete_prompts_wants_no_logits() -> None:
    batch = build_batch(CHUNKS[1:2], page_size=4)
    assert batch.logit_rows.shape == (0,) and batch.logit_rows.dtype == np.int64 and batch.dims["L"] == 0


def test_slots_do_not_wrap_at_32_bits() -> None:
    batch = build_batch([chunk(0, [1], [2**28], 0, 1)], page_size=64)
    assert batch.slot_mapping.tolist() == [2**34]
