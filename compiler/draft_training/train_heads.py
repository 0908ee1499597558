"""From answers with hidden states to a trained head: the vocabulary, the head, its loss."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from octavo.compiler.draft_training.examples import Batch, Example
from octavo.compiler.draft_training.losses import eagle_loss, medusa_loss
from octavo.compiler.draft_training.trainer import Loss, Recipe
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.medusa import MedusaHeads

Kind = Literal["eagle", "medusa"]
NUM_HEADS = 4  # of Medusa
RIDGE = 0.03  # of each input's square, added to it
RECIPES = {"eagle": Recipe(1e-3, 128, 8), "medusa": Recipe(1e-3, 128, 8)}

# By the share of the time that is spent: first one step of drafting, which costs least, then more of the head's own.
_PASSES = ((0.5, 1), (0.75, 2), (1.0, 3))


def frequent_ids(
    examples: Sequence[Example], always: Sequence[int], count: int, vocab_size: int
) -> Tensor | None:
    """The `count` most frequent tokens of the answers as ascending ids; those of `always` are among them, and low ids
    fill up what answers do not. None: the whole vocabulary."""
    if count >= vocab_size:
        return None
    found = Counter(token for one in examples for token in one.token_ids[one.prompt_len :].tolist())
    ranked = [*always, *(token for token, _ in sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))]
    chosen = list(dict.fromkeys([*ranked, *range(vocab_size)]))[:count]
    return torch.tensor(sorted(chosen))


def new_head(
    kind: Kind, model: nn.Module, draft_ids: Tensor | None, examples: Sequence[Example]
) -> EagleHead | MedusaHeads:
    """A head that begins as near to the target as it can."""
    if kind == "medusa":
        return MedusaHeads.for_target(model, NUM_HEADS, draft_ids)
    head = EagleHead.for_target(model, draft_ids)
    begin_at_regression(head, examples)
    return head


@torch.no_grad()
def begin_at_regression(head: EagleHead, examples: Sequence[Example]) -> None:
    """Let a fresh head guess hidden states by the best affine map of what it reads, and its layers add nothing yet.

    The map is in closed form (ridge regression), so that some thousand tokens go far: training needs many passes over
    them to come to the same, and most of what a small head ever knows is in it.
    """
    width = head.fc.out_features
    square = torch.zeros(2 * width + 1, 2 * width + 1, dtype=torch.float64)
    product = torch.zeros(2 * width + 1, width, dtype=torch.float64)
    for one in examples:
        read = torch.cat([head.embed_tokens(one.token_ids[1:]), one.features[:-1]], dim=1)
        read = torch.cat([read, torch.ones(len(read), 1)], dim=1)
        square += (read.T @ read).double()
        product += (read.T @ one.features[1:]).double()
    square += torch.diag(square.diagonal() * RIDGE + 1e-9)
    solved = torch.linalg.solve(square, product).float()
    head.fc.weight.copy_(solved[:-1].T)
    head.fc.bias.copy_(solved[-1])
    spread = torch.cat([one.features for one in examples[:64]]).std()
    for layer in head.layers:
        for name, parameter in layer.named_parameters():
            if name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
                parameter.zero_()
    # The first layer has no norm: its products must not see numbers as large as hidden states are.
    for name, parameter in head.layers[0].named_parameters():
        if name in ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"):
            parameter.div_(spread)


def loss_of(head: EagleHead | MedusaHeads, vocab_size: int) -> Loss:
    """What the trainer calls."""
    if isinstance(head, EagleHead):

        def of_eagle(batch: Batch, share: float) -> Tensor:
            return eagle_loss(head, batch, next(count for end, count in _PASSES if share <= end))

        return of_eagle
    ids = torch.arange(vocab_size) if head.target_ids is None else head.target_ids
    places = torch.full((vocab_size,), -1)
    places[ids] = torch.arange(len(ids))

    def of_medusa(batch: Batch, _: float) -> Tensor:
        return medusa_loss(head, batch, places)

    return of_medusa
