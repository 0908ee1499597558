"""Ranks on GPUs, over drivers without one: segments, collectives, pieces of weights, loads and other experts."""

import hashlib
import json
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import Launched, RecordingDriver
from numpy.typing import NDArray

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import ExecutionError
from octavo.compiler.expert_placement import ExpertPlacement
from octavo.compiler.mesh import Mesh
from octavo.compiler.program import STEP_INPUTS, Buffer, ExpertLayer, Program, Shard, Step
from octavo.compiler.weights import Weight
from octavo.runtime.batch import Batch
from octavo.runtime.collectives import DeviceBytes
from octavo.runtime.cuda_rank_runner import CudaRankRunner
from octavo.runtime.cuda_runner import CudaRunner
from octavo.runtime.regions import Region

EXPERTS, VOCAB = 4, 3
WEIGHTS = np.array([10, 20, 30, 40], np.float32)
TABLES = np.array([0, 1, -1, -1, -1, -1, 0, 1], np.int64)  # ranks 0 and 1
ARGUMENTS = {
    "map_experts": ("input_ids", "table", "numbers", "T"),
    "parts": ("numbers", "down", "part", "T"),
    "give": ("total", "logit_rows", "logits", "L"),
}
BUFFERS = (
    *(Buffer(name, "input", dtype, shape) for name, (dtype, shape) in STEP_INPUTS.items()),
    Buffer("k_cache_0", "cache", "fp32", ("num_pages", 1, 4, 1)),
    Buffer("table", "weight", "i64", (EXPERTS,)),
    Buffer("down", "weight", "fp32", (2,)),
    Buffer("numbers", "workspace", "i64", ("T", 1), "0"),
    Buffer("part", "workspace", "fp32", ("T",), "64 * T"),
    Buffer("total", "workspace", "fp32", ("T",), "128 * T"),
    Buffer("logits", "output", "fp32", ("L", VOCAB)),
)
STEPS = (
    Step("map_experts", ARGUMENTS["map_experts"]),
    Step("parts", ARGUMENTS["parts"]),
    Step("all_reduce", ("part", "total"), axis="ep"),
    Step("give", ARGUMENTS["give"]),
)
CUBIN = b"\x7fELF"


def record(name: str) -> dict[str, Any]:
    parameters = [
        {"name": n, "kind": "scalar" if len(n) == 1 else "pointer", "type": "i32" if len(n) == 1 else "*i8",
         "divisible_by_16": False}
        for n in ARGUMENTS[name]
    ]  # fmt: skip
    return {
        "function": name, "arch": "sm_100a", "num_warps": 4, "num_ctas": 1, "shared_bytes": 0, "launch_pdl": False,
        "cooperative": False, "global_scratch": [0, 1], "profile_scratch": [0, 1], "parameters": parameters,
        "grid": [1, 1, 1], "cubin_sha256": hashlib.sha256(CUBIN).hexdigest(),
    }  # fmt: skip


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    files = {f"kernels/{name}.cubin": CUBIN for name in ARGUMENTS}
    files |= {f"kernels/{name}.json": json.dumps({"launch": record(name)}).encode() for name in ARGUMENTS}
    model = {
        "name": "ranks", "vocab_size": VOCAB, "num_layers": 1, "max_model_len": 40, "max_batch_tokens": 16,
        "eos_token_ids": [], "bos_token_id": None,
    }  # fmt: skip
    manifest = {"octavo_version": "0", "target": "b200", "options": {}, "model": model, "provenance": {}}
    shards = {
        "table": Shard(0, (((0, EXPERTS),), ((EXPERTS, 2 * EXPERTS),))), "down": Shard(0, (((0, 2),), ((2, 4),))),
    }  # fmt: skip
    layers = (ExpertLayer("table", ("down",)),)
    program = Program(BUFFERS, STEPS, "192 * T", 4, (None,), Mesh(ep=2), shards, layers)
    weights = {"table": Weight("i64", (2 * EXPERTS,), TABLES), "down": Weight("fp32", (EXPERTS,), WEIGHTS)}
    return Artifact.open(
        Artifact.write(tmp_path / "a", manifest=manifest, program=program, weights=weights, files=files)
    )


class Experts(RecordingDriver):
    """logit[v] of a token = weight of expert (token mod 4) + v."""

    is_running = False  # something that was launched and not waited for

    def launch(self, prepared: Launched, stream: int) -> None:
        super().launch(prepared, stream)
        self.is_running = True

    def synchronize(self, stream: int) -> None:
        super().synchronize(stream)
        self.is_running = False

    def execute(self, launched: Launched) -> None:
        values = dict(zip(ARGUMENTS[launched.function], launched.parameters, strict=False))
        count = struct.unpack("i", launched.parameters[3])[0]

        def view(name: str, dtype: str, size: int = count) -> NDArray[Any]:
            address = struct.unpack("Q", values[name])[0]
            return self.at(address, size * np.dtype(dtype).itemsize).view(dtype)

        if launched.function == "map_experts":
            view("numbers", "i8")[:] = view("table", "i8", EXPERTS)[view("input_ids", "i8") % EXPERTS]
        elif launched.function == "parts":
            numbers = view("numbers", "i8")
            view("part", "f4")[:] = np.where(numbers >= 0, view("down", "f4", 2)[numbers], 0)
        else:
            rows, total = view("logit_rows", "i8"), view("total", "f4", 16)
            view("logits", "f4", count * VOCAB)[:] = (total[rows][:, None] + np.arange(VOCAB)).reshape(-1)


