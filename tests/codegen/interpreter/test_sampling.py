"""Sampling kernels against the host's sampler, which computes the same rule in fp64."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_interpreter import poisoned

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.sampling_triton import (
    Processing,
    argmax_spec,
    probabilities_spec,
    process_spec,
    sample_spec,
)  # fmt: skip
from octavo.codegen.specs_triton import gather_rows_spec
from octavo.compiler.target import load_target
from octavo.runtime.sampler import RandomKey, draw, probabilities, uniform
from octavo.runtime.sampling_params import SamplingParams

Launch = Callable[[KernelSpec, dict[str, Tensor], dict[str, int]], list[str]]
FEW_PARTS = replace(load_target("b200"), sm_count=8)  # rows in 2 parts
Params = tuple[float, int, float, float]


def sample(
    launch: Launch, logits: Tensor, params: list[Params], points: Tensor, block: int = 64, few: int = 8
) -> tuple[Tensor, Tensor]:
    """Tokens and records of rows; points are whole numbers of 53 bits."""
    rows, vocab = logits.shape
    temperature, top_k, top_p, min_p = zip(*params, strict=True)
    tensors = {
        "logits": logits, "temperature": torch.tensor(temperature), "top_k": torch.tensor(top_k, dtype=torch.int32),
        "top_p": torch.tensor(top_p), "min_p": torch.tensor(min_p), "point": points,
        "token": poisoned([rows], "i64"), "record": poisoned([rows, 5], "i64"),
    }  # fmt: skip
    launch(sample_spec(vocab, philox=False, block=block, few=few), tensors, {"L": rows})
    return tensors["token"], tensors["record"]


def wanted(logits: Tensor, params: list[Params], points: Tensor) -> list[int]:
    """What the host draws."""
    tokens = []
    for row, (temperature, top_k, top_p, min_p), point in zip(
        logits.numpy(), params, points.tolist(), strict=True
    ):
        own = SamplingParams(
            temperature=temperature, top_k=top_k, top_p=float(np.float32(top_p)), min_p=min_p
        )
        if own.is_greedy:
            tokens.append(int(row.argmax()))
        else:
            tokens.append(draw(probabilities(row, own), point * 2.0**-53))
    return tokens


def random_points(count: int) -> Tensor:
    return torch.randint(0, 2**53, (count,), dtype=torch.int64)


CASES: dict[str, Params] = {
    "greedy": (0.0, 3, 0.5, 0.1),
    "plain": (1.0, 0, 1.0, 0.0),
    "hot": (3.0, 0, 1.0, 0.0),
    "cold": (1e-30, 0, 1.0, 0.0),
    "top_k": (0.8, 5, 1.0, 0.0),
    "top_k_1": (0.8, 1, 1.0, 0.0),
    "top_k_above_tile": (2.0, 100, 1.0, 0.0),
    "top_k_above_vocab": (1.0, 10**6, 1.0, 0.0),
    "top_p": (1.0, 0, 0.7, 0.0),
    "top_p_beyond_few": (4.0, 0, 0.97, 0.0),
    "top_p_least": (1.0, 0, 1e-6, 0.0),
    "min_p": (1.5, 0, 1.0, 0.2),
    "every": (1.3, 20, 0.8, 0.05),
}


SEVERAL_TILES = ("plain", "top_k_above_tile", "top_p_beyond_few", "every")


@pytest.mark.parametrize("vocab", [1, 61, 64, 257])
def test_tokens_are_the_hosts(launch: Launch, vocab: int) -> None:
    names = {1: ("hot", "top_k_1", "top_p"), 61: tuple(CASES), 64: ("every", "top_p"), 257: SEVERAL_TILES}[
        vocab
    ]
    cases = [CASES[name] for name in names]
    logits = torch.randn(len(cases), vocab) * 3
    points = random_points(len(cases))
    points[0] = 0
    tokens, _ = sample(launch, logits, cases, points)
    assert tokens.tolist() == wanted(logits, cases, points)


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [2, 3, 31, 127, 128, 129, 509, 1021])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_the_hosts_at_every_size(launch: Launch, vocab: int, name: str) -> None:
    logits = torch.randn(6, vocab) * torch.tensor([0.1, 1.0, 3.0, 10.0, 100.0, 1e30])[:, None]
    cases, points = [CASES[name]] * 6, random_points(6)
    tokens, _ = sample(launch, logits, cases, points, block=128, few=32)
    assert tokens.tolist() == wanted(logits, cases, points)


def test_ties_go_to_the_lowest_ids(launch: Launch) -> None:
    """Equal logits on both sides of every threshold; -0 equals 0."""
    logits = torch.tensor([[1.0, 2.0, 1.0, 1.0, 1.0, 0.0, 2.0, -0.0]]).repeat(4, 1)
    params = [(1.0, 4, 1.0, 0.0), (1.0, 0, 0.75, 0.0), (1.0, 7, 1.0, 0.0), (0.0, 0, 1.0, 0.0)]
    record = torch.empty(0)
    for point in range(2**50, 2**53, 2**51):
        points = torch.full((4,), point)
        tokens, record = sample(launch, logits, params, points, block=8)
        assert tokens.tolist() == wanted(logits, params, points)
    assert record[:, 3].tolist() == [3, 4, 6, 2]


def test_rows_without_a_token(launch: Launch) -> None:
    logits = torch.randn(5, 20)
    logits[0, 19], logits[1, 3], logits[2], logits[3, 1:] = (
        float("nan"),
        float("inf"),
        -float("inf"),
        -float("inf"),
    )
    for temperature in (0.0, 1.0):
        params: list[Params] = [(temperature, 4, 0.9, 0.1)] * 5
        tokens, record = sample(launch, logits, params, random_points(5))
        assert tokens[:4].tolist() == [-1, -1, -1, 0] and tokens[4] >= 0
    out = torch.zeros(5, 20)
    launch(probabilities_spec(20), {"logits": logits, "record": record, "out": out}, {"L": 5})
    assert out[:3].isnan().all() and out[3].tolist() == [1.0] + [0.0] * 19
    best = run_argmax(launch, logits)
    assert best[:4].tolist() == [-1, -1, -1, 0] and best[4] == logits[4].argmax()


def test_random_numbers_are_the_hosts(launch: Launch) -> None:
    """With one token for each 1/256, a token tells 8 bits of its number."""
    logits = torch.zeros(4, 256)
    seeds, positions = [(0, 0), (2**64 - 1, 7), (5, 2**63), (123456789, 42)], [0, 1, 2**40, 77]
    key = torch.from_numpy(np.array(seeds, np.uint64).view(np.int64))
    place = torch.tensor([[position, 0] for position in positions])
    tensors = {
        "logits": logits, "temperature": torch.ones(4), "top_k": torch.zeros(4, dtype=torch.int32),
        "top_p": torch.ones(4), "min_p": torch.zeros(4), "key": key, "place": place,
        "token": poisoned([4], "i64"), "record": poisoned([4, 5], "i64"),
    }  # fmt: skip
    launch(sample_spec(256, philox=True), tensors, {"L": 4})
    points = [uniform(RandomKey(*seed), position) for seed, position in zip(seeds, positions, strict=True)]
    assert tensors["token"].tolist() == [int(point * 256) for point in points]


def test_probabilities_are_the_hosts(launch: Launch) -> None:
    logits = torch.randn(3, 70) * 2
    params = [CASES["every"], CASES["plain"], CASES["greedy"]]
    _, record = sample(launch, logits, params, random_points(3))
    out = torch.full((3, 70), float("nan"))
    launch(probabilities_spec(70, block=16), {"logits": logits, "record": record, "out": out}, {"L": 3})
    own = SamplingParams(temperature=1.3, top_k=20, top_p=float(np.float32(0.8)), min_p=0.05)
    expected = [probabilities(logits[0].numpy(), own), torch.softmax(logits[1].double(), 0).numpy()]
    assert np.allclose(out[:2], expected, rtol=2e-6, atol=0)
    assert torch.equal(out[2], torch.eye(70)[logits[2].argmax()])


def run_argmax(launch: Launch, logits: Tensor, block: int = 16) -> Tensor:
    token = poisoned([len(logits)], "i64")
    dtype = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[logits.dtype]
    spec = argmax_spec(logits.shape[1], dtype, FEW_PARTS, block)
    launch(spec, {"logits": logits, "token": token}, {"L": len(logits)})
    return token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 16, 97])
def test_argmax_is_the_first(launch: Launch, dtype: torch.dtype, vocab: int) -> None:
    logits = torch.randint(-3, 3, (3, vocab)).to(dtype)
    logits[1] = 1
    logits[2] = -torch.arange(vocab, 0, -1)
    expected = [int(np.argmax(row)) for row in logits.float().numpy()]
    assert run_argmax(launch, logits).tolist() == expected


@pytest.mark.parametrize(
    "processing",
    [
        Processing(),
        Processing(bitmask=True),
        Processing(penalties=True, bias=True),
        Processing(penalties=True, drafts=True, bias=True, bitmask=True),
    ],
)
def test_processed_logits(launch: Launch, processing: Processing) -> None:
    """Rows 0 to 2 are a chain of request 1, whose drafts count for the rows behind them; row 3 is of request 0."""
    vocab, words = 75, 3
    logits = torch.randn(4, vocab).to(torch.bfloat16)
    request, place = (
        torch.tensor([1, 1, 1, 0], dtype=torch.int32),
        torch.tensor([0, 1, 2, 0], dtype=torch.int32),
    )
    counts = torch.randint(0, 3, (2, vocab), dtype=torch.int32)
    prompt, allowed = (torch.randint(-(2**31), 2**31, (n, words), dtype=torch.int32) for n in (2, 4))
    repetition, presence, frequency = torch.tensor([[1.5, 0.5], [0.25, -1.0], [0.1, 0.7]])
    draft = torch.tensor([-1, 8, 9, -1])
    bias_start = torch.tensor([0, 2, 2, 5, 5], dtype=torch.int32)
    bias_id, bias_value = (
        torch.tensor([74, 3, 5, 5, 0], dtype=torch.int32),
        torch.tensor([9.0, -4, 1, 1, -50]),
    )
    out = torch.full((4, vocab), float("nan"))
    tensors = {
        "logits": logits, "request": request, "repetition": repetition, "presence": presence, "frequency": frequency,
        "counts": counts, "prompt": prompt, "place": place, "draft": draft, "bias_start": bias_start,
        "bias_id": bias_id, "bias_value": bias_value, "allowed": allowed, "out": out,
    }  # fmt: skip
    launch(process_spec(vocab, "bf16", processing, block=32), tensors, {"L": 4})
    expected = logits.double()
    for row, r in enumerate(request.tolist()):
        count = counts[r].clone()
        if processing.drafts:
            for back in range(int(place[row])):
                count[draft[row - back]] += 1
        for i in range(vocab if processing.penalties else 0):
            x = expected[row, i].clone()
            if count[i] > 0 or int(prompt[r, i // 32]) >> (i % 32) & 1:
                x = x / repetition[r] if x > 0 else x * repetition[r]
            expected[row, i] = x - (presence[r] if count[i] > 0 else 0) - frequency[r] * count[i]
        for entry in range(bias_start[row], bias_start[row + 1] if processing.bias else bias_start[row]):
            expected[row, bias_id[entry]] += bias_value[entry]
        for i in range(vocab if processing.bitmask else 0):
            if not int(allowed[row, i // 32]) >> (i % 32) & 1:
                expected[row, i] = -float("inf")
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def test_rows_of_a_large_vocabulary_are_gathered(launch: Launch) -> None:
    weight = torch.randn(151936, 8)
    ids = torch.tensor([151935, 0, 128255])
    out = torch.full((3, 8), float("nan"))
    spec = gather_rows_spec("embedding", "ids", "weight", "T", 8, "fp32")
    launch(spec, {"ids": ids, "weight": weight, "out": out}, {"T": 3})
    assert torch.equal(out, weight[ids])
