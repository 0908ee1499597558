"""CudaRunner over a driver without a GPU, whose one kernel is Python: memory, padding, graphs and their limits."""

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import B200, H100, POISON, Launched, RecordingDriver
from numpy.typing import NDArray

from octavo.compiler import cli
from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import ArtifactError, ExecutionError, MissingDependencyError, OptionError
from octavo.compiler.program import STEP_INPUTS, Buffer, Program, Step
from octavo.compiler.weights import Weight
from octavo.runtime import cuda_runner
from octavo.runtime.batch import Batch
from octavo.runtime.cuda_driver import CudaDriver
from octavo.runtime.cuda_runner import CudaRunner, buckets, largest_steps
from octavo.runtime.engine import Engine
from octavo.runtime.open_runner import open_runner
from octavo.runtime.page_moves import Move
from octavo.runtime.sampling_params import SamplingParams

VOCAB, PAGE_SIZE = 13, 4
NAMES = (*STEP_INPUTS, "scale", "k_cache_0", "hidden", "logits", "T", "R", "L", "P")
BUFFERS = (
    *(Buffer(name, "input", dtype, shape) for name, (dtype, shape) in STEP_INPUTS.items()),
    Buffer("scale", "weight", "fp32", (VOCAB,)),
    Buffer("k_cache_0", "cache", "fp32", ("num_pages", 1, PAGE_SIZE, 1)),
    Buffer("hidden", "workspace", "fp32", ("T",), "64 * T"),
    Buffer("logits", "output", "fp32", ("L", VOCAB)),
)
STEPS = (
    Step("sums", NAMES, ("1", "1", "1")),
    Step("sums", NAMES, ("L // 100", "1", "1")),  # an empty grid, not launched
    Step("absent_in_decode", NAMES, ("1", "1", "1"), when="T > R + 1000"),
)
CUBIN = b"\x7fELF"
SCALE = np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, -1, -1], np.float32)


def launch_record(function: str) -> dict[str, Any]:
    parameters = [
        {"name": name, "kind": "scalar", "type": "i32", "divisible_by_16": False}
        if len(name) == 1
        else {"name": name, "kind": "pointer", "type": "*i8", "divisible_by_16": True}
        for name in NAMES
    ]
    return {
        "function": function, "arch": "sm_100a", "num_warps": 4, "num_ctas": 1, "shared_bytes": 0, "launch_pdl": False,
        "cooperative": False, "global_scratch": [0, 1], "profile_scratch": [0, 1], "parameters": parameters,
        "grid": [1, 1, 1], "cubin_sha256": hashlib.sha256(CUBIN).hexdigest(),
    }  # fmt: skip


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    files = {}
    for name in ("sums", "absent_in_decode"):
        files[f"kernels/{name}.cubin"] = CUBIN
        files[f"kernels/{name}.json"] = json.dumps({"launch": launch_record(name)}).encode()
    model = {
        "name": "sums", "vocab_size": VOCAB, "num_layers": 1, "max_model_len": 40, "max_batch_tokens": 16,
        "eos_token_ids": [], "bos_token_id": None,
    }  # fmt: skip
    manifest = {"octavo_version": "0", "target": "b200", "options": {}, "model": model, "provenance": {}}
    program = Program(BUFFERS, STEPS, "128 * T + R * P * 0", PAGE_SIZE)
    weights = {"scale": Weight("fp32", (VOCAB,), SCALE)}
    return Artifact.open(
        Artifact.write(tmp_path / "a", manifest=manifest, program=program, weights=weights, files=files)
    )


