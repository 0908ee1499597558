"""How probable it is that drafted tokens are accepted, learnt from those that were."""

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from octavo.runtime.request import Branch
from octavo.runtime.speculative.draft import ROOT, Draft

# What a first token is worth before any was verified: enough to try, little enough to stop after a few misses.
FIRST_RATE = 0.6

# Scores are compared with what came of them in this many groups.
_NUM_BINS = 20


class Rates:
    """How often tries of some kinds succeed: counts that fade, beside a prior that counts as `weight` tries.

    decay  how much a try still counts at the next one of its kind: about 1 / (1 - decay) of them are remembered
    """

    def __init__(self, weight: float, decay: float) -> None:
        self._weight = weight
        self._decay = decay
        self._counts: dict[int, tuple[float, float]] = {}  # kind -> (tries, successes)

    def add(self, kind: int, is_success: bool) -> None:
        tries, successes = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = (tries * self._decay + 1, successes * self._decay + is_success)

    def rate(self, kind: int, prior: float) -> float:
        tries, successes = self._counts.get(kind, (0.0, 0.0))
        return (successes + prior * self._weight) / (tries + self._weight)


class _Learnt:
    """Rates by a node's place in its draft, and by its score."""

    def __init__(self, weight: float, decay: float) -> None:
        self.places = Rates(weight, decay)
        self.scores = Rates(weight, decay)

    def add(self, draft: Draft, accepted: Sequence[int], is_cut: bool) -> None:
        last = accepted[-1] if accepted else ROOT
        passed = {ROOT, *accepted}
        for node, parent in enumerate(draft.parents):
            if parent not in passed or (is_cut and parent == last):
                continue
            self.places.add(node, node in passed)
            if draft.scores is not None:
                self.scores.add(_bin(draft.scores[node]), node in passed)


class Acceptance:
    """Of a node: the probability that it is accepted, given that its parent is.

    A branch's own experience of about 20 rounds stands beside that of all branches, of about 200, which counts as 8
    tries. Before a place was tried, it is thought to be like the place before it; a score is believed.
    """

    def __init__(self) -> None:
        self._all = _Learnt(weight=2, decay=0.995)
        self._own: WeakKeyDictionary[Branch, _Learnt] = WeakKeyDictionary()

    def record(self, branch: Branch, draft: Draft, token_ids: Sequence[int], has_ended: bool) -> None:
        """token_ids: what the branch goes on with. has_ended: it ends with the last of them, so that where that was
        drafted nothing is known of what lies behind."""
        accepted = accepted_nodes(draft, token_ids)
        is_cut = has_ended and len(accepted) == len(token_ids)
        own = self._own.get(branch)
        if own is None:
            own = self._own[branch] = _Learnt(weight=8, decay=0.95)
        for learnt in (self._all, own):
            learnt.add(draft, accepted, is_cut)

    def by_place(self, branch: Branch, count: int) -> list[float]:
        """For each of the first `count` nodes of a draft that is not made yet."""
        own = self._own.get(branch)
        rates: list[float] = []
        common = mine = FIRST_RATE
        for place in range(count):
            common = self._all.places.rate(place, common)
            if own is not None:
                mine = own.places.rate(place, (common + mine) / 2 if place else common)
            rates.append(common if own is None else mine)
        return rates

    def by_score(self, branch: Branch, draft: Draft) -> list[float]:
        """For each node of a draft: of its score, or of its place where it has none."""
        if draft.scores is None:
            return self.by_place(branch, len(draft))
        own = self._own.get(branch)
        rates = []
        for score in draft.scores:
            kind = _bin(score)
            rate = self._all.scores.rate(kind, min(max(score, 0.0), 1.0))
            rates.append(rate if own is None else own.scores.rate(kind, rate))
        return rates


def accepted_nodes(draft: Draft, token_ids: Sequence[int]) -> list[int]:
    """The nodes of these tokens, each behind the one before; tokens behind the last node are left out."""
    nodes: list[int] = []
    for token_id in token_ids:
        last = nodes[-1] if nodes else ROOT
        found = [node for node in draft.children(last) if draft.token_ids[node] == token_id]
        if not found:
            break
        nodes.append(found[0])
    return nodes


def path_rates(rates: Sequence[float], parents: Sequence[int]) -> list[float]:
    """For each node: the probability that it and all that lie above it are accepted."""
    products: list[float] = []
    for rate, parent in zip(rates, parents, strict=True):
        products.append(rate if parent == ROOT else rate * products[parent])
    return products


def _bin(score: float) -> int:
    return min(max(int(score * _NUM_BINS), 0), _NUM_BINS - 1)
