"""Typical acceptance: NOT lossless. A token that is probable enough is kept, whatever would have been drawn."""

from collections.abc import Callable

import numpy as np

from octavo.runtime.speculative.draft import ROOT, Distribution, Draft
from octavo.runtime.speculative.verify import Target, Verdict

# A token is kept if p > min(HARD, SOFT * exp(-entropy)); those of Medusa (Cai et al. 2024, section 2.3.1).
HARD, SOFT = 0.09, 0.3


def verify_typical(draft: Draft, target: Target, choose: Callable[[int], int]) -> Verdict:
    """Follow the first child that is typical; `choose` gives the token behind the last. Both are asked down the path.

    What comes out is distributed otherwise than what the target draws: sharper, and towards what drafts propose.
    """
    path: list[int] = []
    node = ROOT
    while children := draft.children(node):
        p = target(node)
        positive = p[p > 0]
        bound = min(HARD, SOFT * float(np.exp((positive * np.log(positive)).sum())))
        kept = [child for child in children if _probability(p, draft.token_ids[child]) > bound]
        if not kept:
            break
        node = kept[0]
        path.append(node)
    return Verdict(tuple(path), choose(node))


def _probability(p: Distribution, token_id: int) -> float:
    """0 for what is no token of the target's."""
    return float(p[token_id]) if 0 <= token_id < len(p) else 0.0
