"""A Llama so small that compiling it costs little: for tests of what surrounds the compiler.

`octavo compile tests/support/tiny_llama.py:build` takes it too.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ("<unk>", "<s>", "</s>")
VOCAB = 256 + len(SPECIALS)
TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


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
    )
    config.name_or_path = "tiny-llama"
    return of_config(config).eval()


def of_config(config: LlamaConfig) -> LlamaForCausalLM:
    """A model of random weights, far enough from zero for every part of it to matter."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1.5 / parameter.shape[1] ** 0.5)
    return model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate((*SPECIALS, *alphabet))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    unknown, bos, eos = SPECIALS
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=unknown, bos_token=bos, eos_token=eos
    )
    fast.chat_template = TEMPLATE
    return fast


def save_directory(path: Path) -> Path:
    """The model and its tokenizer as Hugging Face writes them."""
    build().save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return path
