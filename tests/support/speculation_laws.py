"""How probable it is that a round accepts so many tokens and goes on with such a one, written down from the rules.

No random number occurs here: each rule is a law of (number accepted, next token), of the target's p and the proposer's
q behind every beginning. A law is an array (most accepted + 1, vocab).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from drafted import Shape, Tokens
from numpy.typing import NDArray

from octavo.runtime.speculative.draft import ROOT, Distribution

Law = NDArray[np.float64]
Behind = Callable[[Tokens], Distribution]


@dataclass(frozen=True)
class Drafts:
    """How drafts come about.

    p, q       (vocab,) behind the tokens that were drafted or emitted so far
    shape      of all drafts
    fixed      the token of a fixed node behind others
    ends       whether a chain ends behind these drafted tokens
    """

    p: Behind
    q: Behind
    shape: Shape
    fixed: Callable[[int, Tokens], int]
    ends: Callable[[Tokens], bool] = lambda tokens: False

    def new_law(self) -> Law:
        depths: dict[int, int] = {ROOT: 0}
        for node, parent in enumerate(self.shape.parents):
            depths[node] = depths[parent] + 1
        return np.zeros((max(depths.values()) + 1, len(self.p(()))))

    def children(self, node: int, tokens: Tokens) -> list[int]:
        if self.ends(tokens):
            return []
        return [child for child, parent in enumerate(self.shape.parents) if parent == node]


def law_of_tokens(drafts: Drafts) -> Law:
    """Token after token, each sibling against what those before it left."""
    law = drafts.new_law()

    def behind(node: int, tokens: Tokens, weight: float) -> None:
        if weight > 0:
            siblings(drafts.children(node, tokens), tokens, drafts.p(tokens), weight, ())

    def siblings(nodes: Sequence[int], tokens: Tokens, r: Distribution, weight: float, drawn: Tokens) -> None:
        if not nodes:
            law[len(tokens)] += weight * r
            return
        node, others = nodes[0], nodes[1:]
        if node in drafts.shape.fixed:
            token = drafts.fixed(node, tokens)
            behind(node, (*tokens, token), weight * float(r[token]))
            rest = np.where(np.arange(len(r)) == token, 0, r)
            if (mass := float(rest.sum())) > 0:
                siblings(others, tokens, rest / mass, weight * mass, drawn)
            return
        q = drafts.q(tokens).copy()
        if drafts.shape.is_without_replacement:
            q[list(drawn)] = 0
            q /= q.sum()
        both, rest = np.minimum(r, q), np.maximum(r - q, 0)
        for token in np.flatnonzero(q).tolist():
            behind(node, (*tokens, token), weight * float(both[token]))
        if (mass := float(rest.sum())) == 0:
            return
        if not drafts.shape.is_without_replacement:
            siblings(others, tokens, rest / mass, weight * mass, drawn)
            return
        for token in np.flatnonzero(q > both).tolist():
            siblings(others, tokens, rest / mass, weight * float(q[token] - both[token]), (*drawn, token))

    behind(ROOT, (), 1.0)
    return law


def law_of_blocks(drafts: Drafts) -> Law:
    """A chain's beginning x with weight pi(x), where pi(x y) = min(pi(x) p(y) / q(y), 1), is kept, or a longer one, in
    the share pi(x) of cases; what follows it if no longer one is kept has max(pi(x) p - q, 0)."""
    law = drafts.new_law()

    def behind(node: int, tokens: Tokens, drawn: float, pi: float) -> None:
        children = drafts.children(node, tokens)
        p = drafts.p(tokens)
        if not children:
            law[len(tokens)] += drawn * pi * p
            return
        q = drafts.q(tokens)
        law[len(tokens)] += drawn * np.maximum(pi * p - q, 0)
        for token in np.flatnonzero(q).tolist():
            next_pi = min(pi * float(p[token]) / float(q[token]), 1.0)
            behind(children[0], (*tokens, token), drawn * float(q[token]), next_pi)

    behind(ROOT, (), 1.0, 1.0)
    return law


def law_of_coupling(drafts: Drafts) -> Law:
    """The target's own draw, as long as the one drafted token is the same. A draft that was drawn was drawn by the same
    number: p and q, laid out by token id on [0, 1), agree where a token's two intervals overlap."""
    law = drafts.new_law()

    def behind(node: int, tokens: Tokens, weight: float) -> None:
        p, children = drafts.p(tokens), drafts.children(node, tokens)
        both = np.zeros(len(p))
        if children and children[0] in drafts.shape.fixed:
            token = drafts.fixed(children[0], tokens)
            both[token] = p[token]
        elif children:
            p_ends, q_ends = np.cumsum(p), np.cumsum(drafts.q(tokens))
            p_starts, q_starts = np.append(0, p_ends[:-1]), np.append(0, q_ends[:-1])
            both = np.maximum(np.minimum(p_ends, q_ends) - np.maximum(p_starts, q_starts), 0)
        law[len(tokens)] += weight * (p - both)
        for token in np.flatnonzero(both).tolist():
            behind(children[0], (*tokens, token), weight * float(both[token]))

    behind(ROOT, (), 1.0)
    return law
