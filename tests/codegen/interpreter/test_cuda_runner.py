"""A model compiled for a B200 and served by CudaRunner: its own kernels, over memory that holds nan where it may."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_cuda import POISON, caches_of
from interpreted_cuda import InterpretingDriver
from numpy.typing import NDArray
from passed_on import PassedOn
from tiny_llama import of_config
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.kernel import Kernel, KernelSpec
from octavo.compiler.api import compile
from octavo.compiler.artifact import Artifact
from octavo.compiler.target import Target
from octavo.runtime.batch import Batch
from octavo.runtime.cuda_runner import CudaRunner
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

PAGE_SIZE, VOCAB, NUM_PAGES = 16, 96, 12
PROMPTS = [[5, 6, 7], list(range(20, 37)), [90]]
NUM_TOKENS = 3


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return of_config(config).bfloat16().eval()


def build_one_form(specs: Sequence[KernelSpec], target: Target, progress: Any) -> list[Kernel]:
    """The first form of each kernel: which is the fastest does not matter here."""
    return build_kernels([replace(spec, candidates=()) for spec in specs], target, progress)


@pytest.fixture(scope="module")
def artifact(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("llama")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(folder / "cache"))
        patch.setattr("octavo.compiler.build.build_kernels", build_one_form)
        return compile(
            model, "b200", output=folder / "artifact", page_size=PAGE_SIZE, max_batch_tokens=64, verify="off"
        ).artifact


class Served(PassedOn):
    """A runner whose pages hold nan, and what it computed: logits of each step."""

    def __init__(self, runner: CudaRunner, driver: InterpretingDriver) -> None:
        super().__init__(runner)
        self.runner, self.driver = runner, driver
        self.logits: list[NDArray[np.float32]] = []

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.logits.append(self.runner.run(batch).copy())
        return self.logits[-1]

    def caches(self) -> list[NDArray[np.uint8]]:
        """(pages, bytes) of each cache."""
        return list(caches_of(self.runner, self.driver).values())


def serve(artifact: Artifact, **options: bool | int) -> Served:
    driver = InterpretingDriver(artifact)
    served = Served(CudaRunner(artifact, NUM_PAGES, driver=driver, **options), driver)  # type: ignore[arg-type]
    for cache in served.caches():
        cache[1:] = POISON  # all but the null page
    return served


def test_greedy_tokens_and_logits_with_and_without_graphs(
    artifact: Artifact, model: LlamaForCausalLM
) -> None:
    answers, logits = [], []
    for graphs in (True, False):
        served = serve(artifact, max_requests=4, graphs=graphs)
        engine = Engine(served, artifact.model, max_requests=4)
        answers.append([a.token_ids for a in engine.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS))])
        logits.append(np.concatenate(served.logits))
        assert (served.driver.num_graph_launches > 0) == graphs
        assert not any(cache[0].any() for cache in served.caches()), "the null page is written"
    assert answers[0] == answers[1]
    assert np.array_equal(logits[0], logits[1])
    wide = LlamaForCausalLM(model.config).double().eval()
    wide.load_state_dict(model.state_dict())
    for index, prompt in enumerate(PROMPTS):
        tokens = torch.tensor([[*prompt, *answers[0][index]]])
        with torch.no_grad():
            eager, exact = (m(tokens).logits[0, len(prompt) - 1 : -1] for m in (model, wide))
        assert eager.argmax(-1).tolist() == list(answers[0][index])
        found = torch.from_numpy(logits[0].reshape(NUM_TOKENS, len(PROMPTS), VOCAB)[:, index].copy())
        error, of_eager = ((x.double() - exact).abs().max() for x in (found, eager))
        assert error <= 1.5 * of_eager, "bf16 in other places costs no more than in the model itself"


def decode_batch(lengths: list[int]) -> Batch:
    """Requests of so many tokens, the last of them new; request r owns pages 1 + 2 r and 2 + 2 r."""
    count = len(lengths)
    table = 1 + np.arange(2 * count, dtype=np.int32).reshape(count, 2)
    positions = np.array(lengths) - 1
    slots = table[np.arange(count), positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    return Batch(
        input_ids=np.arange(7, 7 + count), positions=positions, slot_mapping=slots.astype(np.int64), page_table=table,
        seq_lens=np.array(lengths, np.int32), cu_seqlens_q=np.arange(count + 1, dtype=np.int32),
        logit_rows=np.arange(count),
    )  # fmt: skip


def test_padding_changes_no_bit_and_writes_nothing(artifact: Artifact) -> None:
    """3 requests alone in a bucket of 4, and with a fourth: equal logits, and only the step's slots are written."""
    lengths = [1, 17, 30, 16]
    logits = []
    for count in (3, 4):
        served = serve(artifact, max_requests=4)
        for seed, cache in enumerate(served.caches()):
            for request, length in enumerate(lengths[:count]):
                values = torch.Generator().manual_seed(10 * seed + request)
                rows = cache[1 + 2 * request : 3 + 2 * request].reshape(2, 2, PAGE_SIZE, -1)
                for position in range(length - 1):
                    row = torch.randn(2, 16, generator=values).to(torch.bfloat16).view(torch.uint8)
                    rows[position // PAGE_SIZE, :, position % PAGE_SIZE] = row.numpy()
        before = [cache.copy() for cache in served.caches()]
        batch = decode_batch(lengths[:count])
        logits.append(served.run(batch))
        for old, new in zip(before, served.caches(), strict=True):
            is_written = (old != new).reshape(NUM_PAGES, 2, PAGE_SIZE, -1).any((1, 3)).reshape(-1)
            assert np.flatnonzero(is_written).tolist() == sorted(batch.slot_mapping.tolist())
    assert np.isfinite(logits[1]).all()
    assert np.array_equal(logits[0], logits[1][:3])
