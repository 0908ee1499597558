"""Branches that gave up their pages are computed again, and share once more what they have in common."""

from collections.abc import Sequence

from octavo.runtime.paged_memory import PagedMemory
from octavo.runtime.request import Branch


def share_computed(memory: PagedMemory, live: Sequence[Branch], branch: Branch) -> bool:
    """Give a branch the pages of the computed sibling that it has most in common with; False if there is none, or
    windows slid past them."""
    computed = [b for b in live if b is not branch and b.table.num_tokens >= len(b.tokens) - 1]
    if not computed:
        return False
    length, source = _most_in_common(computed, branch)
    return memory.share_prefix(branch.table, source.table, min(length, source.table.num_tokens))


def share_at_windows(memory: PagedMemory, live: Sequence[Branch], branch: Branch, end: int) -> int:
    """Where a branch has to stop before `end` for later siblings, which are given what they have in common there:
    windows are about to slide past it."""
    if all(window is None for window in memory.windows):
        return end  # siblings can share at any time
    for place, sibling in enumerate(live):
        if place == 0 or not sibling.table.is_empty:
            continue
        length, source = _most_in_common(live[:place], sibling)
        if source is branch and length > branch.table.num_tokens:
            end = min(end, length)
        elif source is branch:
            memory.share_prefix(sibling.table, branch.table, length)
    return end


def _most_in_common(others: Sequence[Branch], branch: Branch) -> tuple[int, Branch]:
    """The longest common beginning that leaves a token to compute, and with whom."""
    lengths = [_common(other.tokens, branch.tokens) for other in others]
    return min(max(lengths), len(branch.tokens) - 1), others[lengths.index(max(lengths))]


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(left), len(right)))
