import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octavo.compiler import host
from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import ArtifactError, ExecutionError, ToolchainError
from octavo.compiler.program import STEP_INPUTS, Buffer, Program
from octavo.compiler.weights import Weight
from octavo.runtime import model_runner
from octavo.runtime.engine import Engine
from octavo.runtime.model_runner import NativeRunner, aligned_zeros, default_num_pages, page_bytes
from octavo.runtime.sampling_params import SamplingParams

VOCAB_SIZE, PAGE_SIZE = 13, 4
BUFFERS = (
    *(Buffer(name, "input", dtype, shape) for name, (dtype, shape) in STEP_INPUTS.items()),
    Buffer("scale", "weight", "fp32", (VOCAB_SIZE,)),
    Buffer("k_cache_0", "cache", "fp32", ("num_pages", 1, PAGE_SIZE, 1)),
    Buffer("hidden", "workspace", "fp32", ("T",), 0),
    Buffer("logits", "output", "fp32", ("L", VOCAB_SIZE)),
)
NO_FILES: dict[str, bytes] = {}
PROGRAM = Program(BUFFERS, (), "T * 4 + 64", PAGE_SIZE)

# For each wanted row, over its history: logit[v] = scale[v] * (sum of (token + 1) * (position + 2 + v)) mod
# 101.
SOURCE = r"""
#include <cstdint>
#include <initializer_list>
#include <chrono>
#include <thread>
extern "C" const char* octavo_features(void) { return FEATURES; }
extern "C" int octavo_step(const int64_t* dims, void* const* buffers, int32_t num_threads, int32_t segment) {
  const int64_t T = dims[0], R = dims[1], L = dims[2], P = dims[3], num_pages = dims[4];
  const auto* input_ids = static_cast<const int64_t*>(buffers[0]);
  const auto* positions = static_cast<const int64_t*>(buffers[1]);
  const auto* slot_mapping = static_cast<const int64_t*>(buffers[2]);
  const auto* page_table = static_cast<const int32_t*>(buffers[3]);
  const auto* seq_lens = static_cast<const int32_t*>(buffers[4]);
  const auto* cu_seqlens_q = static_cast<const int32_t*>(buffers[5]);
  const auto* logit_rows = static_cast<const int64_t*>(buffers[6]);
  const auto* scale = static_cast<const float*>(buffers[9]);
  auto* cache = static_cast<float*>(buffers[10]);
  auto* logits = static_cast<float*>(buffers[11]);
  auto* workspace = static_cast<float*>(buffers[12]);
  for (const void* pointer : {buffers[10], buffers[11], buffers[12], buffers[9]})
    if (reinterpret_cast<uintptr_t>(pointer) % 64 != 0) return 2;
  if (num_threads < 1) return 3;
  for (int64_t t = 0; t < T; ++t) {
    if (input_ids[t] == 12) return 7;  // the test's way to make a step fail
    if (input_ids[t] == 11) std::this_thread::sleep_for(std::chrono::milliseconds(200));
    if (slot_mapping[t] < 4 || slot_mapping[t] >= num_pages * 4) return 4;
    workspace[t] = static_cast<float>(input_ids[t] + 1);
  }
  for (int64_t t = 0; t < T; ++t) cache[slot_mapping[t]] = workspace[t];
  for (int64_t l = 0; l < L; ++l) {
    int64_t r = 0;
    while (cu_seqlens_q[r + 1] <= logit_rows[l]) ++r;
    if (r >= R || positions[logit_rows[l]] != seq_lens[r] - 1) return 5;
    for (int64_t v = 0; v < 13; ++v) {
      int64_t total = 0;
      for (int64_t i = 0; i < seq_lens[r]; ++i)
        total += static_cast<int64_t>(cache[page_table[r * P + i / 4] * 4 + i % 4]) * (i + 2 + v);
      logits[l * 13 + v] = scale[v] * static_cast<float>(total % 101);
    }
  }
  return 0;
}
"""
SCALE = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1], np.float32)  # tokens 11 and 12 are never chosen


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    history = list(prompt)
    for _ in range(num_tokens):
        totals = [
            sum((token + 1) * (i + 2 + v) for i, token in enumerate(history)) % 101 for v in range(VOCAB_SIZE)
        ]
        history.append(int(np.argmax(np.array(totals, np.float32) * SCALE)))
    return history[len(prompt) :]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def save(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Artifact]:
    """An artifact of that program; its library says it was built for `features`, None leaves it out."""
    monkeypatch.setenv("OCTAVO_CACHE", str(cache))
    monkeypatch.delenv("OCTAVO_CPU_FEATURES", raising=False)

    def save(
        features: str | None = "portable", program: Program = PROGRAM, files: dict[str, bytes] = NO_FILES
    ) -> Artifact:
        source = SOURCE.replace("FEATURES", f'"{features or "portable"}"')
        content = {"kernels/program.cpp": source.encode()}
        if features is not None:
            library = host.build_shared_library(source, "portable")
            content |= {
                "kernels/program.so": library.read_bytes(),
                "kernels/features": f"{features}\n".encode(),
            }
        content |= files
        model = {
            "name": "sums", "vocab_size": VOCAB_SIZE, "num_layers": 1, "max_model_len": 40,
            "max_batch_tokens": 8, "eos_token_ids": [], "bos_token_id": None,
        }  # fmt: skip
        manifest = {"octavo_version": "0", "target": "cpu", "options": {}, "model": model, "provenance": {}}
        weights = {"scale": Weight("fp32", (VOCAB_SIZE,), SCALE)}
        return Artifact.open(
            Artifact.write(
                tmp_path / "model", manifest=manifest, program=program, weights=weights, files=content
            )
        )

    return save


