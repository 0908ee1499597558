"""How often what a head drafts is what the target answers, by position, on answers that it was not trained on."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from octavo.compiler.draft_training.drafting import eagle_passes
from octavo.compiler.draft_training.examples import Batch, Example, batches
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.medusa import MedusaHeads


class Acceptance(NamedTuple):
    """rates: for each token ahead, the share that was right of those whose ones before were; rows: beginnings tried."""

    rates: tuple[float, ...]
    rows: int

    @property
    def mean_accepted(self) -> float:
        """Tokens of a draft that long that are accepted on average."""
        total = path = 0.0
        for rate in self.rates:
            path = path * rate if total else rate
            total += path
        return total


@torch.no_grad()
def measure(
    head: EagleHead | MedusaHeads, examples: Sequence[Example], depth: int, window: int, size: int
) -> Acceptance:
    """A greedy draft of `depth` tokens from every token of the answers, which are best greedy ones themselves."""
    reached = torch.zeros(depth + 1, dtype=torch.long)
    for batch in batches(examples, window, size, seed=0):
        right = _right(head, batch, depth)
        counts = right[0].shape[1] - depth + 1
        is_alive = torch.stack([batch.is_answer[:, i : i + counts] for i in range(depth)]).all(0)
        reached[0] += is_alive.sum()
        for number in range(depth):
            is_alive = is_alive & right[number][:, :counts]
            reached[number + 1] += is_alive.sum()
    known = reached.tolist()
    rates = tuple(after / before if before else 0.0 for before, after in pairwise(known))
    return Acceptance(rates, known[0])


def _right(head: EagleHead | MedusaHeads, batch: Batch, depth: int) -> list[Tensor]:
    """For each token ahead (B, T - ahead): whether a draft that begins at the row has it right."""
    if isinstance(head, EagleHead):
        guesses = [
            one.logits.argmax(-1)[:, ahead:] for ahead, one in enumerate(eagle_passes(head, batch, depth))
        ]
    else:
        logits = head(batch.token_ids, batch.position_ids, batch.before)
        by_head = logits.unflatten(-1, (head.num_heads, -1)).argmax(-1)
        guesses = [by_head[:, : by_head.shape[1] - ahead, ahead] for ahead in range(depth)]
    ids = head.target_ids
    named = guesses if ids is None else [ids[guess] for guess in guesses]
    return [guess == batch.following[:, ahead:] for ahead, guess in enumerate(named)]
