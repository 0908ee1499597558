"""Tuning with a driver that has no GPU: what is launched, whose time wins, and what the artifact holds afterwards."""

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cuda import B200, H100, RecordingDriver
from gpu_artifact import FEW, LAYERS, records, write_gpu_artifact

from octavo.compiler.artifact import Artifact
from octavo.compiler.commands import tune as command
from octavo.compiler.errors import ArtifactError, OptionError
from octavo.compiler.step_cost import LOSERS
from octavo.compiler.tune import REPEATS, WARM_UP, measure, step_inputs, with_winners
from octavo.runtime.cuda_driver import CudaDriver

Run = Callable[..., tuple[int, str, str]]
LOSER = "linear_few_rows__bf16_n4096_k4096_m16__dddddddddd"
SMALL = replace(B200, l2_bytes=4096, memory_bytes=2**30)


class TimedDriver(RecordingDriver):
    """Every launch takes what `ms` says of its function."""

    def __init__(self, ms: dict[str, float], device: Any = SMALL) -> None:
        super().__init__(device)
        self.ms = ms

    def elapsed_ms(self, start: int, end: int) -> float:
        return self.ms[self.launches[-1].function]

    def close(self) -> None:
        """As CudaDriver has it."""


def launchable(name: str, metadata: dict[str, Any], *parameters: str) -> dict[str, Any]:
    """Metadata with the launch record of a kernel whose cubin is its name."""
    kinds = [{"name": parameter, "kind": "pointer"} for parameter in parameters]
    launch = {
        **metadata["launch"], "function": name, "arch": "sm_100a", "num_ctas": 1, "launch_pdl": False,
        "cooperative": False, "grid": metadata["work"]["grid"], "parameters": kinds, "global_scratch": [0, 1],
        "profile_scratch": [0, 1], "cubin_sha256": hashlib.sha256(name.encode()).hexdigest(),
    }  # fmt: skip
    return {**metadata, "launch": launch}


@pytest.fixture
def artifact(tmp_path: Path) -> Artifact:
    """FEW has a loser, with another grid."""
    made = deepcopy(records())
    made[FEW] = launchable(FEW, made[FEW], "x_desc", "out_ptr")
    made[FEW]["choice"]["losers"] = [{"name": LOSER}]
    loser = deepcopy(made[FEW])
    loser["work"]["grid"] = ["64", "1", "1"]
    loser["choice"] = {"numbers": "BLOCK_N=64", "refused": []}
    loser = launchable(LOSER, loser, "x_desc", "out_ptr")
    for name in set(made) - {FEW}:
        made[name]["choice"]["losers"] = []
    files = {f"kernels/{FEW}.{ending}": FEW.encode() for ending in ("cubin", "py")}
    files |= {f"{LOSERS}/{LOSER}.{ending}": LOSER.encode() for ending in ("cubin", "py")}
    files[f"{LOSERS}/{LOSER}.json"] = json.dumps(loser).encode()
    return Artifact.open(write_gpu_artifact(tmp_path / "b200.octavo", made, files))


def silent(name: str, done: int, total: int) -> None:
    pass


def test_the_faster_form_wins_and_replaces_the_chosen_one(artifact: Artifact) -> None:
    driver = TimedDriver({FEW: 0.010, LOSER: 0.008})
    (tuned,) = measure(artifact, driver, silent)
    assert tuned.winner.name == LOSER
    assert tuned.winner.us == dict.fromkeys(
        [f"decode {n} at {c}" for c in ("1K", "8K") for n in (1, 16)], 8.0
    )
    assert len(driver.launches) == 2 * 4 * (WARM_UP + REPEATS)
    assert {launched.launch.grid for launched in driver.launches if launched.function == LOSER} == {
        (64, 1, 1)
    }
    assert driver.allocated == {}

    with_winners(artifact, [tuned], driver)
    after = Artifact.open(artifact.path)
    assert [step.kernel for step in after.program.steps].count(LOSER) == LAYERS
    assert FEW not in {step.kernel for step in after.program.steps}
    assert next(step.grid for step in after.program.steps if step.kernel == LOSER) == ("64", "1", "1")
    assert after.read(f"kernels/{LOSER}.cubin") == LOSER.encode()
    assert after.read(f"{LOSERS}/{FEW}.cubin") == FEW.encode() and f"kernels/{FEW}.json" not in after.files
    choice = json.loads(after.read(f"kernels/{LOSER}.json"))["choice"]
    assert choice["measured_on"] == "NVIDIA B200" and choice["losers"] == [
        {"name": FEW, "mean_us": pytest.approx(10)}
    ]
    report = json.loads(after.read("report.json"))
    assert (
        report["tuning"]["device"]["clock_khz"] == 1_850_000
        and report["tuning"]["device"]["driver"] == 13_000
    )
    assert report["tuning"]["kernels"][0]["winner"] == LOSER
    assert LOSER in [row["name"] for row in report["kernels"]]
    assert after.manifest["provenance"]["tuned_on"] == "NVIDIA B200"