Save = Callable[..., Artifact]
PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3]]


@pytest.mark.parametrize("num_pages", [8, 60])
def test_an_artifact_is_served_end_to_end(save: Save, num_pages: int) -> None:
    engine = Engine.from_artifact(save(), num_pages=num_pages, num_threads=2)
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=9))
    assert [list(answer.token_ids) for answer in answers] == [expected(prompt, 9) for prompt in PROMPTS]
    assert (engine.stats.num_preemptions > 0) == (num_pages == 8)
    assert isinstance(engine.runner, NativeRunner) and engine.runner.origin == "artifact"


def test_from_a_path_with_default_pages(save: Save) -> None:
    engine = Engine.from_artifact(str(save().path))
    assert engine.runner.num_pages == 8 * 40 // PAGE_SIZE + 1
    assert list(engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0].token_ids) == expected([1, 2], 3)


def test_a_library_for_a_better_cpu_is_built_again(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = save("avx2")
    monkeypatch.setenv("OCTAVO_CPU_FEATURES", "portable")
    built: list[tuple[str, str]] = []

    def build(source: str, features: str) -> Path:
        built.append((source, features))
        return host.build_shared_library(SOURCE.replace("FEATURES", '"portable"'), features)

    monkeypatch.setattr(model_runner, "build_shared_library", build)
    runner = NativeRunner(artifact, 10)
    assert built == [(SOURCE.replace("FEATURES", '"avx2"'), "portable")]
    assert runner.origin == "built for portable, as it was built for avx2, this CPU has portable"
    answers = Engine(runner, artifact.model).generate([[1, 2]], SamplingParams(max_tokens=3))
    assert list(answers[0].token_ids) == expected([1, 2], 3)


def test_without_a_library_it_is_built(save: Save) -> None:
    assert NativeRunner(save(None), 10).origin.endswith("as the artifact holds no built library")


def test_a_library_that_does_not_load_is_built_again(save: Save) -> None:
    artifact = save(
        None, files={"kernels/program.so": b"\x7fELF of another machine", "kernels/features": b"portable"}
    )
    assert "it does not load here" in NativeRunner(artifact, 10).origin


def test_no_compiler_is_a_clear_error_only_when_one_is_needed(
    save: Save, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with_library = save()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert NativeRunner(with_library, 10).origin == "artifact"
    monkeypatch.undo()
    without = save(None)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        ToolchainError,
        match=r"program\.so cannot be used \(the artifact holds no built library\).*found none; install",
    ):
        NativeRunner(without, 10)


def test_a_library_that_claims_features_it_should_not_have_is_refused(save: Save) -> None:
    artifact = save("neon", files={"kernels/features": b"portable"})
    with pytest.raises(ArtifactError, match=r"expected code for .* or less, got 'neon'"):
        NativeRunner(artifact, 10)


def test_a_library_without_the_entry_points_is_refused(save: Save) -> None:
    other = host.build_shared_library('extern "C" int f() { return 1; }', "portable").read_bytes()
    with pytest.raises(ArtifactError, match="expected the function octavo_step, got none"):
        NativeRunner(save(files={"kernels/program.so": other}), 10)


def test_an_artifact_for_a_gpu_is_refused(save: Save) -> None:
    artifact = save()
    files = {name: entry for name, entry in artifact.files.items() if name != "kernels/program.cpp"}
    gpu = replace(artifact, files=files, manifest={**artifact.manifest, "target": "b200"})
    with pytest.raises(
        ArtifactError, match=r"expected kernels/program\.cpp of a cpu artifact, got target b200"
    ):
        NativeRunner(gpu, 10)


def test_a_failing_step_says_at_which_sizes_and_ends_its_requests(save: Save) -> None:
    engine = Engine.from_artifact(save(), num_pages=10)
    with pytest.raises(
        ExecutionError,
        match=r"expected octavo_step to return 0, got 7 at T=3, R=1, L=1, P=1, N=0, num_pages=10",
    ):
        engine.generate([[1, 12, 1]], SamplingParams(max_tokens=2))
    assert engine.memory.pool.num_free == 9
    assert list(engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0].token_ids) == expected([1, 2], 3)


