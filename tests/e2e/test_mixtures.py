"""Mixtures of experts written by hand, in every spelling, served with the module's own greedy tokens."""

import pytest
import torch
from mixture_loops import LOOPS
from mixtures import EXPORTABLE, mixture_model

import octavo
from octavo.compiler.capture import reference_logits

PROMPTS = ([5, 9, 2, 77, 31], [3, 8, 11, 4, 7, 6, 55], [40])
NUM_TOKENS = 5
MIXTURES = {**EXPORTABLE, **LOOPS}
# torch exports grouped products in bf16 only, and few random models keep the order of their experts in it.
IN_FP32 = [n for n in MIXTURES if n != "grouped products"]
IN_BF16 = ("gathered", "shared expert")
OFTEN = ("deepseek-v3",)


def greedy(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            ids.append(int(reference_logits(model, torch.tensor([ids]))[0, -1].float().argmax()))
    return ids[len(prompt) :]


def served(model: torch.nn.Module) -> list[list[int]]:
    compiled = octavo.compile(model, page_size=4, max_model_len=48)
    results = compiled.generate([list(p) for p in PROMPTS], octavo.SamplingParams(max_tokens=NUM_TOKENS))
    return [list(r.token_ids) for r in results]


@pytest.mark.parametrize(
    "name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in IN_FP32]
)
def test_serves_the_modules_own_tokens(name: str) -> None:
    model = mixture_model(MIXTURES[name])
    assert served(model) == [greedy(model, p) for p in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_BF16)
def test_serves_bf16(name: str) -> None:
    model = mixture_model(MIXTURES[name], torch.bfloat16)
    assert served(model) == [greedy(model, p) for p in PROMPTS]