class SumsDriver(RecordingDriver):
    """logit[v] of a wanted row = scale[v] * (sum of (token + 1) * (position + 2 + v) over its history) mod 101."""

    def execute(self, launched: Launched) -> None:
        assert launched.function == "sums"
        values = dict(zip(NAMES, launched.parameters, strict=False))
        assert launched.parameters[len(NAMES) :] == (bytes(8), bytes(8))
        dims = {name: struct.unpack("i", values[name])[0] for name in "TRLP"}
        T, R, L, P = dims.values()

        def view(name: str, dtype: str, count: int) -> NDArray[Any]:
            address = struct.unpack("Q", values[name])[0]
            return self.at(address, count * np.dtype(dtype).itemsize).view(dtype)

        ids, positions, slots = (view(name, "i8", T) for name in ("input_ids", "positions", "slot_mapping"))
        table, lengths, cu = (
            view(n, "i4", c) for n, c in (("page_table", R * P), ("seq_lens", R), ("cu_seqlens_q", R + 1))
        )
        rows, scale = view("logit_rows", "i8", L), view("scale", "f4", VOCAB)
        hidden, logits = view("hidden", "f4", T), view("logits", "f4", L * VOCAB).reshape(L, VOCAB)
        address = struct.unpack("Q", values["k_cache_0"])[0]
        cache = self.at(address).view("f4")
        assert ((ids >= 0) & (ids < VOCAB)).all() and (positions >= 0).all()
        hidden[:] = ids + 1
        cache[slots[slots >= 0]] = hidden[slots >= 0]
        for index, row in enumerate(rows.tolist()):
            request = int(np.searchsorted(cu, row, side="right")) - 1
            assert positions[row] == lengths[request] - 1
            i = np.arange(lengths[request])
            history = cache[table.reshape(R, P)[request, i // PAGE_SIZE] * PAGE_SIZE + i % PAGE_SIZE]
            assert np.isfinite(history).all()
            sums = [int((history.astype(np.int64) * (i + 2 + v)).sum()) % 101 for v in range(VOCAB)]
            logits[index] = scale * np.array(sums, np.float32)


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    history = list(prompt)
    for _ in range(num_tokens):
        sums = [sum((t + 1) * (i + 2 + v) for i, t in enumerate(history)) % 101 for v in range(VOCAB)]
        history.append(int(np.argmax(np.array(sums, np.float32) * SCALE)))
    return history[len(prompt) :]


def poison_pages(runner: CudaRunner, driver: RecordingDriver) -> None:
    """Every page but the null page."""
    cache = driver.at(runner.addresses["k_cache_0"])
    cache[PAGE_SIZE * 4 :] = POISON


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 0, 1, 2, 3, 4, 5, 6], [1, 2, 3], [7, 7]]


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("num_pages", [10, 80])
def test_an_artifact_is_served_end_to_end(artifact: Artifact, graphs: bool, num_pages: int) -> None:
    driver = SumsDriver()
    runner = CudaRunner(artifact, num_pages, max_requests=6, graphs=graphs, driver=driver)
    poison_pages(runner, driver)
    engine = Engine(runner, artifact.model, max_requests=6)
    answers = engine.generate(PROMPTS, SamplingParams(max_tokens=9))
    assert [list(answer.token_ids) for answer in answers] == [expected(prompt, 9) for prompt in PROMPTS]
    assert (engine.stats.num_preemptions > 0) == (num_pages == 10)
    assert (driver.num_graph_launches > 4) == graphs
    assert not driver.at(runner.addresses["k_cache_0"], PAGE_SIZE * 4).any(), "the null page is written"
    assert driver.uploads == engine.stats.num_steps + 1  # one for each step, one for the weights


def test_equal_steps_of_every_bucket(artifact: Artifact) -> None:
    """A request's logits do not depend on how many others pad the step; a graph is captured once for a bucket."""
    driver = SumsDriver()
    runner = CudaRunner(artifact, 80, max_requests=10, driver=driver)
    engine = Engine(runner, artifact.model, max_requests=10)
    for count in (1, 3, 2, 4, 5, 8, 10):
        answers = engine.generate([[4]] * count, SamplingParams(max_tokens=2))
        assert {answer.token_ids for answer in answers} == {tuple(expected([4], 2))}
    sizes = {launched.launch.grid for launched in driver.launches}
    assert sizes == {(1, 1, 1)}
    assert len(driver.graphs) == 5  # 1, 2, 4, 8 and 10 requests, one page each
    engine.generate([[1] * 15], SamplingParams(max_tokens=7))
    assert len(driver.graphs) == 6 + 1  # and 1 request of 4 pages, then of 8


