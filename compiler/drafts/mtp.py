"""Multi-token prediction of DeepSeek-V3 (DeepSeek-AI 2024): one more decoder layer that guesses the token after next.

Which of the target's hidden states the module reads is as others serve it, those behind the last norm; the paper does
not say.
"""

import copy
from typing import Any

from torch import Tensor, nn
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)

from octavo.compiler.drafts.head import DraftHead, embedding_of, logits_of, product_of_parts
from octavo.compiler.errors import OptionError
from octavo.compiler.hidden_states import LAST


class SharedHead(nn.Module):
    """The module's own norm, and the target's last product."""

    def __init__(self, norm: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.norm = norm
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(hidden))
        return logits


class MtpHead(DraftHead):
    """eh_proj(enorm(embedding of token j), hnorm(features of token j - 1)) -> a layer like the target's -> shared_head.

    embed_tokens and shared_head.head are the target's. The hidden states that it makes are those before shared_head.
    """

    draft_kind = "mtp"

    def __init__(
        self, config: DeepseekV3Config, layer: int, embed_tokens: nn.Embedding, head: nn.Linear
    ) -> None:
        """layer: its number, behind the target's own; it decides whether it has experts."""
        width = config.hidden_size
        super().__init__((LAST,), width, config.max_position_embeddings)
        config._attn_implementation = "sdpa"  # without a mask it is causal, unlike "eager"
        self.config = config
        self.layer_number = layer
        self.embed_tokens = embed_tokens
        self.enorm = DeepseekV3RMSNorm(width, eps=config.rms_norm_eps)
        self.hnorm = DeepseekV3RMSNorm(width, eps=config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.layer = DeepseekV3DecoderLayer(config, layer)
        self.shared_head = SharedHead(DeepseekV3RMSNorm(width, eps=config.rms_norm_eps), head)
        self.rotary_emb = DeepseekV3RotaryEmbedding(config)

    @classmethod
    def for_target(cls, model: nn.Module) -> "MtpHead":
        """Fresh weights beside a target's table and last product."""
        config: Any = getattr(model, "config", None)
        if not isinstance(config, DeepseekV3Config):
            raise OptionError(f"mtp: expected a DeepSeek-V3 target, got {type(model).__name__}")
        table, last = embedding_of(model), logits_of(model)
        head = cls(copy.deepcopy(config), config.num_hidden_layers, table, last)
        for part in head.layer.modules():
            model._init_weights(part)  # type: ignore[operator]  # the library's layers are made of unset memory
        for module in (head.enorm, head.hnorm, head.eh_proj, head.layer, head.shared_head.norm):
            module.to(device=last.weight.device, dtype=last.weight.dtype)
        for buffer in head.layer.buffers():
            buffer.data = buffer.float()  # what corrects the choice of experts has to be exact
        return head.eval()

    def forward(self, input_ids: Tensor, position_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """features (1, T, H): the target's behind its last norm."""
        parts = self.enorm(self.embed_tokens(input_ids)), self.hnorm(features)
        hidden = product_of_parts(self.eh_proj, parts)
        angles = self.rotary_emb(hidden, position_ids)
        hidden = self.layer(hidden, position_embeddings=angles, position_ids=position_ids)
        return self.shared_head(hidden), hidden
