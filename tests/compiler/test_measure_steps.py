import shutil
from pathlib import Path

import numpy as np

from octavo.compiler.artifact import STEP_TIMES, Artifact
from octavo.compiler.measure_steps import add_step_times, measure_steps
from octavo.compiler.step_cost import PROFILED_TOKENS
from octavo.runtime.speculative.step_times import read_step_times


def test_times_of_steps_come_into_the_artifact(id_artifact: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.octavo"
    shutil.copytree(id_artifact, path)
    before = Artifact.open(path)
    turns: list[int] = []

    def progress(name: str, done: int, total: int) -> None:
        turns.append(done)

    table = measure_steps(before, progress)
    assert (
        table["tokens"] == list(PROFILED_TOKENS)
        and min(table["seconds"]) > 0
        and "measured" in table["source"]
    )
    assert turns == list(range(9))
    add_step_times(before, table)
    after = Artifact.open(path)
    curve = read_step_times(after.read(STEP_TIMES).decode())
    assert curve(np.array([1.0]))[0] == table["seconds"][0]
    assert after.manifest["provenance"]["profiled"] == table["source"]
    assert {*after.files} == {*before.files, STEP_TIMES} and after.program == before.program
    for name, weight in before.weights.items():
        assert (after.weights[name].array == weight.array).all()