class Together:
    """Sums on the host, of ranks that are threads."""

    def __init__(self) -> None:
        self.barrier, self.sent, self.given = threading.Barrier(2, timeout=10), {}, []  # type: ignore[var-annotated]

    def of(self, rank: int, driver: Experts) -> "Rank":
        return Rank(self, rank, driver)


class Rank:
    def __init__(self, together: Together, rank: int, driver: Experts) -> None:
        self.together, self.rank, self.driver = together, rank, driver

    def run(self, step: Step, inputs: Sequence[Region | None], outputs: Sequence[Region]) -> None:
        (x,), (result,) = inputs, outputs
        assert x is not None
        assert not self.driver.is_running, "kernels may still write what is sent"
        self.together.given.append((step.kernel, x.dtype, x.shape, x.device, result.shape))
        self.together.sent[self.rank] = self.driver.at(x.address, 4 * x.shape[0]).view("f4").copy()
        self.together.barrier.wait()
        total = self.together.sent[0] + self.together.sent[1]
        self.together.barrier.wait()
        self.driver.at(result.address, 4 * x.shape[0]).view("f4")[:] = total


@pytest.fixture
def runners(artifact: Artifact) -> tuple[list[CudaRankRunner], Together]:
    together, made = Together(), []
    for rank in range(2):
        driver = Experts()
        made.append(
            CudaRankRunner(
                artifact, together.of(rank, driver), rank, agree=lambda pages: min(pages, 7), driver=driver
            )
        )
    return made, together


def batch(ids: list[int]) -> Batch:
    count = len(ids)
    return Batch(
        input_ids=np.array(ids), positions=np.arange(count), slot_mapping=np.arange(4, 4 + count),
        page_table=np.array([[1, 2]], np.int32), seq_lens=np.array([count], np.int32),
        cu_seqlens_q=np.array([0, count], np.int32), logit_rows=np.arange(count),
    )  # fmt: skip


def step(runners: list[CudaRankRunner], ids: list[int]) -> list[NDArray[np.float32]]:
    results: list[Any] = [None, None]

    def run(rank: int) -> None:
        results[rank] = runners[rank].run(batch(ids)).copy()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return results


def driver_of(runner: CudaRankRunner) -> Experts:
    driver = runner._driver
    assert isinstance(driver, Experts)
    return driver


IDS = [0, 5, 2, 3, 3]
WANTED = WEIGHTS[np.array(IDS) % EXPERTS][:, None] + np.arange(VOCAB)


def test_every_rank_has_the_sum_of_what_all_made(runners: tuple[list[CudaRankRunner], Together]) -> None:
    made, together = runners
    assert [runner.num_pages for runner in made] == [7, 7]
    for logits in step(made, IDS):
        assert np.array_equal(logits, WANTED)
    assert together.given == [("all_reduce", "fp32", (5,), "cuda", (5,))] * 2
    for runner in made:
        names = [launched.function for launched in driver_of(runner).launches]
        assert names == ["map_experts", "parts", "give"], "each once"
    for logits in step(made, IDS[:1]):  # a step of one token is not padded
        assert np.array_equal(logits, WANTED[:1])


def test_loads_of_experts(runners: tuple[list[CudaRankRunner], Together]) -> None:
    made, _ = runners
    with pytest.raises(ExecutionError, match="expected count_experts before"):
        made[0].expert_loads()
    for runner in made:
        runner.count_experts()
    step(made, IDS)
    assert [runner.expert_loads().tolist() for runner in made] == [[[1, 1, 0, 0]], [[0, 0, 1, 2]]]


def test_other_experts_give_the_same(runners: tuple[list[CudaRankRunner], Together]) -> None:
    made, _ = runners
    for runner in made:
        runner.place_experts([ExpertPlacement(((0, 3), (1, 2)))])
    held = [driver_of(r).at(r.addresses["down"], 8).view("f4").tolist() for r in made]
    assert held == [[10, 40], [20, 30]]
    for logits in step(made, IDS):
        assert np.array_equal(logits, WANTED)


def test_one_rank_alone_says_how_to_start_all(artifact: Artifact) -> None:
    runner = CudaRunner(artifact, 4, driver=Experts(), graphs=False, rank=1)
    with pytest.raises(ExecutionError, match=r"rank 1 of 2 .* torchrun --nproc-per-node 2"):
        runner.run(batch(IDS))


def test_memory_of_a_gpu_as_torch_takes_it() -> None:
    """torch reads this attribute; what it makes of it was not run here."""
    shown = DeviceBytes(Region("bf16", (3, 8), 4096, "cuda")).__cuda_array_interface__
    assert (shown["shape"], shown["typestr"], shown["data"]) == ((48,), "|u1", (4096, False))
