"""The artifact of several ranks, all in this process: the host programs, their segments and pieces of weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zoo

import octavo
from octavo.compiler.compiled import Compiled
from octavo.compiler.errors import ExecutionError
from octavo.compiler.options import Parallel, QuantConfig, Wire
from octavo.runtime.batch import Batch
from octavo.runtime.engine import Engine
from octavo.runtime.model_runner import NativeRunner
from octavo.runtime.sampling_params import SamplingParams

PROMPTS = [[5, 9, 2, 77, 31], [3, 3, 1]]
LENGTH = 12


def greedy(model: Any, prompt: list[int]) -> list[int]:
    with torch.no_grad():
        ids = model.generate(torch.tensor([prompt]), max_new_tokens=LENGTH, do_sample=False)[0]
    tokens: list[int] = ids[len(prompt) :].tolist()
    return tokens


def answers(compiled: Compiled) -> list[list[int]]:
    return [list(c.token_ids) for c in compiled.generate(PROMPTS, SamplingParams(max_tokens=LENGTH))]


@pytest.mark.parametrize(
    ("name", "parallel"),
    [
        ("mixtral", Parallel(ep=4, dp=2, tp=2)),
        ("gpt_oss", Parallel(ep=3, dp=3)),
        pytest.param("qwen3_moe", Parallel(ep=2, tp=2), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", Parallel(ep=4, dp=4), marks=pytest.mark.slow),
        pytest.param("llama", Parallel(tp=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_greedy_tokens_are_those_of_the_model(name: str, parallel: Parallel, tmp_path: Path) -> None:
    model = zoo.build(name)
    compiled = octavo.compile(model, parallel=parallel, output=tmp_path / "artifact")
    assert compiled.artifact.program.mesh == parallel.mesh
    assert answers(compiled) == [greedy(model, prompt) for prompt in PROMPTS]


CALIBRATION = [[i * step % 128 for i in range(60)] for step in (7, 11)]


WIRES: tuple[Wire, ...] = ("model", "nvfp4")


def test_rows_that_travel_as_nvfp4_are_those_that_experts_quantise_anyway() -> None:
    """Codes and scales of rows that were quantised once do not change when they are quantised again."""
    model, logits = zoo.build("qwen3_moe"), []
    for wire in WIRES:
        parallel = Parallel(ep=2, dp=2, wire=wire)
        compiled = octavo.compile(
            model,
            quantize=QuantConfig("nvfp4", weights="nearest"),
            calibration=CALIBRATION,
            parallel=parallel,
            verify="off",
        )
        runner = compiled.runner(num_pages=8)
        engine = Engine(runner, compiled.artifact.model, prefix_caching=False)
        params = SamplingParams(max_tokens=6, logprobs=5)
        logits.append([token.logprob for token in engine.stream([PROMPTS[0]], params)])
    assert logits[0] == logits[1]


@pytest.mark.slow
def test_quantised_products_take_the_heads_of_all_ranks() -> None:
    """Products of codes are not cut by columns: heads are gathered for them, in the order of one rank."""
    answered = []
    for parallel in (Parallel(), Parallel(tp=2)):
        compiled = octavo.compile(
            zoo.build("qwen3"), quantize=QuantConfig("fp8"), calibration=CALIBRATION, parallel=parallel,
            verify="off",
        )  # fmt: skip
        answered.append(answers(compiled))
    assert answered[0] == answered[1]


def test_one_rank_alone_says_how_to_start_all(tmp_path: Path) -> None:
    compiled = octavo.compile(zoo.build("mixtral"), parallel=Parallel(ep=2), verify="off")
    runner = NativeRunner(compiled.artifact, num_pages=4, rank=1)
    simulated = compiled.runner(num_pages=4)
    batch = one_token(simulated)
    with pytest.raises(ExecutionError, match=r"rank 1 of 2 .* torchrun --nproc-per-node 2"):
        runner.run(batch)
    with pytest.raises(ExecutionError, match=r"expected a rank below 2 \(dp 1 x ep 2 x tp 1\), got 2"):
        NativeRunner(compiled.artifact, num_pages=4, rank=2)


def one_token(runner: Any) -> Batch:
    one = np.zeros(1, np.int64)
    table = np.ones((1, 1), np.int32)
    ends = np.array([0, 1], np.int32)
    return Batch(one, one, one + runner.page_size, table, np.ones(1, np.int32), ends, one)