def test_logits_of_some_requests_of_a_padded_step(artifact: Artifact) -> None:
    runner = CudaRunner(artifact, 10, max_requests=4, driver=SumsDriver())

    def run(rows: list[int]) -> NDArray[np.float32]:
        count = 3
        batch = Batch(
            input_ids=np.array([4, 5, 6]), positions=np.zeros(count, np.int64),
            slot_mapping=np.arange(1, 1 + count) * PAGE_SIZE,
            page_table=np.arange(1, 1 + count, dtype=np.int32)[:, None], seq_lens=np.ones(count, np.int32),
            cu_seqlens_q=np.arange(count + 1, dtype=np.int32), logit_rows=np.array(rows, np.int64),
        )  # fmt: skip
        return runner.run(batch).copy()

    whole = run([0, 1, 2])
    assert len({row.tobytes() for row in whole}) == 3
    assert np.array_equal(run([2]), whole[2:]) and np.array_equal(run([0, 2]), whole[[0, 2]])
    assert run([]).shape == (0, VOCAB)


def test_tables_of_page_groups_are_padded_too(artifact: Artifact) -> None:
    runner = CudaRunner(artifact, 10, max_requests=4, driver=SumsDriver())
    batch = Batch(
        input_ids=np.full(3, 4), positions=np.full(3, 10), slot_mapping=np.full(3, 14),
        page_table=np.array([[1, 2, 3]] * 3, np.int32), seq_lens=np.full(3, 11, np.int32),
        cu_seqlens_q=np.arange(4, dtype=np.int32), logit_rows=np.arange(3),
        windowed=((np.array([[0, 5, 6]] * 3, np.int32), np.full(3, 26)),),
    )  # fmt: skip
    inputs, dims = runner._padded(batch, batch.dims)
    assert (dims["T"], dims["P"]) == (4, 4)
    assert inputs["page_table"].tolist() == [[1, 2, 3, 0]] * 3 + [[0] * 4]
    assert inputs["page_table_1"].tolist() == [[0, 5, 6, 0]] * 3 + [[0] * 4]
    assert inputs["slot_mapping"].tolist() == [14] * 3 + [-1]
    assert inputs["slot_mapping_1"].tolist() == [26] * 3 + [-1]
    assert inputs["seq_lens"].tolist() == [11] * 3 + [1]
    assert set(inputs) == {*STEP_INPUTS, "page_table_1", "slot_mapping_1"}


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (20, [1, 2, 4, 8, 16, 20]),
    ],
)
def test_buckets(most: int, sizes: list[int]) -> None:
    assert buckets(most) == sizes
    assert buckets(100)[-4:] == [64, 80, 96, 100]


def test_few_graphs_are_kept(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runner, "MAX_GRAPHS", 2)
    monkeypatch.setattr(cuda_runner, "MAX_PREPARED", 1)
    driver = SumsDriver()
    runner = CudaRunner(artifact, 80, max_requests=4, driver=driver)
    engine = Engine(runner, artifact.model, max_requests=4)
    for count in (1, 2, 4, 1, 2):
        answers = engine.generate([[1, 2, 3]] * count, SamplingParams(max_tokens=3))
        assert {answer.token_ids for answer in answers} == {tuple(expected([1, 2, 3], 3))}
        assert len(driver.graphs) <= 2


