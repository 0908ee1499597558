"""A hand-written model with latent attention, compiled and run: what it generates, and what it keeps of a token."""

import pytest
import torch
from latent import RANK, ROPE, latent_model
from models import LAYERS, LONGEST

import octavo
from octavo.compiler.capture import reference_logits
from octavo.compiler.compiled import Compiled
from octavo.runtime.model_runner import NativeRunner, page_bytes

PAGE_SIZE = 4
PROMPTS = ([5, 9, 2, 77, 31], [3, 8, 81, 4, 7, 6, 55, 21, 90, 12, 64], [40])
ITEM_BYTES = {torch.float32: 4, torch.bfloat16: 2}


@pytest.fixture(scope="module", params=ITEM_BYTES, ids=str)
def compiled(request: pytest.FixtureRequest) -> tuple[Compiled, torch.dtype]:
    model = latent_model("latent", request.param)
    return octavo.compile(model, page_size=PAGE_SIZE, max_model_len=LONGEST), request.param


def test_a_token_takes_one_latent_and_one_rotated_part_a_layer(
    compiled: tuple[Compiled, torch.dtype],
) -> None:
    artifact, dtype = compiled[0].artifact, compiled[1]
    program = artifact.program
    caches = {b.name: b.shape for b in program.of_kind("cache")}
    assert caches == {f"k_cache_{i}": ("num_pages", 1, PAGE_SIZE, RANK + ROPE) for i in range(LAYERS)}
    assert page_bytes(program) == LAYERS * PAGE_SIZE * (RANK + ROPE) * ITEM_BYTES[dtype]
    runner = NativeRunner(artifact, num_pages=7)
    held = sum(memory.nbytes for name, memory in runner._memory.items() if "cache" in name)
    assert held == 7 * page_bytes(program)


def test_generates_what_the_model_does(compiled: tuple[Compiled, torch.dtype]) -> None:
    if compiled[1] is not torch.float32:
        pytest.skip("bf16 logits of two sums in another order need not have one maximum")
    model, params = latent_model("latent"), octavo.SamplingParams(max_tokens=8, ignore_eos=True)
    answers = compiled[0].engine(max_batch_tokens=7).generate(PROMPTS, params)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids, gap = list(prompt), float("inf")
        for _ in range(8):
            with torch.no_grad():
                best = reference_logits(model, torch.tensor([ids]))[0, -1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            ids.append(int(best.indices[0]))
        assert gap > 1e-4, "the test needs another seed: greedy decoding meets a tie"
        assert list(answer.token_ids) == ids[len(prompt) :]