def test_other_threads_run_during_a_step(save: Save) -> None:
    engine = Engine.from_artifact(save(), num_pages=10)
    thread = threading.Thread(target=lambda: engine.generate([[11]], SamplingParams(max_tokens=1)))
    thread.start()
    ticks = 0
    while thread.is_alive():
        time.sleep(0.005)
        ticks += 1
    assert ticks > 10


def test_workspace_and_logits_grow_with_the_step(save: Save) -> None:
    engine = Engine.from_artifact(save(), num_pages=40, max_requests=8)
    runner = engine.runner
    assert isinstance(runner, NativeRunner)
    engine.generate([[1]], SamplingParams(max_tokens=1))
    small = (runner._workspace.nbytes, runner._outputs["logits"].nbytes)
    engine.generate([[1]] * 8, SamplingParams(max_tokens=2))
    assert (
        (runner._workspace.nbytes, runner._outputs["logits"].nbytes)
        == (8 * 4 + 64, 8 * VOCAB_SIZE * 4)
        > small
    )
    assert list(engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0].token_ids) == expected([1, 2], 3)


@pytest.mark.parametrize(("num_pages", "num_threads"), [(1, 1), (0, 1), (10, 0)])
def test_too_few_pages_or_threads_are_refused(save: Save, num_pages: int, num_threads: int) -> None:
    with pytest.raises(ExecutionError, match=r"expected at least (2 pages|1 thread)"):
        NativeRunner(save(), num_pages, num_threads)


def test_default_pages_follow_length_and_memory(save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact = save()
    assert page_bytes(artifact.program) == PAGE_SIZE * 4
    for free_bytes, pages in ((10**9, 81), (16 * 4 * 50, 50), (16 * 4 * 2, 2)):
        monkeypatch.setattr(model_runner, "available_memory", lambda free_bytes=free_bytes: free_bytes)
        assert default_num_pages(artifact) == pages
    monkeypatch.setattr(model_runner, "available_memory", lambda: 100)
    with pytest.raises(
        ExecutionError, match=r"room for 2 pages of 16 bytes in 25 bytes \(25% of free memory\), got 1"
    ):
        default_num_pages(artifact)


@pytest.mark.parametrize("size", [1, 63, 64, 1000])
def test_memory_is_aligned_and_zero(size: int) -> None:
    for _ in range(5):
        memory = aligned_zeros(size)
        assert memory.nbytes == size and memory.ctypes.data % 64 == 0 and not memory.any()


def test_use_of_a_tokenizer_can_be_declined(save: Save) -> None:
    artifact = save(files={"tokenizer/tokenizer.json": b"no tokenizer at all"})
    assert Engine.from_artifact(artifact, num_pages=9, use_tokenizer=False).tokenizer is None
    with pytest.raises(ArtifactError, match="expected a tokenizer that loads"):
        Engine.from_artifact(artifact, num_pages=9)
