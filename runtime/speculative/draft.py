"""What is drafted: tokens that may follow a branch, and what each was drawn from."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

ROOT = -1  # the parent of a draft's first token: the newest token of its branch
Distribution = NDArray[np.float64]


@dataclass(frozen=True)
class Draft:
    """Tokens that may follow a branch: a tree of N nodes, each behind its parent; node i draws from what lies above.

    token_ids  (N,)
    parents    (N,) the node before each, below its own place; ROOT: the newest token. A chain is ROOT, 0, 1, ...
               The most probable path comes first: of a path that is accepted, what lies in order is not computed again.
               Siblings that were drawn stay in the order in which they were, equal ones too: what is moved or dropped
               by its value is missing from the distribution
    probs      (N,) the distribution (vocab,) that each token was really drawn from, after all processing; None: it was
               drawn from none, but chosen by a rule that looks at nothing random (argmax, n-gram, grammar)
    is_without_replacement  siblings with probs were drawn one after another, each from what the others left, so that
               they differ; otherwise independently, all from the same distribution
    scores     (N,) how probable the proposer thinks that each is accepted, given that its parent is; None: unknown
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    probs: tuple[Distribution | None, ...]
    is_without_replacement: bool = False
    scores: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(ROOT, len(self) - 1))

    @property
    def is_fixed(self) -> bool:
        """Nothing random was in the choice of any token."""
        return all(one is None for one in self.probs)

    def children(self, node: int) -> list[int]:
        """In the order in which they were drawn."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def depth(self, node: int) -> int:
        """Of a token behind the newest: 0; of those behind it: 1."""
        depth = 0
        while (node := self.parents[node]) != ROOT:
            depth += 1
        return depth

    def num_in_order(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, which follow the branch, are the draft's first nodes, one behind the other."""
        pairs = zip(token_ids, self.token_ids, self.parents, strict=False)
        for count, (token_id, own, parent) in enumerate(pairs):
            if token_id != own or parent != count - 1:
                return count
        return min(len(token_ids), len(self))


NO_DRAFT = Draft((), (), ())


def chain(token_ids: Sequence[int], scores: Sequence[float] | None = None) -> Draft:
    """A chain that a rule chose."""
    count = len(token_ids)
    given = None if scores is None else tuple(scores)
    return Draft(tuple(token_ids), tuple(range(ROOT, count - 1)), (None,) * count, scores=given)
