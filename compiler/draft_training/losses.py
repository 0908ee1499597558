"""How far a head is from its target."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from octavo.compiler.draft_training.drafting import eagle_passes
from octavo.compiler.draft_training.examples import Batch
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.medusa import MedusaHeads

# A pass, or a head, further ahead counts this much of the one before: it matters only when that was right.
DEPTH_DECAY = 0.8

# Of the regression of hidden states beside the distributions (EAGLE-1).
FEATURE_WEIGHT = 0.1


def eagle_loss(head: EagleHead, batch: Batch, num_passes: int) -> Tensor:
    """Mean over the answers' rows: cross-entropy to the target's distribution over the head's vocabulary, and the
    smooth L1 distance of hidden states in units of their spread."""
    with torch.no_grad():
        wanted = head.lm_head(batch.features).softmax(-1)
        spread = batch.features[batch.is_answer].std() + 1e-6
    total, weight = torch.zeros(()), 0.0
    for number, one in enumerate(eagle_passes(head, batch, num_passes)):
        counted = batch.is_answer.clone()
        counted[:, :number] = False  # their features came from outside of the window
        entropy = -(wanted * one.logits.log_softmax(-1)).sum(-1)[counted].mean()
        distance = functional.smooth_l1_loss(one.hidden[counted] / spread, batch.features[counted] / spread)
        total = total + DEPTH_DECAY**number * (entropy + FEATURE_WEIGHT * distance)
        weight += DEPTH_DECAY**number
    return total / weight


def medusa_loss(heads: MedusaHeads, batch: Batch, places: Tensor) -> Tensor:
    """Mean cross-entropy of the tokens that followed, where the heads have them; head i counts DEPTH_DECAY ** i.

    places  (vocab,) i64: where in the heads' vocabulary a token is; -1: it is not
    """
    logits = heads(batch.token_ids, batch.position_ids, batch.before).unflatten(-1, (heads.num_heads, -1))
    total, weight = torch.zeros(()), 0.0
    for number in range(heads.num_heads):
        count = batch.following.shape[1] - number
        wanted = places[batch.following[:, number:]].masked_fill(~batch.is_answer[:, number:], -1)
        losses = nn.functional.cross_entropy(
            logits[:, :count, number].flatten(0, 1), wanted.flatten(), ignore_index=-1
        )
        if bool((wanted >= 0).any()):
            total = total + DEPTH_DECAY**number * losses
            weight += DEPTH_DECAY**number
    return total / max(weight, 1e-6)
