"""Which drafted tokens are kept: pure functions of the target p, of q that each token was drawn from, and of noise.

What is emitted, here and in the rounds that follow, is distributed as if p alone had been drawn from, for every draft
whose `probs` are true.

walk           equality coupling: what plain decoding chooses, as long as that was drafted. Whatever the drafts
verify_tokens  one token after the other (Leviathan et al. 2023, Chen et al. 2023); siblings by recursive rejection,
               drawn with replacement (Miao et al. 2024, SpecInfer) or without (Li et al. 2024, EAGLE)
verify_block   a chain as one (Sun et al. 2024, block verification): keeps at least as many
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from octavo.compiler.errors import ExecutionError
from octavo.runtime.sampler import (
    ACCEPT_STREAM,
    RESIDUAL_STREAM,
    RandomKey,
    draw,
    uniform,
)
from octavo.runtime.speculative.draft import ROOT, Distribution, Draft

# The distribution (vocab,) behind a node, after all processing: sums to 1, finite. It is only read.
Target = Callable[[int], Distribution]


class Verdict(NamedTuple):
    """What a branch goes on with.

    path      accepted nodes, each behind the one before
    token_id  what follows the last of them; drafted by nobody, or by a node that was not accepted
    """

    path: tuple[int, ...]
    token_id: int


@dataclass(frozen=True)
class Noise:
    """The random numbers of one round of a branch: each in [0, 1), with 53 bits, independent of all others.

    Depth 0 is that of a draft's first tokens.

    key       the branch's
    position  of tokens at depth 0, in their sequence
    round     how many rounds the branch had; a position that is drafted again gets new numbers
    """

    key: RandomKey
    position: int
    round: int

    def accept(self, depth: int, sibling: int) -> float:
        """Whether a token is accepted, `sibling` others being tried before it at its depth."""
        return uniform(self.key, self.position + depth, ACCEPT_STREAM, self.round, sibling)

    def residual(self, depth: int) -> float:
        """Which token takes the place of those that were not accepted."""
        return uniform(self.key, self.position + depth, RESIDUAL_STREAM, self.round)

    def plain(self, depth: int) -> float:
        """Which token comes where none was drafted: the number that plain decoding draws it with."""
        return uniform(self.key, self.position + depth)


def walk(draft: Draft, choose: Callable[[int], int]) -> Verdict:
    """Follow what plain decoding chooses; `choose` gives its token behind a node, and is asked down the path only."""
    path: list[int] = []
    node = ROOT
    while True:
        token_id = choose(node)
        same = [child for child in draft.children(node) if draft.token_ids[child] == token_id]
        if not same:
            return Verdict(tuple(path), token_id)
        node = same[0]
        path.append(node)


def verify_tokens(draft: Draft, target: Target, noise: Noise) -> Verdict:
    """Any tree: fixed tokens and drawn ones, siblings with and without replacement.

    `target` is asked down the accepted path only. Raises ExecutionError for `probs` that cannot be true.
    """
    path: list[int] = []
    node = ROOT
    while True:
        probs, depth = target(node), len(path)
        if not draft.children(node):
            return Verdict(tuple(path), draw(probs, noise.plain(depth)))
        accepted, left = _try_children(draft, node, probs, noise, depth)
        if accepted is None:
            return Verdict(tuple(path), draw(left, noise.residual(depth)))
        node = accepted
        path.append(node)


def _try_children(
    draft: Draft, node: int, probs: Distribution, noise: Noise, depth: int
) -> tuple[int | None, Distribution]:
    """The first child that is accepted, if any, and what those tried before left of p, not normalised.

    A child is tried against what is left, r: accepted with probability r(x) / q(x), else r becomes max(r - q, 0),
    normalised.
    """
    left, mass = probs, 1.0
    before: list[int] = []  # tokens of siblings that were drawn
    for sibling, child in enumerate(draft.children(node)):
        token_id = draft.token_ids[child]
        drawn_from = _drawn_from(draft, child, before if draft.is_without_replacement else [], len(probs))
        share = 1.0 if drawn_from is None else float(drawn_from[token_id])
        # Strictly below, so that a 0 accepts nothing that p excludes.
        if noise.accept(depth, sibling) * share * mass < _at(left, token_id):
            return child, left
        less = _excess(left, mass, token_id, drawn_from)
        less_mass = _mass(less, child)
        if less_mass > 0:  # else r equals q, and only rounding can have refused its token
            left, mass = less, less_mass
        if drawn_from is not None:
            before.append(token_id)
    return None, left


def verify_block(draft: Draft, target: Target, noise: Noise) -> Verdict:
    """A chain x_1 ... x_K, of which the longest accepted beginning is kept.

    pi_0 = 1, pi_i = min(pi_{i-1} p_i(x_i) / q_i(x_i), 1); Z_i = sum of max(pi_i p_{i+1} - q_{i+1}, 0). A beginning of i
    tokens is accepted with probability h_i = Z_i / (Z_i + 1 - pi_i), h_K = pi_K, and what follows it is drawn from
    max(pi_i p_{i+1} - q_{i+1}, 0), or from p if i = K.

    `target` is asked from ROOT on, and not behind a token that no beginning can be accepted with.
    Noise of the draft may not be used again in another round: this rule looks ahead, so it is biased by that.
    Raises ExecutionError for `probs` that cannot be true.
    """
    assert draft.is_chain, f"block verification: expected a chain, got parents {draft.parents}"
    rows: list[Distribution] = []  # p_1, p_2, ...
    drawn_from: list[Distribution | None] = []  # q_1, q_2, ...
    weights = [1.0]  # pi_0, pi_1, ...
    for node, token_id in enumerate(draft.token_ids):
        rows.append(target(node - 1))
        drawn_from.append(_drawn_from(draft, node, [], len(rows[0])))
        share = 1.0 if (q := drawn_from[node]) is None else float(q[token_id])
        weights.append(min(weights[-1] * _at(rows[node], token_id) / share, 1.0))
        if weights[-1] == 0:
            break
    for length in range(len(weights) - 1, -1, -1):
        weight, path = weights[length], tuple(range(length))
        if length == len(draft):
            if length == 0 or noise.accept(length - 1, 0) < weight:
                return Verdict(path, draw(target(length - 1), noise.plain(length)))
        elif weight > 0:
            left = _excess(weight * rows[length], 1.0, draft.token_ids[length], drawn_from[length])
            mass = _mass(left, length)
            if length == 0 or noise.accept(length - 1, 0) * (mass + 1 - weight) < mass:
                return Verdict(path, draw(left if mass > 0 else rows[length], noise.residual(length)))
    raise AssertionError("a beginning of no tokens is always accepted")


def _drawn_from(draft: Draft, node: int, without: Sequence[int], vocab_size: int) -> Distribution | None:
    """q of a node, None if its token was fixed; of one drawn after siblings, what they left.

    A token that q excludes was not drawn from it. No verdict would be right then, and none would show that it is wrong:
    that is an error. A fixed token outside the vocabulary is harmless: the target does not choose it.
    """
    probs, token_id = draft.probs[node], draft.token_ids[node]
    if probs is None:
        return None
    if len(probs) != vocab_size:
        raise ExecutionError(
            f"draft: expected probabilities of the target's {vocab_size} tokens for node {node}, got {len(probs)}; "
            "scatter those of a smaller vocabulary into the target's ids"
        )
    if without:
        probs = probs.copy()
        probs[without] = 0
        if (mass := probs.sum()) > 0:
            probs /= mass
    if not _at(probs, token_id) > 0:
        left_by = f" without its siblings' tokens {list(without)}" if without else ""
        raise ExecutionError(
            f"draft: expected token {token_id} of node {node} to be drawn from its probs{left_by}, got probability "
            f"{_at(probs, token_id)}; probs must be what the token was really drawn from, after all processing, or None"
        )
    return probs


def _at(probs: Distribution, token_id: int) -> float:
    return float(probs[token_id]) if 0 <= token_id < len(probs) else 0.0


def _excess(left: Distribution, mass: float, token_id: int, drawn_from: Distribution | None) -> Distribution:
    """max(left - mass * q, 0), for q all at one token where it is None."""
    if drawn_from is None:
        less = left.copy()
        if 0 <= token_id < len(less):
            less[token_id] = 0
        return less
    less = mass * drawn_from
    np.subtract(left, less, out=less)
    return np.maximum(less, 0, out=less)


def _mass(left: Distribution, node: int) -> float:
    mass = float(left.sum())
    if not np.isfinite(mass):
        raise ExecutionError(
            f"draft: expected finite probabilities at node {node}, got ones that add up to {mass}"
        )
    return mass
