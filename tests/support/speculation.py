"""Requests and drafts for tests of speculation."""

from collections.abc import Sequence

from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.prefix_cache import SHARED_KEY, CacheKey
from octavo.runtime.request import Branch, Request
from octavo.runtime.sampler import RandomKey
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.draft import Draft
from octavo.runtime.speculative.proposer import Asked


def make_request(
    tokens: Sequence[int], prompt_len: int | None = None, max_len: int = 1000, key: CacheKey = SHARED_KEY
) -> Request:
    """A running request of one branch. prompt_len None: it has generated nothing."""
    branch = Branch(0, list(tokens), PagedMemory(4, 4).new_table(key))
    length = len(tokens) if prompt_len is None else prompt_len
    return Request(0, length, SamplingParams(), max_len, [branch], key=key)


def ask(request: Request, most: int) -> Asked:
    return Asked(request, request.branches[0], most, RandomKey(0, 0), 0, True)


def paths(draft: Draft) -> set[tuple[int, ...]]:
    """Token ids from the first to each node."""
    found: list[tuple[int, ...]] = []
    for token_id, parent in zip(draft.token_ids, draft.parents, strict=True):
        found.append((*(found[parent] if parent >= 0 else ()), token_id))
    return set(found)
