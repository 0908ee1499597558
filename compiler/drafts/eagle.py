"""EAGLE-1 and -2 (Li et al. 2024): one decoder layer that continues the target's last hidden states."""

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from octavo.compiler.drafts.head import (
    DraftHead,
    check_ids,
    chosen_rows,
    embedding_of,
    logits_of,
    product_of_parts,
)
from octavo.compiler.hidden_states import LAST


class EagleHead(DraftHead):
    """fc(embedding of token j, features of token j - 1) -> Llama layers, the first without its norm -> lm_head.

    The hidden states that it makes are what lm_head reads, as are the target's. embed_tokens and lm_head are the
    target's; of a head that was made for a target they are its very modules, and a trainer leaves them alone.
    """

    draft_kind = "eagle"

    def __init__(
        self, config: LlamaConfig, embed_tokens: nn.Embedding, lm_head: nn.Linear, target_ids: Tensor | None = None,
        bias: bool = True,
    ) -> None:  # fmt: skip
        """config: of the layers; num_hidden_layers of them."""
        width = config.hidden_size
        super().__init__((LAST,), width, config.max_position_embeddings, target_ids)
        config._attn_implementation = "sdpa"  # without a mask it is causal, unlike "eager"
        self.config = config
        self.embed_tokens = embed_tokens
        self.fc = nn.Linear(2 * width, width, bias=bias)
        self.layers = nn.ModuleList(
            LlamaDecoderLayer(config, number) for number in range(config.num_hidden_layers)
        )
        self.layers[0].input_layernorm = nn.Identity()
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.lm_head = lm_head

    @classmethod
    def for_target(
        cls, model: nn.Module, draft_ids: Tensor | None = None, num_layers: int = 1, bias: bool = True
    ) -> "EagleHead":
        """Fresh layers beside a target's table and last product. draft_ids: of its vocabulary."""
        table, last = embedding_of(model), logits_of(model)
        ids = check_ids(draft_ids, last.out_features)
        head = cls(layer_config(model, num_layers), table, chosen_rows(last, ids), ids, bias)
        for name, module in head.named_children():
            if name in ("fc", "layers"):
                module.to(device=last.weight.device, dtype=last.weight.dtype)
        return head.eval()

    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Those that are not the target's, by name."""
        own = ("fc.", "layers.")
        return {name: p for name, p in self.named_parameters() if name.startswith(own)}

    def forward(self, input_ids: Tensor, position_ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor]:
        """features (1, T, H): the target's behind its last norm."""
        hidden = product_of_parts(self.fc, (self.embed_tokens(input_ids), features))
        angles = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=angles, position_ids=position_ids)
        return self.lm_head(hidden), hidden


def layer_config(model: Any, num_layers: int) -> LlamaConfig:
    """Llama layers of the sizes of a target's own."""
    theirs = model.config.get_text_config()
    names = (
        "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "rms_norm_eps", "max_position_embeddings", "rope_parameters",
    )  # fmt: skip
    sizes = {name: getattr(theirs, name) for name in names if getattr(theirs, name, None) is not None}
    return LlamaConfig(**sizes, num_hidden_layers=num_layers)
