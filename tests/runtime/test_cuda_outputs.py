"""Features go to a GPU with a step and hidden states come from there, padded or not, over a driver without a GPU."""

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import Launched, RecordingDriver
from numpy.typing import NDArray

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import ExecutionError
from octavo.compiler.program import STEP_INPUTS, Buffer, Program, Step
from octavo.runtime.batch import Batch
from octavo.runtime.cuda_runner import CudaRunner

NAMES = ("input_ids", "features", "logits", "features_0", "features_1", "T", "L")
BUFFERS = (
    Buffer("input_ids", "input", *STEP_INPUTS["input_ids"]),
    Buffer("features", "input", "bf16", ("T", 3)),
    Buffer("k_cache_0", "cache", "fp32", ("num_pages", 1, 4, 1)),
    Buffer("logits", "output", "fp32", ("L", 5)),
    Buffer("features_0", "output", "bf16", ("T", 3)),
    Buffer("features_1", "output", "bf16", ("T", 2)),
)
CUBIN = b"\x7fELF"


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    parameters = [
        {"name": n, "kind": "scalar", "type": "i32", "divisible_by_16": False}
        if len(n) == 1
        else {"name": n, "kind": "pointer", "type": "*i8", "divisible_by_16": True}
        for n in NAMES
    ]
    record = {
        "function": "copy", "arch": "sm_100a", "num_warps": 4, "num_ctas": 1, "shared_bytes": 0, "launch_pdl": False,
        "cooperative": False, "global_scratch": [0, 1], "profile_scratch": [0, 1], "parameters": parameters,
        "grid": [1, 1, 1], "cubin_sha256": hashlib.sha256(CUBIN).hexdigest(),
    }  # fmt: skip
    model = {
        "name": "copies", "vocab_size": 5, "num_layers": 1, "max_model_len": 40, "max_batch_tokens": 16,
        "eos_token_ids": [], "bos_token_id": None,
    }  # fmt: skip
    manifest = {"octavo_version": "0", "target": "b200", "options": {}, "model": model, "provenance": {}}
    files = {"kernels/copy.cubin": CUBIN, "kernels/copy.json": json.dumps({"launch": record}).encode()}
    program = Program(BUFFERS, (Step("copy", NAMES),), 64, 4)
    made = Artifact.write(tmp_path / "a", manifest=manifest, program=program, weights={}, files=files)
    return Artifact.open(made)


class CopyingDriver(RecordingDriver):
    """features_0 is what a token's features are, features_1 its id and the number of tokens; logits are ones."""

    def execute(self, launched: Launched) -> None:
        values: dict[str, Any] = dict(zip(NAMES, launched.parameters, strict=False))
        tokens, rows = (struct.unpack("i", values[name])[0] for name in "TL")

        def view(name: str, dtype: str, count: int) -> NDArray[Any]:
            size = count * np.dtype(dtype).itemsize
            return self.at(struct.unpack("Q", values[name])[0], size).view(dtype)

        view("features_0", "u2", tokens * 3)[:] = view("features", "u2", tokens * 3)
        second = view("features_1", "u2", tokens * 2).reshape(tokens, 2)
        second[:, 0], second[:, 1] = view("input_ids", "i8", tokens), tokens
        view("logits", "f4", rows * 5)[:] = 1


def batch(ids: list[int], num_requests: int, features: NDArray[Any] | None) -> Batch:
    count = len(ids)
    ends = np.linspace(0, count, num_requests + 1).astype(np.int32)
    return Batch(
        input_ids=np.array(ids, np.int64), positions=np.zeros(count, np.int64), slot_mapping=np.full(count, 4),
        page_table=np.ones((num_requests, 1), np.int32), seq_lens=np.ones(num_requests, np.int32),
        cu_seqlens_q=ends, logit_rows=ends[1:].astype(np.int64) - 1, features=features,
    )  # fmt: skip


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize(("count", "num_requests", "seen"), [(3, 3, 4), (5, 2, 5), (16, 2, 16)])
def test_features_of_every_token_go_and_come(
    artifact: Artifact, graphs: bool, count: int, num_requests: int, seen: int
) -> None:
    """seen: tokens of the step as it is padded."""
    runner = CudaRunner(artifact, 10, max_requests=4, graphs=graphs, driver=CopyingDriver())
    assert runner.features is None  # nothing ran
    for seed in range(2):
        given = np.random.default_rng(seed).integers(0, 2**16, (count, 3)).astype(np.uint16)
        ids = list(range(seed + 1, seed + 1 + count))
        assert (runner.run(batch(ids, num_requests, given)) == 1).all()
        found = runner.features
        assert found is not None and found.dtype == np.uint16 and found.shape == (count, 5)
        assert np.array_equal(found[:, :3], given)
        assert found[:, 3].tolist() == ids and set(found[:, 4].tolist()) == {seen}


def test_a_step_without_them_is_refused(artifact: Artifact) -> None:
    runner = CudaRunner(artifact, 10, driver=CopyingDriver())
    with pytest.raises(
        ExecutionError, match=r"expected contiguous features of its target, uint16 \(2, 3\), got none"
    ):
        runner.run(batch([1, 2], 2, None))


def test_memory_is_there_for_the_largest_step_and_given_back(artifact: Artifact) -> None:
    driver = CopyingDriver()
    runner = CudaRunner(artifact, 10, max_requests=4, driver=driver)
    pieces = len(driver.allocated)
    runner.run(batch(list(range(16)), 4, np.zeros((16, 3), np.uint16)))
    assert len(driver.allocated) == pieces
    del runner
    assert not driver.allocated
