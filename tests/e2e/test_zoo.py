"""Architectures of Hugging Face, unmodified, in fp32: greedy tokens equal eager's, over pages and in one batch.

`compile` itself compares the logits of every artifact with the model's (bound 1e-4), so a wrong one never gets here.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from zoo import ARCHITECTURES, LATENTS, MIXTURES, build, gpt_oss_2880

import octavo

PROMPTS = ([5, 9, 2, 77, 31], [3, 8, 101, 4, 7, 6, 55, 21, 90, 12, 64], [40])
NUM_TOKENS = 8
ROWS: list[str] = []


def greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    """Tokens of eager decoding without a cache, and the smallest gap between the two best logits."""
    ids, gap = list(prompt), float("inf")
    for _ in range(NUM_TOKENS):
        with torch.no_grad():
            best = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].topk(2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(prompt) :], gap


def assert_greedy(model: Any, compiled: octavo.Compiled) -> None:
    """The prompts in one batch give what eager decoding gives for each."""
    params = octavo.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    answers = compiled.engine(max_batch_tokens=7).generate(PROMPTS, params)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        wanted, gap = greedy(model, prompt)
        assert gap > 1e-4, "the test needs another seed: greedy decoding meets a tie"
        assert list(answer.token_ids) == wanted


@pytest.fixture(scope="module", autouse=True)
def table(print_at_end: Callable[[str, list[str]], None]) -> Any:
    yield
    head = f"{'architecture':<18} {'found':>9} {'seconds':>8}  passes that fired"
    print_at_end("zoo: layers found of those expected", [head, *ROWS])


@pytest.mark.parametrize("name", [*ARCHITECTURES, *MIXTURES, *LATENTS])
def test_zoo(name: str) -> None:
    model = build(name)
    start = time.perf_counter()
    compiled = octavo.compile(model, page_size=4)
    seconds = time.perf_counter() - start
    assert_greedy(model, compiled)
    passes = compiled.report().data["passes"]
    fired = [
        f"{row['pass']} {row['matched']}"
        for row in passes
        if row["matched"] and row["pass"] != "canonicalize"
    ]
    attentions = next(row["notes"]["attentions"] for row in passes if "attentions" in row["notes"])
    ROWS.append(f"{name:<18} {attentions:>9} {seconds:>8.1f}  {', '.join(fired)}")
    assert attentions == "2 of 2"


def test_gpt_oss_at_a_hidden_size_of_2880() -> None:
    model = gpt_oss_2880()
    assert_greedy(model, octavo.compile(model, page_size=4))
