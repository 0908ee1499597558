"""A Llama so small that compiling it costs little: for tests of what surrounds the compiler.

`octavo compile tests/support/tiny_llama.py:build` takes it too.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 96


def build() -> LlamaForCausalLM:
    """One layer, random weights, 64 positions, end token 2; without a tokenizer."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
        name_or_path="tiny-llama",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:  # far enough from zero for every part of the model to matter
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[1] ** 0.5)
    return model.eval()