def test_a_larger_step_than_planned_moves_memory_and_forgets_graphs(artifact: Artifact) -> None:
    driver = SumsDriver()
    runner = CudaRunner(artifact, 80, max_requests=2, max_batch_tokens=4, driver=driver)
    engine = Engine(runner, artifact.model, max_requests=12)
    assert list(engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0].token_ids) == expected([1, 2], 3)
    (first,), pieces = driver.graphs, len(driver.allocated)
    answers = engine.generate([[1, 2, 3]] * 12, SamplingParams(max_tokens=3))
    assert {answer.token_ids for answer in answers} == {tuple(expected([1, 2, 3], 3))}
    assert first not in driver.graphs and len(driver.allocated) == pieces
    assert list(engine.generate([[1, 2]], SamplingParams(max_tokens=3))[0].token_ids) == expected([1, 2], 3)


def test_default_pages_fit_into_free_memory(artifact: Artifact) -> None:
    large = SumsDriver()
    runner = CudaRunner(artifact, max_requests=4, driver=large)
    assert runner.num_pages == 4 * 10 + 1
    others = sum(array.nbytes for array in large.allocated.values()) - 16 * runner.num_pages
    small = SumsDriver(replace(B200, memory_bytes=others + 16 * 20))
    assert CudaRunner(artifact, max_requests=4, driver=small).num_pages == 18
    none = SumsDriver(replace(B200, memory_bytes=others + 16 * 2))
    with pytest.raises(
        ExecutionError, match=r"room for 2 pages of 16 bytes in 90% of 32 free bytes of NVIDIA"
    ):
        CudaRunner(artifact, max_requests=4, driver=none)


@pytest.mark.parametrize("graphs", [True, False])
def test_pages_move_between_steps_on_the_stream_of_the_steps(artifact: Artifact, graphs: bool) -> None:
    """Out of page 1, which another takes at once, and in again elsewhere: the request goes on as if nothing were."""
    driver = SumsDriver()
    runner = CudaRunner(artifact, 10, max_requests=4, num_host_pages=1, graphs=graphs, driver=driver)
    assert (runner.num_host_pages, runner.page_windows, runner.page_bytes) == (1, (None,), 16)

    def run(token: int, position: int, page: int) -> NDArray[np.float32]:
        batch = Batch(
            input_ids=np.array([token]), positions=np.array([position]),
            slot_mapping=np.array([page * PAGE_SIZE + position]), page_table=np.array([[page]], np.int32),
            seq_lens=np.array([position + 1], np.int32), cu_seqlens_q=np.array([0, 1], np.int32),
            logit_rows=np.array([0], np.int64),
        )  # fmt: skip
        return runner.run(batch).copy()

    run(4, 0, 1)
    run(5, 1, 1)
    expected = run(6, 2, 1)
    runner.move_pages([Move("out", 1, 0), Move("copy", 3, 1)])
    run(9, 0, 1)
    runner.move_pages([Move("in", 0, 7)])
    assert np.array_equal(run(6, 2, 7), expected)
    assert len({stream for _, stream in driver.queued}) == 1
    launch = "launch_graph" if graphs else "launch"
    names = [name for name, _ in driver.queued if name in ("copy", launch)]
    assert names[-5:] == ["copy", "copy", launch, "copy", launch]


def test_all_memory_is_given_back(artifact: Artifact) -> None:
    driver = SumsDriver()
    runner = CudaRunner(artifact, 10, driver=driver)
    Engine(runner, artifact.model).generate([[1, 2]], SamplingParams(max_tokens=3))
    assert driver.allocated and driver.pinned and driver.graphs
    runner.close()
    assert not driver.allocated and not driver.pinned and not driver.graphs
    runner.close()
    CudaRunner(artifact, 10, driver=driver)  # dropped at once
    assert not driver.allocated and not driver.pinned and not driver.is_closed  # it is the caller's