def test_a_tuned_artifact_can_be_tuned_again_and_shown(artifact: Artifact, run: Run) -> None:
    driver = TimedDriver({FEW: 0.010, LOSER: 0.008})
    with_winners(artifact, measure(artifact, driver, silent), driver)
    back = TimedDriver({FEW: 0.005, LOSER: 0.008})
    after = Artifact.open(artifact.path)
    with_winners(after, measure(after, back, silent), back)
    kernels = {step.kernel for step in Artifact.open(artifact.path).program.steps}
    assert FEW in kernels and LOSER not in kernels
    assert run("kernels", artifact.path)[0] == 0


def test_equal_times_leave_the_form_that_was_chosen(artifact: Artifact) -> None:
    (tuned,) = measure(artifact, TimedDriver({FEW: 0.01, LOSER: 0.00995}), silent)
    assert tuned.winner.name == FEW


def test_another_gpu_and_artifacts_without_forms_are_refused(
    artifact: Artifact, tmp_path: Path, chat_artifact: Path
) -> None:
    with pytest.raises(ArtifactError, match=r"expected a GPU of sm_100a, got NVIDIA H100"):
        measure(artifact, TimedDriver({}, replace(H100, l2_bytes=4096)), silent)
    plain = deepcopy(records())
    for record in plain.values():
        record["choice"]["losers"] = []
    path = write_gpu_artifact(tmp_path / "plain.octavo", plain)
    with pytest.raises(OptionError, match="expected kernels of which several forms were built, got none"):
        measure(Artifact.open(path), TimedDriver({}), silent)
    with pytest.raises(OptionError, match="expected an artifact for a GPU, got one for cpu"):
        measure(Artifact.open(chat_artifact), TimedDriver({}), silent)


def test_inputs_of_a_step_are_those_of_a_scheduler() -> None:
    dims = {"T": 6, "R": 2, "L": 2, "S": 40, "P": 2}
    inputs = step_inputs(dims, 16)
    assert inputs["page_table"].tolist() == [[1, 2], [3, 4]]
    assert inputs["seq_lens"].tolist() == [20, 20] and inputs["cu_seqlens_q"].tolist() == [0, 3, 6]
    assert inputs["positions"].tolist() == [17, 18, 19] * 2
    assert inputs["slot_mapping"].tolist() == [33, 34, 35, 65, 66, 67]
    assert np.unique(inputs["slot_mapping"]).size == 6


def test_the_command(artifact: Artifact, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CudaDriver", lambda: TimedDriver({FEW: 0.010, LOSER: 0.008}))
    code, out, err = run("tune", artifact.path)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith("measured on NVIDIA B200 (1850 MHz, memory 3996 MHz, CUDA 13)")
    assert [line.split()[-1] for line in lines[-2:]] == ["10.00", "8.00"] and lines[-1].lstrip().startswith(
        "*"
    )
    monkeypatch.setattr(command, "CudaDriver", lambda: TimedDriver({FEW: 0.010, LOSER: 0.008}))
    facts = json.loads(run("tune", artifact.path, "--json")[1])
    assert facts["device"]["name"] == "NVIDIA B200" and facts["kernels"][0]["winner"] == LOSER


def test_the_command_without_a_gpu_says_what_it_needs(
    artifact: Artifact, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "CudaDriver", lambda: CudaDriver(library="libcuda-of-nobody.so"))
    code, out, err = run("tune", artifact.path)
    assert (code, out) == (2, "") and "MissingDependencyError" in err and "NVIDIA GPU" in err
