"""A head's own drafting, many rows at once: pass k is what it guesses of a token that lies k behind the last known."""

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.compiler.draft_training.examples import Batch
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.head import product_of_parts


class Pass(NamedTuple):
    """logits (B, T, V_d) of the token behind each row's, and the head's hidden states (B, T, H)."""

    logits: Tensor
    hidden: Tensor


def eagle_passes(head: EagleHead, batch: Batch, count: int) -> list[Pass]:
    """The first `count` steps of drafting from every row at once, with the batch's own tokens as what was drafted.

    In pass k a row's features are the head's own of pass k - 1, of the row before it. It attends to itself, to the row
    before it in pass k - 1, that before in pass k - 2, and so on, and to all before those in the first pass, as a head
    does that drafts, and so learns of its own mistakes: as in HASS (Zhang et al. 2024) and EAGLE-3 (Li et al. 2025).
    No gradient goes through features.
    """
    features = batch.before
    inputs = [features]
    for done in range(1, count):
        with torch.no_grad():
            hidden = _run(head, batch, inputs)[:, -features.shape[1] :]
        # The row before a window's first is not there: the target's own features stand in.
        inputs.append(torch.cat([features[:, :1], hidden[:, :-1]], dim=1))
        assert len(inputs) == done + 1
    hidden = _run(head, batch, inputs)
    parts = hidden.chunk(count, dim=1)
    return [Pass(head.lm_head(part), part) for part in parts]


def _run(head: EagleHead, batch: Batch, inputs: list[Tensor]) -> Tensor:
    """Hidden states (B, K * T, H) of K passes whose features are given."""
    count, length = len(inputs), batch.token_ids.shape[1]
    embedded = head.embed_tokens(batch.token_ids).repeat(1, count, 1)
    hidden = product_of_parts(head.fc, (embedded, torch.cat(inputs, dim=1)))
    position_ids = batch.position_ids.repeat(1, count)
    angles = head.rotary_emb(hidden, position_ids)
    mask = pass_mask(count, length)[None, None] if count > 1 else None
    for layer in head.layers:
        hidden = layer(hidden, attention_mask=mask, position_embeddings=angles, position_ids=position_ids)
    return hidden


def pass_mask(count: int, length: int) -> Tensor:
    """(K * T, K * T) bool: which rows of all passes each may attend to."""
    row = torch.arange(length).repeat(count)
    number = torch.arange(count).repeat_interleave(length)
    distance = row[:, None] - row[None]
    # Key rows of a later pass than the first lie on the diagonal through the query; those of the first behind it.
    is_drafted = (distance == number[:, None] - number[None]) & (number[None] > 0) & (distance >= 0)
    is_known = (number[None] == 0) & (distance >= number[:, None])
    return is_drafted | is_known
