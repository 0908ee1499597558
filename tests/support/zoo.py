"""Tiny random models of Hugging Face architectures, unmodified: what differs between them is what is tested."""

from typing import Any

import torch
from models import with_margin
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 6
SIZES: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
STRETCHED = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
GPT2_SIZES = {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 64}

# name -> (model type, configuration beyond SIZES)
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "llama_yarn": (
        "llama",
        {
            **GROUPED,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
            },
        },
    ),
    "mistral": ("mistral", {**GROUPED, "sliding_window": WINDOW}),
    "qwen2": ("qwen2", {"num_key_value_heads": 2}),
    "qwen3": ("qwen3", GROUPED),
    "gemma2": ("gemma2", {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 16, "final_logit_softcapping": 20.0}),
    "gemma3": ("gemma3_text", {**GROUPED, **ALTERNATING, "query_pre_attn_scalar": 16}),
    "phi3": ("phi3", {"num_key_value_heads": 2}),
    "olmo2": ("olmo2", {"num_key_value_heads": 2}),
    "granite": (
        "granite",
        {
            "num_key_value_heads": 2, "embedding_multiplier": 2.0, "attention_multiplier": 0.2,
            "residual_multiplier": 0.5, "logits_scaling": 2.0,
        },
    ),
    "gpt2": ("gpt2", GPT2_SIZES),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}),
    "starcoder2": ("starcoder2", {"num_key_value_heads": 2, "sliding_window": WINDOW}),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}),  # slopes of the distance
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),  # learned positions counted from two
    "gptj": ("gptj", {**GPT2_SIZES, "rotary_dim": 8}),  # interleaved, partial, parallel
    "falcon": ("falcon", {}),  # one key for all heads, in one projection with the queries
    "nemotron": ("nemotron", {"num_key_value_heads": 2, "head_dim": 16}),  # relu squared, layer norms of 1 + weight
    "smollm3": ("smollm3", {"num_key_value_heads": 2, "no_rope_layers": [1, 0]}),  # a layer without rotation
    # grouped keys in one projection, repeated for every query head before the rotation
    "falcon_grouped": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "gpt_bigcode": ("gpt_bigcode", GPT2_SIZES),  # one projection, cut behind an axis of size one
    "nanochat": ("nanochat", GROUPED),  # rotated the other way round, then normed
    "ministral3": ("ministral3", {**GROUPED, "rope_parameters": STRETCHED}),  # queries scaled by their position
    "cohere2": ("cohere2", {"num_key_value_heads": 2, **ALTERNATING}),
}  # fmt: skip

SPARSE = {"num_key_value_heads": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
FEW, FEW_LOCAL, FEW_ROUTED = {"num_experts": 4}, {"num_local_experts": 4}, {"n_routed_experts": 8}
GROUPS = {
    "n_group": 4, "topk_group": 2, "num_experts_per_tok": 3, "norm_topk_prob": True, "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1, "n_shared_experts": 1,
}  # fmt: skip
# Mixtures of experts: what differs is how a token finds its experts, and what stands beside them.
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {**SPARSE, **FEW_LOCAL}),
    "qwen3_moe": ("qwen3_moe", {**SPARSE, **FEW, "head_dim": 16, "norm_topk_prob": True}),
    "olmoe": ("olmoe", {**SPARSE, **FEW}),
    "granitemoe": ("granitemoe", {**SPARSE, **FEW_LOCAL, "logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "glm4_moe": ("glm4_moe", {**SPARSE, **FEW_ROUTED, **GROUPS, "head_dim": 16, "use_qk_norm": True}),
    "gpt_oss": ("gpt_oss", {**SPARSE, **FEW_LOCAL, **ALTERNATING, "head_dim": 16, "swiglu_limit": 1.0}),
    "qwen2_moe": ("qwen2_moe", {**SPARSE, **FEW, "shared_expert_intermediate_size": 48}),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {**SPARSE, "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_layer_start_index": 1},
    ),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {**SPARSE, **FEW, "head_dim": 16, "moe_topk": 2}),
    "minimax_m2": ("minimax_m2", {**SPARSE, **FEW_LOCAL, "head_dim": 16}),
    "granitemoeshared": ("granitemoeshared", {**SPARSE, **FEW_LOCAL, "shared_intermediate_size": 48}),
    "flex_olmo": ("flex_olmo", {**SPARSE, **FEW}),
    "dots1": ("dots1", {**SPARSE, **FEW_ROUTED, **GROUPS, "head_dim": 16}),
    "cohere2_moe": ("cohere2_moe", {**SPARSE, **FEW, **ALTERNATING, "head_dim": 16}),
    "afmoe": ("afmoe", {**SPARSE, **FEW, **ALTERNATING, "head_dim": 16, "num_dense_layers": 1}),
}
# Attention over latents, before and among mixtures of experts.
LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12,
    "num_key_value_heads": 4, "moe_intermediate_size": 48, **FEW_ROUTED, **GROUPS,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
LATENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v2": ("deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "rope_parameters": YARN}),
    "deepseek_v3_dense": ("deepseek_v3", {**LATENT, "q_lora_rank": None, "first_k_dense_replace": 2}),
    "minicpm3": (
        "minicpm3",
        {k: v for k, v in LATENT.items() if k not in (*FEW_ROUTED, *GROUPS, "moe_intermediate_size")},
    ),
}
ARCHITECTURES_AND_MIXTURES = {**ARCHITECTURES, **MIXTURES, **LATENTS}


def build(name: str) -> nn.Module:
    """The architecture with weights that keep greedy decoding away from ties."""
    kind, changes = ARCHITECTURES_AND_MIXTURES[name]
    base = {
        k: v
        for k, v in SIZES.items()
        if kind not in ("gpt2", "gpt_bigcode") or k.endswith("token_id") or k == "vocab_size"
    }
    torch.manual_seed(0)
    return with_margin(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**base, **changes})))


def gpt_oss_2880() -> nn.Module:
    """gpt-oss at its own width, which no power of two divides; one layer, few experts, a small vocabulary."""
    kind: Any = CONFIG_MAPPING["gpt_oss"]
    config = kind(
        hidden_size=2880, intermediate_size=360, num_hidden_layers=1, num_attention_heads=8, num_key_value_heads=1,
        head_dim=64, num_local_experts=4, num_experts_per_tok=2, vocab_size=128, max_position_embeddings=64,
        sliding_window=WINDOW, layer_types=["sliding_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    return with_margin(AutoModelForCausalLM.from_config(config))
