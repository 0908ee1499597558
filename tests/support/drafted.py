"""Small worlds in which everything that speculation can do is enumerated: its law comes out exactly.

Nothing here knows how verification decides. A function is asked with every random number that makes a difference:
each number's range is cut, by bisection, where what the function does next changes, and the cuts give the weights.
"""

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import numpy as np

from octavo.runtime.sampler import RandomKey, draw
from octavo.runtime.speculative.draft import NO_DRAFT, ROOT, Distribution, Draft
from octavo.runtime.speculative.verify import Noise, Target, Verdict, walk

Tokens = tuple[int, ...]
Verify = Callable[[Draft, Target, Noise], Verdict]
_WIDTH = 2.0**-46  # of the last interval of a bisection
_FIRST_POINTS = np.append(np.linspace(0, 1, 6)[:-1], 1 - 2.0**-53).tolist()


@dataclass(frozen=True)
class World:
    """The target's and the proposer's distributions behind every beginning of a sequence.

    num_zero  tokens that each distribution excludes
    """

    vocab_size: int
    seed: int
    num_zero: int = 0

    @cache  # noqa: B019 - a world is small and lives as long as its test
    def target(self, tokens: Tokens) -> Distribution:
        return self._random(0, tokens)

    @cache  # noqa: B019
    def proposer(self, tokens: Tokens) -> Distribution:
        return self._random(1, tokens)

    def _random(self, kind: int, tokens: Tokens) -> Distribution:
        rng = np.random.default_rng([self.seed, kind, len(tokens), *tokens])
        probs = rng.dirichlet(np.ones(self.vocab_size))
        probs[rng.permutation(self.vocab_size)[: self.num_zero]] = 0
        result: Distribution = probs / probs.sum()
        return result


@dataclass(frozen=True)
class Shape:
    """Of a draft: what lies behind what, which nodes a rule chooses, and how the others were drawn.

    is_told_exactly  probs of a sibling drawn without replacement leave out its siblings' tokens, as the draw did;
                     otherwise they are those of all siblings
    """

    parents: tuple[int, ...]
    fixed: frozenset[int] = frozenset()
    is_without_replacement: bool = False
    is_told_exactly: bool = True

    def first(self, count: int) -> "Shape":
        return dataclasses.replace(self, parents=self.parents[:count])


def chain_of(count: int, *fixed: int) -> Shape:
    return Shape(tuple(range(-1, count - 1)), frozenset(fixed))


def path_to(parents: Tokens, token_ids: Tokens, node: int) -> Tokens:
    """The tokens from the draft's beginning to a node."""
    return () if node == ROOT else (*path_to(parents, token_ids, parents[node]), token_ids[node])


def every_draft(
    world: World, shape: Shape, before: Tokens, so_far: Draft = NO_DRAFT
) -> Iterator[tuple[Draft, float]]:
    """What can be drafted behind the tokens `before`, with its probability."""
    node = len(so_far)
    if node == len(shape.parents):
        yield so_far, 1.0
        return
    above = before + path_to(shape.parents, so_far.token_ids, shape.parents[node])
    probs = world.proposer(above)
    options: list[tuple[int, float, Distribution | None]]
    if node in shape.fixed:
        options = [((len(above) + 2 * node) % world.vocab_size, 1.0, None)]  # any rule will do
    else:
        told = drawn = probs
        if shape.is_without_replacement:
            drawn = probs.copy()
            drawn[[so_far.token_ids[i] for i in _drawn_before(shape, node)]] = 0
            drawn = drawn / drawn.sum()
            told = drawn if shape.is_told_exactly else probs
        options = [(token, float(drawn[token]), told) for token in np.flatnonzero(drawn).tolist()]
    for token, share, told_probs in options:
        more = Draft(
            (*so_far.token_ids, token),
            shape.parents[: node + 1],
            (*so_far.probs, told_probs),
            shape.is_without_replacement,
        )
        for draft, rest in every_draft(world, shape, before, more):
            yield draft, share * rest


def _drawn_before(shape: Shape, node: int) -> list[int]:
    siblings = [i for i in range(node) if shape.parents[i] == shape.parents[node]]
    return [i for i in siblings if i not in shape.fixed]


class _Asked(Exception):
    """For a number that is not given; what it is for says how far the function came."""


