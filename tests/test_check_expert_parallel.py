"""benchmarks/check_expert_parallel.py: what it measures is within its bounds, and it says so where it is not."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rank_work
from rank_processes import on_processes

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def checker() -> Any:
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(ROOT)
        yield importlib.import_module("benchmarks.check_expert_parallel")


def test_a_case_on_three_ranks(checker: Any) -> None:
    outcomes = on_processes(3, rank_work.check_case, 3, str(ROOT), "4 redundant experts")
    for outcome in outcomes:
        assert outcome.error == ""
        assert set(outcome.value) == {*checker.WIRES, checker.ADDED}
        assert all(value <= 1 for value in outcome.value.values()), outcome.value
    assert any(outcome.value["model"] > 0.01 for outcome in outcomes), "nothing was measured"


def test_a_miss_is_seen(checker: Any, capsys: pytest.CaptureFixture[str]) -> None:
    nothing = dict.fromkeys((*checker.WIRES, checker.ADDED), 0.5)
    assert checker.show({2: {"padded ids": nothing}})
    assert not checker.show({2: {"padded ids": {**nothing, "fp8": 1.01}}})
    assert not checker.show({2: {"padded ids": {**nothing, "fp8": float("nan")}}, 3: {}})
    assert "bits!" in capsys.readouterr().out
    assert checker.worst_of([0.1, 0.7]) == 0.7
    assert checker.worst_of([0.1, float("nan"), 0.7]) != 0.7


@pytest.mark.slow
def test_all_worlds_under_torchrun() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/check_expert_parallel.py"), "--launch", "1", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("worst error / bound; all within\n")
