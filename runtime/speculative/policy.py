"""How many tokens are drafted, and how many of them verified: as many as make most tokens a second."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from octavo.runtime.request import Branch
from octavo.runtime.speculative.acceptance import Acceptance, path_rates
from octavo.runtime.speculative.draft import NO_DRAFT, ROOT, Draft
from octavo.runtime.speculative.step_times import Curve, Times, flat_then_linear, linear

# A drafted token before drafting was measured, as a share of a step of one token.
DRAFT_SHARE = 0.05

# Of all time at most this share goes to drafts that do not pay by what is known, to learn whether they do now.
PROBE_SHARE = 0.005

# After this many steps with drafts and none without, one without is run: what it takes is what drafts compete with.
MAX_AGE = 256

# Drafting so cheap that as much as possible is drafted and cut afterwards, when scores are known.
FREE_SHARE = 0.005


class Policy(Protocol):
    """Called in each step that has branches to draft for, in this order."""

    def lengths(self, branches: Sequence[Branch], num_known: int) -> list[int]:
        """For each branch how many nodes its draft may have; 0: none is asked for.

        num_known  tokens of the step without drafts: the newest of each of these branches, and those of others
        """
        ...

    def drafted(self, num_asked: int, seconds: float) -> None:
        """Drafts were made. num_asked: the nodes that they might have had, together."""
        ...

    def trim(self, branches: Sequence[Branch], drafts: Sequence[Draft], num_known: int) -> list[Draft]:
        """The drafts of the same branches, NO_DRAFT where none came, without what is not worth verifying."""
        ...

    def timed(self, num_tokens: int, seconds: float) -> None:
        """A step ran in which every chunk was one newest token and its draft. Other steps do not count."""
        ...

    def record(self, branch: Branch, draft: Draft, token_ids: Sequence[int], has_ended: bool) -> None:
        """A draft was verified. token_ids: what its branch goes on with. has_ended: the branch ends with the last of
        them."""
        ...


class FixedLength:
    """Always as many nodes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def lengths(self, branches: Sequence[Branch], num_known: int) -> list[int]:
        return [self.length] * len(branches)

    def drafted(self, num_asked: int, seconds: float) -> None:
        pass

    def trim(self, branches: Sequence[Branch], drafts: Sequence[Draft], num_known: int) -> list[Draft]:
        return list(drafts)

    def timed(self, num_tokens: int, seconds: float) -> None:
        pass

    def record(self, branch: Branch, draft: Draft, token_ids: Sequence[int], has_ended: bool) -> None:
        pass


class Choice(NamedTuple):
    """nodes: for each branch, ascending. tokens_per_second: expected of a step of these branches alone."""

    nodes: list[list[int]]
    tokens_per_second: float


def choose(
    rates: Sequence[Sequence[float]],
    step_seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    draft_seconds: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    other_tokens: int = 0,
    most: int | None = None,
) -> Choice:
    """The nodes, of all branches', that make most tokens a second; of equal choices the one of fewest.

    rates          of each branch: for each node that it may have, the probability that it and all above it are accepted
    step_seconds   (n,) tokens of a step -> (n,); draft_seconds: (n,) nodes, from 0 on -> (n,)
    other_tokens   of the step, which make no tokens; in a step that has some, a node must bring as much for its time as
                   all do in a step without, for that is when it would be generated otherwise
    most           nodes together; None: all

    Exact for any times that depend on counts alone: no node is likelier than the one above it, so that the best n
    nodes are the likeliest n, and each n is tried.
    """
    flat = np.array([rate for own in rates for rate in own])
    order = np.argsort(-flat, kind="stable")[:most]
    counts = np.arange(len(order) + 1, dtype=np.float64)
    expected = len(rates) + np.concatenate([np.zeros(1), np.cumsum(flat[order])])
    drafting = draft_seconds(counts)
    speeds = expected / (step_seconds(counts + len(rates)) + drafting)
    count = int(speeds.argmax())
    best = float(speeds[count])
    if other_tokens:
        seconds = step_seconds(counts + len(rates) + other_tokens) + drafting
        count = int((expected - best * seconds).argmax())
    edges = np.cumsum([len(own) for own in rates])
    chosen: list[list[int]] = [[] for _ in rates]
    for place in np.sort(order[:count]).tolist():
        branch = int(np.searchsorted(edges, place, side="right"))
        chosen[branch].append(place - int(edges[branch]) + len(rates[branch]))
    return Choice(chosen, best)


