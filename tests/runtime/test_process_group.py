"""Ranks that are processes: results as of threads, and what the others say when one is lost."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import rank_work
import torch
from rank_processes import on_processes
from rank_threads import on_ranks

from octavo.compiler.errors import ExecutionError, OptionError, RankError
from octavo.compiler.mesh import Mesh
from octavo.runtime.process_group import AxisGroup, Ranks


def test_operations_are_those_of_threads() -> None:
    outcomes = on_processes(3, rank_work.every_operation, 3)
    assert [each.error for each in outcomes] == [""] * 3
    expected = on_ranks(3, lambda peers: rank_work.operations(peers, 3))
    for outcome, wanted in zip(outcomes, expected, strict=True):
        *results, array, numbers, total = outcome.value
        assert results == wanted
        assert array == [0] * 5
        assert numbers == [[rank, -(2**40)] for rank in range(3)]
        assert total == [3.0]


@pytest.mark.parametrize(
    ("sign", "lost", "operation", "far"),
    [
        ("kill", 1, "all_gather", False),
        ("kill", 0, "exchange", False),
        ("kill", 2, "meet", False),
        ("stop", 1, "exchange", False),
        ("stop", 0, "broadcast", False),
        ("stop", 2, "meet", False),
        ("stop", 1, "all_gather", True),
        ("kill", 2, "exchange", True),
        ("stop", 0, "meet", True),
    ],
)
def test_a_lost_rank_is_named(sign: str, lost: int, operation: str, far: bool) -> None:
    outcomes = on_processes(3, rank_work.lose, 3, lost, sign, operation, far)
    host = f"host{lost}" if far else ".*"
    how = r"gave no sign of life for \d\.\d s" if far else {"kill": "is gone", "stop": "is stopped"}[sign]
    for rank, outcome in enumerate(outcomes):
        if rank == lost:
            assert (outcome.value, outcome.error) == (None, "")
        else:
            assert re.match(rf"RankError: rank {lost} \(pid \d+ on {host}\) {how}: ", outcome.error), outcome
            assert outcome.seconds < 30


def test_what_a_rank_ended_with_is_what_the_others_say() -> None:
    outcomes = on_processes(3, rank_work.lose, 3, 1, "error", "all_gather")
    assert outcomes[1].value == "left"
    for rank in (0, 2):
        assert re.match(
            r"RankError: rank 1 \(pid \d+ on .*\) ended: ValueError: seven$", outcomes[rank].error
        )


def test_a_slow_rank_is_said_to_run() -> None:
    outcomes = on_processes(2, rank_work.slow, 2)
    assert outcomes[1].value == "slow"
    assert "ranks 1 run, but one of them did not take part within 0" in outcomes[0].error


def test_a_termination_says_who_is_lost() -> None:
    outcomes = on_processes(2, rank_work.terminated, True)
    assert re.match(
        r"RankError: rank 1 \(pid \d+ on .*\) is gone; start all ranks again$", outcomes[0].error
    ), outcomes
    outcomes = on_processes(2, rank_work.terminated, False)
    assert [each.value for each in outcomes] == ["exit 143", "not lost"]


class Unfinished:
    """An operation on a GPU that ends after some questions, or never."""

    def __init__(self, questions: float) -> None:
        self.questions = questions

    def is_completed(self) -> bool:
        self.questions -= 1
        return self.questions < 0

    def wait(self) -> None:
        assert self.questions < 0


def test_operations_on_gpus_end_in_time_too() -> None:
    owner: Any = SimpleNamespace(
        rank=0, timeout_s=0.05, failure=lambda what, ranks, error: RankError(f"{what} of {ranks}: {error}"),
        connect=lambda *_: None,
    )  # fmt: skip
    group = AxisGroup(owner, "dp", (0, 1))
    memory: Any = SimpleNamespace(device=torch.device("cuda"))
    group._run("all_gather", memory, lambda _: Unfinished(3))
    with pytest.raises(RankError, match=r"all_gather over dp of \(0, 1\): Timed out after 0 s"):
        group._run("all_gather", memory, lambda _: Unfinished(float("inf")))


def test_a_group_of_the_caller() -> None:
    outcomes = on_processes(3, rank_work.with_own_group, (0, 2))
    assert [each.value for each in outcomes] == [(0, [[0], [2]]), "not in it", (1, [[0], [2]])], outcomes


def test_ranks_that_are_not_as_many_as_the_mesh_has(monkeypatch: pytest.MonkeyPatch) -> None:
    said = r"expected 8 processes \(dp 2 x ep 4 x tp 1\).*got {}; type `torchrun --nproc-per-node 8 -m octavo"
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(OptionError, match=said.format(1)):
        Ranks(Mesh(dp=2, ep=4))
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ExecutionError, match="expected RANK, MASTER_ADDR, MASTER_PORT in the environment"):
        Ranks(Mesh())
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match=said.format(2)):
        Ranks(Mesh(dp=2, ep=4))
