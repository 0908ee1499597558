"""On the GPU of this machine; skipped without one. benchmarks/device_check.sh runs these too."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from passed_on import PassedOn

from octavo.compiler.api import compile
from octavo.compiler.artifact import Artifact
from octavo.compiler.device_target import choose_target
from octavo.compiler.errors import ExecutionError, MissingDependencyError
from octavo.runtime.batch import Batch
from octavo.runtime.cuda import TensorMap
from octavo.runtime.cuda_driver import CudaDriver
from octavo.runtime.cuda_memory import DeviceMemory
from octavo.runtime.cuda_pages import DevicePages
from octavo.runtime.cuda_runner import CudaRunner
from octavo.runtime.engine import Engine
from octavo.runtime.page_moves import Move
from octavo.runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

EXAMPLE = Path(__file__).parents[2] / "examples" / "hand_written.py"
PROMPTS = [[1, 2, 3], list(range(40, 110)), [200], [7, 7, 7, 7]]
NUM_TOKENS = 12
TOLERANCE = 0.03  # of the largest logit: two layers in bf16, in two orders


@pytest.fixture(scope="module")
def driver() -> Iterator[CudaDriver]:
    try:
        driver = CudaDriver()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def model() -> Any:
    """The hand-written example, in bf16."""
    specification = importlib.util.spec_from_file_location("hand_written", EXAMPLE)
    assert specification is not None and specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    sys.modules["hand_written"] = example
    specification.loader.exec_module(example)
    return example.build().to(torch.bfloat16)


@pytest.fixture(scope="module")
def artifact(driver: CudaDriver, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    target = choose_target(driver.device).target
    if target.family == "cpp":
        pytest.skip(f"no kernels are made for {driver.device.name}")
    path = tmp_path_factory.mktemp("model") / "artifact"
    return compile(
        model, target.name, output=path, max_model_len=128, max_batch_tokens=256, verify="off"
    ).artifact


class Recorder(PassedOn):
    """A runner that keeps copies of all logits."""

    def __init__(self, runner: CudaRunner) -> None:
        super().__init__(runner)
        self.logits: list[NDArray[np.float32]] = []

    def run(self, batch: Batch) -> NDArray[np.float32]:
        self.logits.append(self.inner.run(batch).copy())
        return self.logits[-1]


def test_memory_goes_there_and_back(driver: CudaDriver) -> None:
    size = 64 * 2**20
    stream, address = driver.create_stream(), driver.allocate(size)
    source = driver.allocate_host(size)
    source[:] = np.arange(size, dtype=np.uint32).view(np.uint8)[:size]
    target = np.zeros(size, np.uint8)
    driver.upload(address, source, stream)
    driver.fill(address + 1000, 7, 5000, stream)
    driver.download(target, address, stream)
    driver.synchronize(stream)
    source[1000:6000] = 7
    assert np.array_equal(source, target)
    driver.free_host(source)
    driver.free(address)
    driver.free_stream(stream)


@pytest.mark.parametrize("num_pages", [5, 2**19])
def test_pages_move_in_order(driver: CudaDriver, num_pages: int) -> None:
    """Also where layers lie further apart than the longest distance of rows, 2 GiB."""
    sizes, stream, memory = (
        {"k": 8192, "v": 8192, "scales": 1024},
        driver.create_stream(),
        DeviceMemory(driver),
    )
    pages = DevicePages(memory, stream, sizes, num_pages, 2)
    held = {
        name: np.arange(num_pages - 4, num_pages).repeat(size).reshape(4, size)
        for name, size in sizes.items()
    }
    for name, content in held.items():
        start = pages.addresses[name] + (num_pages - 4) * sizes[name]
        driver.upload(start, content.astype(np.uint8), stream)
        driver.synchronize(stream)
    a, b, c, d = range(num_pages - 4, num_pages)
    pages.move(
        [Move("out", a, 1), Move("copy", b, a), Move("copy", a, c), Move("out", d, 0), Move("in", 1, d)]
    )
    for name, content in held.items():
        found = np.zeros(content.shape, np.uint8)
        driver.download(found, pages.addresses[name] + a * sizes[name], stream)
        driver.synchronize(stream)
        assert np.array_equal(found, content.astype(np.uint8)[[1, 1, 1, 0]])
    memory.release()
    driver.free_stream(stream)


def test_errors_have_their_names(driver: CudaDriver) -> None:
    with pytest.raises(ExecutionError, match=r"CUDA_ERROR_OUT_OF_MEMORY .*free device memory"):
        driver.allocate(2**50)
    with pytest.raises(ExecutionError, match=r"cuTensorMapEncodeTiled: .*CUDA_ERROR_INVALID_VALUE"):
        driver.encode_tensor_map(TensorMap(0x1001, 9, (64, 64), (128,), (64, 64), 3))
    with pytest.raises(ExecutionError, match="cuModuleLoadData: "):
        driver.load_function(b"\x7fELF of nothing" + bytes(100), "kernel", 0)


def generate(
    artifact: Artifact, **options: Any
) -> tuple[list[tuple[int, ...]], NDArray[np.float32], CudaRunner]:
    runner = CudaRunner(artifact, max_requests=8, **options)
    recorder = Recorder(runner)
    engine = Engine(recorder, artifact.model, max_requests=8)
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))
    return [answer.token_ids for answer in answers], np.concatenate(recorder.logits), runner


def test_a_model_with_and_without_graphs(artifact: Artifact, model: Any) -> None:
    tokens, logits, runner = generate(artifact, graphs=True)
    plain_tokens, plain_logits, _ = generate(artifact, graphs=False)
    assert tokens == plain_tokens
    assert np.array_equal(logits, plain_logits), "a graph does what its launches do"
    rows = logits.reshape(NUM_TOKENS, len(PROMPTS), -1)
    for index, prompt in enumerate(PROMPTS):
        whole = torch.tensor([[*prompt, *tokens[index]]])
        with torch.no_grad():
            wanted = model(whole, torch.arange(whole.shape[1])[None])[0, len(prompt) - 1 : -1].float().numpy()
        assert np.abs(rows[:, index] - wanted).max() <= TOLERANCE * np.abs(wanted).max()
    null_page = np.ones(64, np.uint8)
    driver = runner._driver
    for buffer in artifact.program.of_kind("cache"):
        driver.download(null_page, runner.addresses[buffer.name], 0)
        driver.synchronize(0)
        assert not null_page.any(), "the null page is written"


@pytest.mark.parametrize("num_pages", [8])
def test_preempted_requests_come_to_the_same_end(artifact: Artifact, num_pages: int) -> None:
    runner = CudaRunner(artifact, num_pages=num_pages, max_requests=8)
    engine = Engine(runner, artifact.model, max_requests=8)
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    answers = engine.generate([[index + 1] * 30 for index in range(6)], params)
    assert all(len(answer.token_ids) == 40 for answer in answers)
    assert engine.stats.num_preemptions > 0
    assert all(0 <= token < artifact.model.vocab_size for answer in answers for token in answer.token_ids)


def test_padding_changes_no_bit(artifact: Artifact) -> None:
    """The first step after equal prompts: 3 requests in a bucket of 4, and 4."""
    found = []
    for count in (3, 4):
        recorder = Recorder(CudaRunner(artifact, max_requests=8))
        engine = Engine(recorder, artifact.model, max_requests=8)
        engine.generate(PROMPTS[:count], SamplingParams(max_tokens=1, ignore_eos=True))
        step: Callable[[], Any] = engine.step
        for prompt in PROMPTS[:count]:
            engine.add_request(prompt[:1], SamplingParams(max_tokens=3, ignore_eos=True))
        for _ in range(3):
            step()
        found.append(np.stack([logits[:3] for logits in recorder.logits[-3:]]))
    assert np.array_equal(found[0], found[1])
