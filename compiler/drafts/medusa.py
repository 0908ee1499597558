"""Medusa (Cai et al. 2024): heads that each guess a token further ahead, from the target's last hidden state alone."""

from typing import Any

import torch
from torch import Tensor, nn

import octavo.compiler.ops  # noqa: F401  (registers octavo::head_linear)
from octavo.compiler.drafts.head import DraftHead, check_ids, logits_of
from octavo.compiler.errors import OptionError
from octavo.compiler.hidden_states import LAST


class MedusaHeads(DraftHead):
    """Head i: residual blocks x + silu(W x + b), then a last product. No attention: a row stands for itself.

    Row j's features are those of token j - 1, so head i = 0, 1, ... guesses token j + 1 + i. Logits are those of all
    heads in order, (1, T, num_heads * V_d). All heads' weights lie in one tensor of each kind:
    blocks[k] (num_heads, H, H), biases[k] (num_heads, H), vocab (num_heads, V_d, H).
    """

    draft_kind = "medusa"

    def __init__(
        self, num_heads: int, num_layers: int, width: int, vocab_size: int, max_model_len: int,
        target_ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """vocab_size: the target's."""
        if min(num_heads, num_layers) < 1:
            raise OptionError(
                f"medusa: expected 1 head and 1 block or more, got {num_heads} and {num_layers}"
            )
        super().__init__((LAST,), width, max_model_len, target_ids)
        self.num_heads = num_heads
        self.target_vocab_size = vocab_size
        own_size = vocab_size if target_ids is None else len(target_ids)
        self.blocks = nn.ParameterList(torch.zeros(num_heads, width, width) for _ in range(num_layers))
        self.biases = nn.ParameterList(torch.zeros(num_heads, width) for _ in range(num_layers))
        self.vocab = nn.Parameter(torch.zeros(num_heads, own_size, width))

    @classmethod
    def for_target(
        cls, model: nn.Module, num_heads: int, draft_ids: Tensor | None = None, num_layers: int = 1
    ) -> "MedusaHeads":
        """Heads that begin as the target itself: blocks of zeros, and its last product. draft_ids: as in EagleHead."""
        last = logits_of(model)
        ids = check_ids(draft_ids, last.out_features)
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", 2048)
        rows = last.weight if ids is None else last.weight[ids]
        heads = cls(num_heads, num_layers, last.in_features, last.out_features, longest, ids)
        heads.to(device=last.weight.device, dtype=last.weight.dtype)
        with torch.no_grad():
            heads.vocab.copy_(rows.expand_as(heads.vocab))
        return heads.eval()

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, "heads": self.num_heads}

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """By name: all."""
        return dict(self.named_parameters())

    def forward(self, input_ids: Tensor, position_ids: Tensor, features: Tensor) -> Tensor:
        """features (1, T, H): the target's behind its last norm. Ids and positions are not read."""
        count, width = self.num_heads, features.shape[-1]
        # A product writes the state once for each head: it is copied in the dialect's own terms.
        copies = torch.eye(width, dtype=features.dtype, device=features.device).repeat(count, 1)
        hidden = nn.functional.linear(features, copies)
        first = self.blocks[0].reshape(count * width, width), self.biases[0].reshape(-1)
        hidden = hidden + nn.functional.silu(nn.functional.linear(features, *first))
        for weight, bias in zip(self.blocks[1:], self.biases[1:], strict=True):
            moved = _product(_by_head(hidden, count), weight).flatten(2) + bias.reshape(-1)
            hidden = hidden + nn.functional.silu(moved)
        logits: Tensor = _product(_by_head(hidden, count), self.vocab)
        return logits.reshape(*logits.shape[:2], -1)


def _by_head(hidden: Tensor, count: int) -> Tensor:
    """(1, T, count * H) -> (1, T, count, H)."""
    return hidden.reshape(*hidden.shape[:2], count, -1)


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x (1, T, heads, K), weight (heads, N, K) -> (1, T, heads, N)."""
    if torch.compiler.is_exporting():
        result: Tensor = torch.ops.octavo.head_linear(x, weight)
        return result
    return torch.einsum("bthk,hnk->bthn", x, weight)