def test_a_driver_of_its_own_is_closed(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SumsDriver()
    monkeypatch.setattr(cuda_runner, "CudaDriver", lambda: driver)
    CudaRunner(artifact, 10).close()
    assert driver.is_closed and not driver.allocated


def test_closing_after_a_fault_says_nothing(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SumsDriver()
    runner = CudaRunner(artifact, 10, driver=driver)

    def fault(address: int) -> None:
        raise ExecutionError("cuMemFree_v2: a fault")

    monkeypatch.setattr(driver, "free", fault)
    runner.close()


def test_weights_larger_than_the_staging_memory(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.runtime.cuda_memory.STAGING_BYTES", 20)
    driver, seen = SumsDriver(), []
    runner = CudaRunner(artifact, 10, driver=driver, progress=lambda *step: seen.append(step))
    assert driver.at(runner.addresses["scale"], SCALE.nbytes).view(np.float32).tolist() == SCALE.tolist()
    assert seen == [("scale", 20, 52), ("scale", 40, 52), ("scale", 52, 52)]
    assert driver.waits == 1  # the third piece reuses the memory of the first


@pytest.mark.parametrize("graphs", [True, False])
def test_a_failed_launch_names_its_kernel_and_the_runner_goes_on(artifact: Artifact, graphs: bool) -> None:
    driver = SumsDriver()
    runner = CudaRunner(artifact, 10, driver=driver, graphs=graphs)
    engine = Engine(runner, artifact.model)
    engine.add_request([1, 2], SamplingParams(max_tokens=4))
    engine.step()
    driver.fail = ExecutionError("cuLaunchKernelEx: no")
    with pytest.raises(ExecutionError, match=r"^sums: cuLaunchKernelEx: no"):
        engine.step()
    assert not driver.graphs
    tokens = [token.token_id for _ in range(9) for token in engine.step()]
    assert tokens == expected([1, 2], 4)[1:]


def test_options_that_cannot_be(artifact: Artifact) -> None:
    with pytest.raises(OptionError, match="expected 1 request and 1 token or more, got 0 and 16"):
        CudaRunner(artifact, 10, max_requests=0, driver=SumsDriver())
    with pytest.raises(ExecutionError, match="expected at least 2 pages"):
        CudaRunner(artifact, 1, driver=SumsDriver())


def test_another_gpu_is_refused(artifact: Artifact) -> None:
    with pytest.raises(ArtifactError, match=r"sums\.cubin: expected a GPU of sm_100a, got NVIDIA H100"):
        CudaRunner(artifact, 10, driver=SumsDriver(H100))


def test_a_record_that_says_nothing(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Artifact, "read", lambda self, name: b"{}")
    with pytest.raises(ArtifactError, match=r"sums\.json: expected a launch record, got 'launch'"):
        CudaRunner(artifact, 10, driver=SumsDriver())


@pytest.mark.parametrize("open_it", [open_runner, Engine.from_artifact])
def test_without_a_driver(
    artifact: Artifact, open_it: Callable[[Artifact], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_runner, "CudaDriver", lambda: CudaDriver(library="libnone.so.1"))
    with pytest.raises(
        MissingDependencyError,
        match=r"expected NVIDIA's driver library libnone\.so\.1, got none .*compile with",
    ):
        open_it(artifact)


def test_octavo_run_says_what_is_missing(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_runner, "CudaDriver", lambda: CudaDriver(library="libnone.so.1"))
    with pytest.raises(SystemExit) as end:
        cli.main(["run", str(artifact.path), "1 2"])
    out, err = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert err.startswith(
        "octavo: MissingDependencyError: GPU: expected NVIDIA's driver library libnone.so.1, got"
    )
    assert "compile with target='cpu'" in err


def test_memory_is_planned_for_the_tokens_of_all_ranks_with_requests_of_their_own() -> None:
    alone, shared = (list(largest_steps(16, 2, 3, dp)) for dp in (1, 4))
    assert [step["N"] for step in alone] == [16, 16] and [step["N"] for step in shared] == [64, 64]
    assert [{**step, "N": 16} for step in shared] == alone
