"""EAGLE-3 (Li et al. 2025): a layer that reads a token beside a mix of the target's early, middle and late states."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from octavo.compiler.drafts.eagle import layer_config
from octavo.compiler.drafts.head import (
    DraftHead,
    check_ids,
    chosen_rows,
    embedding_of,
    logits_of,
    product_of_parts,
)
from octavo.compiler.hidden_states import decoder_layers


class WideAttention(nn.Module):
    """Llama's attention over two values next to each other, (1, T, 2 H) in all."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        sizes: Any = config  # it fills in what is not given
        heads, kv_heads = sizes.num_attention_heads, sizes.num_key_value_heads
        self.head_dim: int = sizes.head_dim
        width = config.hidden_size
        self.q_proj = nn.Linear(2 * width, heads * self.head_dim, bias=config.attention_bias)
        self.k_proj = nn.Linear(2 * width, kv_heads * self.head_dim, bias=config.attention_bias)
        self.v_proj = nn.Linear(2 * width, kv_heads * self.head_dim, bias=config.attention_bias)
        self.o_proj = nn.Linear(heads * self.head_dim, width, bias=config.attention_bias)

    def forward(self, parts: tuple[Tensor, Tensor], angles: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            product_of_parts(linear, parts).unflatten(2, (-1, self.head_dim)).transpose(1, 2)
            for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *angles)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        result: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return result


class Eagle3Layer(nn.Module):
    """hidden + attention(input_layernorm(token), hidden_norm(hidden)), then a gated MLP."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = LlamaRMSNorm(width, eps=eps)
        self.hidden_norm = LlamaRMSNorm(width, eps=eps)
        self.self_attn = WideAttention(config)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps=eps)
        self.mlp = LlamaMLP(config)

    def forward(self, token: Tensor, hidden: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.self_attn((self.input_layernorm(token), self.hidden_norm(hidden)), angles)
        result: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return result


class Eagle3Head(DraftHead):
    """fc(three hidden states of the target), or the head's own state -> midlayer -> norm -> lm_head.

    Its features (1, T, 3 H_t + H) are the target's and, behind them, the head's own: of a row one of the two is zeros,
    so that one product serves both. The head's own are what midlayer makes, before the norm.
    """

    draft_kind = "eagle3"

    def __init__(
        self, config: LlamaConfig, embed_tokens: nn.Embedding, lm_head: nn.Linear, target_features: Sequence[int],
        target_width: int, target_ids: Tensor | None = None,
    ) -> None:  # fmt: skip
        """target_width: H_t, of one hidden state of the target."""
        width, given = config.hidden_size, len(target_features) * target_width
        super().__init__(target_features, given + width, config.max_position_embeddings, target_ids)
        self.config = config
        self.embed_tokens = embed_tokens
        self.fc = nn.Linear(given, width, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
        self.lm_head = lm_head
        self.rotary_emb = LlamaRotaryEmbedding(config)

    @classmethod
    def for_target(
        cls, model: nn.Module, draft_ids: Tensor | None = None, target_features: Sequence[int] | None = None
    ) -> "Eagle3Head":
        """Fresh weights beside a target's table. target_features: None: of layers 2, half of all, and all but 3."""
        table, last = embedding_of(model), logits_of(model)
        ids = check_ids(draft_ids, last.out_features)
        chosen = chosen_rows(last, ids)
        if chosen is last:
            chosen = chosen_rows(last, torch.arange(last.out_features))  # its own: it is trained
        features = default_features(model) if target_features is None else target_features
        head = cls(layer_config(model, 1), table, chosen, features, table.embedding_dim, ids)
        for module in (head.fc, head.midlayer, head.norm):
            module.to(device=last.weight.device, dtype=last.weight.dtype)
        return head.eval()

    @property
    def facts(self) -> dict[str, Any]:
        return {**super().facts, "own_width": self.config.hidden_size}

    def forward(self, input_ids: Tensor, position_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """features (1, T, 3 H_t + H)."""
        own = torch.eye(self.fc.out_features, dtype=self.fc.weight.dtype, device=self.fc.weight.device)
        hidden = F.linear(features, torch.cat((self.fc.weight, own), 1))
        hidden = self.midlayer(self.embed_tokens(input_ids), hidden, self.rotary_emb(hidden, position_ids))
        return self.lm_head(self.norm(hidden)), hidden


def default_features(model: nn.Module) -> tuple[int, ...]:
    """The hidden states that published heads read. Of fewer than 6 layers, as far apart as there are."""
    count = len(decoder_layers(model))
    return (2, count // 2, count - 3) if count > 6 else tuple(sorted({0, count // 2, count - 1}))