class Adaptive:
    """Chooses lengths by what is known of times and acceptance, and keeps learning both.

    Drafts that nothing random chose are cut again when their scores are known. Sampled ones are not: what is dropped
    because of its value is missing from the distribution.

    most    nodes of a draft
    curve   seconds of steps by their tokens, if an artifact brings them
    """

    def __init__(self, most: int, curve: Curve | None = None) -> None:
        self._most = most
        self._steps = Times(flat_then_linear if curve is None else curve, is_absolute=curve is not None)
        self._has_curve = curve is not None
        self._drafts = Times(linear)
        self._acceptance = Acceptance()
        self._parents: tuple[int, ...] = ()  # of the last draft: what the next is thought to look like
        self._cuts = False  # whether the last draft could be cut by its scores
        self._budget = 0.0  # seconds for probes
        self._probed: WeakKeyDictionary[Branch, int] = WeakKeyDictionary()
        self._num_probes = 0
        self._probing: Branch | None = None

    def lengths(self, branches: Sequence[Branch], num_known: int) -> list[int]:
        self._probing = None
        self._steps.tick()
        self._drafts.tick()
        if not branches:
            return []
        others = num_known - len(branches)
        age = self._steps.age(len(branches))
        if not self._steps.is_known or (others == 0 and age is not None and age > MAX_AGE):
            return [0] * len(branches)
        if self._cuts and self._is_free(len(branches)):
            return [self._most] * len(branches)
        parents = self._shape()
        rates = [path_rates(self._acceptance.by_place(branch, self._most), parents) for branch in branches]
        choice = choose(
            rates, self._steps.seconds, self._draft_seconds, others, self._new_sizes(len(branches))
        )
        return [len(nodes) for nodes in self._with_probe(branches, choice, rates, self._draft_seconds)]

    def drafted(self, num_asked: int, seconds: float) -> None:
        self._drafts.observe(num_asked, seconds)
        self._budget += PROBE_SHARE * seconds

    def trim(self, branches: Sequence[Branch], drafts: Sequence[Draft], num_known: int) -> list[Draft]:
        made = [draft for draft in drafts if len(draft)]
        if not made:
            return list(drafts)
        self._parents = max((draft.parents for draft in made), key=len)
        self._cuts = all(draft.is_fixed and draft.scores is not None for draft in made)
        if not self._cuts:
            return list(drafts)
        rates = [
            path_rates(self._acceptance.by_score(branch, draft), draft.parents)
            for branch, draft in zip(branches, drafts, strict=True)
        ]
        choice = choose(
            rates,
            self._steps.seconds,
            np.zeros_like,
            num_known - len(branches),
            self._new_sizes(len(branches)),
        )
        nodes = self._with_probe(branches, choice, rates, np.zeros_like)
        return [only(draft, kept) for draft, kept in zip(drafts, nodes, strict=True)]

    def timed(self, num_tokens: int, seconds: float) -> None:
        self._steps.observe(num_tokens, seconds)
        self._budget += PROBE_SHARE * seconds

    def record(self, branch: Branch, draft: Draft, token_ids: Sequence[int], has_ended: bool) -> None:
        self._acceptance.record(branch, draft, token_ids, has_ended)

    def _draft_seconds(self, counts: NDArray[np.float64]) -> NDArray[np.float64]:
        if not self._drafts.is_known:
            return counts * DRAFT_SHARE * self._steps.seconds(np.ones(1))
        return self._drafts.seconds(counts)

    def _new_sizes(self, num_branches: int) -> int | None:
        """How many nodes may be tried: where nothing but measurements tells times, up to twice the largest size."""
        return None if self._has_curve else max(2 * self._steps.largest - num_branches, 0)

    def _is_free(self, num_branches: int) -> bool:
        most = np.array([self._most * num_branches], np.float64)
        step = self._steps.seconds(np.array([num_branches], np.float64))
        return self._drafts.is_known and bool(self._draft_seconds(most) <= FREE_SHARE * step)

    def _shape(self) -> list[int]:
        """Parents of the nodes of a draft of most nodes."""
        known = list(self._parents[: self._most])
        return known + list(range(len(known) - 1, self._most - 1))

    def _with_probe(
        self, branches: Sequence[Branch], choice: Choice, rates: Sequence[Sequence[float]], drafting: Curve
    ) -> list[list[int]]:
        """With one node more that does not pay by what is known, if the budget has the time that it loses.

        It goes to the branch without any that has waited longest, so that a change of its text is noticed; else to
        where it is likeliest, if steps of that size are little known.
        """
        nodes = choice.nodes
        if self._probing is not None:  # its draft came
            return [
                own or [0][: len(rate)] if branch is self._probing else own
                for branch, own, rate in zip(branches, nodes, rates, strict=True)
            ]
        num_nodes = sum(map(len, nodes))
        idle = [i for i, own in enumerate(nodes) if rates[i] and not own]
        if idle:
            chosen = min(idle, key=lambda i: self._probed.get(branches[i], -1))
        else:
            chosen = max(range(len(nodes)), key=lambda i: _next_rate(rates[i], nodes[i]))
            if self._steps.is_sure(len(branches) + num_nodes + 1):
                return nodes
        rate = _next_rate(rates[chosen], nodes[chosen])
        steps = self._steps.seconds(np.array([num_nodes, num_nodes + 1], np.float64) + len(branches))
        drafts = drafting(np.array([num_nodes, num_nodes + 1], np.float64))
        loss = float(np.diff(steps + drafts)[0]) - rate / choice.tokens_per_second
        if rate == 0 or loss > self._budget:
            return nodes
        self._budget -= max(loss, 0.0)
        self._num_probes += 1
        self._probed[branches[chosen]] = self._num_probes
        self._probing = branches[chosen]
        more = [node for node in range(len(rates[chosen])) if node not in nodes[chosen]]
        added = max(more, key=lambda node: rates[chosen][node])
        return [sorted([*own, added]) if i == chosen else own for i, own in enumerate(nodes)]


def _next_rate(rates: Sequence[float], nodes: Sequence[int]) -> float:
    """Of the likeliest node that was not chosen; 0 where there is none."""
    return max((rate for node, rate in enumerate(rates) if node not in nodes), default=0.0)


def only(draft: Draft, nodes: Sequence[int]) -> Draft:
    """Of a draft some of its nodes, ascending, each with all that lie above it."""
    if len(nodes) == len(draft):
        return draft
    if not nodes:
        return NO_DRAFT
    places = {ROOT: ROOT, **{node: place for place, node in enumerate(nodes)}}
    return Draft(
        tuple(draft.token_ids[node] for node in nodes),
        tuple(places[draft.parents[node]] for node in nodes),
        tuple(draft.probs[node] for node in nodes),
        draft.is_without_replacement,
        None if draft.scores is None else tuple(draft.scores[node] for node in nodes),
    )
