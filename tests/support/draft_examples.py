"""A tiny target with answers that it never gave, for tests of what trains draft heads."""

import torch
from tiny_llama import build
from transformers import LlamaForCausalLM

from octavo.compiler.draft_training.examples import Example
from octavo.compiler.draft_training.teacher import hidden_states


def make_examples(model: LlamaForCausalLM, lengths: list[tuple[int, int]], seed: int = 0) -> list[Example]:
    """(prompt, all) tokens of each."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for prompt_len, length in lengths:
        ids = torch.randint(3, 40, (length,), generator=generator)
        found.append(Example(ids, hidden_states(model, ids.tolist()), prompt_len))
    return found


def target() -> LlamaForCausalLM:
    return build()