class Given(Noise):
    """Numbers in the order in which they are asked for."""

    def __init__(self, points: tuple[float, ...]) -> None:
        super().__init__(RandomKey(0, 0), 0, 0)
        object.__setattr__(self, "_points", list(points))

    def _next(self, *purpose: object) -> float:
        points: list[float] = self.__dict__["_points"]
        if not points:
            raise _Asked(*purpose)
        return points.pop(0)

    def accept(self, depth: int, sibling: int) -> float:
        return self._next("accept", depth, sibling)

    def residual(self, depth: int) -> float:
        return self._next("residual", depth)

    def plain(self, depth: int) -> float:
        return self._next("plain", depth)


def law(
    run: Callable[[Noise], Verdict], points: tuple[float, ...] = (), weight: float = 1.0
) -> dict[Verdict, float]:
    """How probable each verdict is, given the first numbers."""

    def came_to(*more: float) -> object:
        try:
            return run(Given((*points, *more)))
        except _Asked as asked:
            return asked.args

    result = came_to()
    if isinstance(result, Verdict):
        return {result: weight}
    total: dict[Verdict, float] = defaultdict(float)
    for start, end in _pieces(came_to):
        for verdict, share in law(run, (*points, (start + end) / 2), weight * (end - start)).items():
            total[verdict] += share
    return total


def _pieces(came_to: Callable[[float], object]) -> Iterator[tuple[float, float]]:
    """The intervals of [0, 1) in each of which the function does the same."""
    cuts = [0.0]
    known = [(point, came_to(point)) for point in _FIRST_POINTS]
    for left, right in pairwise(known):
        cuts += _cuts(came_to, left, right)
    cuts.append(1.0)
    return pairwise(cuts)


def _cuts(
    came_to: Callable[[float], object], left: tuple[float, object], right: tuple[float, object]
) -> list[float]:
    if left[1] == right[1]:
        return []
    point = (left[0] + right[0]) / 2
    if right[0] - left[0] < _WIDTH:
        return [point]
    middle = point, came_to(point)
    return _cuts(came_to, left, middle) + _cuts(came_to, middle, right)


def round_law(world: World, shape: Shape, verify: Verify, before: Tokens) -> dict[Tokens, float]:
    """How probable each run of emitted tokens is, in one round behind `before`."""
    total: dict[Tokens, float] = defaultdict(float)
    for draft, weight in every_draft(world, shape, before):

        def target(node: int, draft: Draft = draft) -> Distribution:
            return world.target(before + path_to(draft.parents, draft.token_ids, node))

        def run(noise: Noise, draft: Draft = draft, target: Target = target) -> Verdict:
            return verify(draft, target, noise)

        for verdict, share in law(run).items():
            accepted = tuple(draft.token_ids[node] for node in verdict.path)
            total[(*accepted, verdict.token_id)] += weight * share
    return total


def plain_round(draft: Draft, target: Target, noise: Noise) -> Verdict:
    """Plain decoding."""
    return Verdict((), draw(target(ROOT), noise.plain(0)))


def coupled(draft: Draft, target: Target, noise: Noise) -> Verdict:
    """The equality coupling."""

    def choose(node: int) -> int:
        return draw(target(node), noise.plain(0 if node == ROOT else draft.depth(node) + 1))

    return walk(draft, choose)


def sequence_law(
    world: World, verifies: Callable[[Tokens], tuple[Shape, Verify]], length: int, before: Tokens = ()
) -> dict[Tokens, float]:
    """How probable each sequence of `length` tokens is, of rounds that `verifies` gives for what was emitted before."""
    total: dict[Tokens, float] = defaultdict(float)
    shape, verify = verifies(before)
    for emitted, weight in round_law(world, shape, verify, before).items():
        tokens = (before + emitted)[:length]
        rest = {tokens: 1.0} if len(tokens) == length else _rest(world, verifies, length, tokens)
        for sequence, share in rest.items():
            total[sequence] += weight * share
    return total


@cache
def _rest(
    world: World, verifies: Callable[[Tokens], tuple[Shape, Verify]], length: int, before: Tokens
) -> dict[Tokens, float]:
    return sequence_law(world, verifies, length, before)


def true_law(world: World, length: int) -> dict[Tokens, float]:
    """Of plain decoding: products of p."""
    laws: dict[Tokens, float] = {(): 1.0}
    for _ in range(length):
        laws = {
            (*tokens, token): weight * share
            for tokens, weight in laws.items()
            for token, share in enumerate(world.target(tokens).tolist())
        }
    return laws


def total_variation(one: dict[Tokens, float], other: dict[Tokens, float]) -> float:
    return sum(abs(one.get(key, 0.0) - other.get(key, 0.0)) for key in {*one, *other}) / 2
