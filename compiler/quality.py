"""How far a quantised graph is from the model: KL divergence and agreement on calibration tokens that were held out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.calibration import HELD_OUT_PART
from octavo.compiler.replay import Replay

# Tokens that are compared, and the most of one sequence.
HELD_OUT_TOKENS, HELD_OUT_LENGTH = 256, 128
FEWEST_TOKENS = 16  # compared also where so few tokens leave none to hold out


@dataclass(frozen=True)
class Quality:
    """kl: mean divergence of the next token's distribution from the model's, nats; top1: share of equal likeliest ones.

    The standard error of the mean of kl, from the differences between tokens, is kl_error.
    """

    tokens: int
    kl: float
    kl_error: float
    top1: float


class Distribution:
    """Of the next token, at each of some tokens, by a model's logits (tokens, vocabulary)."""

    def __init__(self, logits: Tensor) -> None:
        self.logs = logits.log_softmax(-1)
        self.best = logits.argmax(-1)

    def kl(self, logits: Tensor) -> Tensor:
        """Divergence from this to those of other logits, by token (tokens,), in nats, fp64."""
        terms = self.logs.exp() * (self.logs - logits.log_softmax(-1))
        return terms.sum(-1, dtype=torch.float64).clamp(min=0.0)

    def compare(self, logits: Tensor) -> Quality:
        kl, count = self.kl(logits), len(self.best)
        error = float(kl.std()) / count**0.5 if count > 1 else 0.0
        top1 = float((logits.argmax(-1) == self.best).double().mean())
        return Quality(count, float(kl.mean()), error, top1)


def held_out(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """The last HELD_OUT_TOKENS of those that calibration held out, in pieces; nothing is made static of them."""
    tokens = sum(map(len, sequences))
    wanted = min(max(tokens // HELD_OUT_PART, min(tokens, FEWEST_TOKENS)), HELD_OUT_TOKENS)
    pieces: list[list[int]] = []
    for sequence in reversed(sequences):
        part = list(sequence[-wanted:]) if wanted else []
        wanted -= len(part)
        pieces += [part[start : start + HELD_OUT_LENGTH] for start in range(0, len(part), HELD_OUT_LENGTH)]
    return pieces


def perplexity(logs: Tensor, pieces: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-likelihood of tokens behind another, by log-probabilities (tokens, vocabulary)."""
    ids = torch.tensor([token for piece in pieces for token in piece])
    starts = torch.tensor([0, *map(len, pieces)]).cumsum(0)[:-1]
    follows = torch.ones(len(ids), dtype=torch.bool)
    follows[starts[starts < len(ids)]] = False
    rows = follows.nonzero()[:, 0]
    return float(logs[rows - 1, ids[rows]].double().mean().neg().exp())


def judge(
    reference: Distribution, graph_module: GraphModule, pieces: Sequence[Sequence[int]], page_size: int
) -> Quality:
    """A quantised graph, run by its ops' own references, beside what it was before."""
    return reference.compare(Replay(graph_module, pieces, page_size).reference())
