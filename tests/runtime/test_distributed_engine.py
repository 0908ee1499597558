"""Engines over ranks that are processes: answers of one process, all ranks in every step, errors on all."""

import re
from collections.abc import Callable

import pytest
import rank_work
from rank_processes import on_processes

from octavo.compiler.mesh import Mesh
from octavo.runtime.distributed_engine import dealt

PROMPTS = [[1, 2, 3], [4] * 9, [5, 6], [7, 8, 9, 10, 11], [12], [1, 2, 3]]


@pytest.mark.parametrize("mesh", [Mesh(ep=2), Mesh(dp=2), Mesh(dp=2, tp=2), Mesh(dp=3)])
def test_answers_are_those_of_one_process(mesh: Mesh, greedy: Callable[..., list[int]]) -> None:
    outcomes = on_processes(mesh.world, rank_work.serve, mesh, "all")
    assert [each.error for each in outcomes] == [""] * mesh.world
    expected = [tuple(greedy(prompt, 20)) for prompt in PROMPTS]
    for outcome in outcomes:
        answers, batches = outcome.value
        assert answers == expected
        assert len(batches) == len(outcomes[0].value[1]), "a rank was not in every step"
        assert [b["N"] for b in batches] == [b["N"] for b in outcomes[0].value[1]]
    if mesh.dp == 3:
        assert any(batch["T"] == 0 for batch in outcomes[2].value[1]), "no step in which a rank had no tokens"


def test_readers_may_take_their_time(greedy: Callable[..., list[int]]) -> None:
    outcomes = on_processes(4, rank_work.serve, Mesh(dp=2, ep=2), "read", 0.8)
    assert [each.error for each in outcomes] == [""] * 4
    first, second = ([(place, token) for token in greedy(PROMPTS[place], 20)] for place in range(2))
    assert outcomes[0].value == first + second
    assert [outcome.value for outcome in outcomes[1:]] == [[], [], []]


def test_ranks_that_serve(greedy: Callable[..., list[int]]) -> None:
    outcomes = on_processes(4, rank_work.serve, Mesh(dp=2, ep=2), "served")
    assert [each.error for each in outcomes] == [""] * 4
    first, streamed, answers, loads = outcomes[0].value
    assert [token.token_id for token in first] == greedy(PROMPTS[0], 1)
    for place in range(5):
        own = [token.token_id for token in streamed if token.index == place]
        assert own == greedy(PROMPTS[place], 20)
    assert [answer.token_ids for answer in answers] == [tuple(greedy(p, 20)) for p in PROMPTS[:2]]
    assert loads == [[1111] * 3] * 2
    assert outcomes[1].value == outcomes[2].value == outcomes[3].value
    num_steps, placed = outcomes[1].value
    assert num_steps > 40 and placed == "['a placement', array([[1., 1.]])]"


def test_different_calls_are_an_error_on_all() -> None:
    outcomes = on_processes(2, rank_work.serve, Mesh(dp=2), "other calls")
    assert outcomes[1].error == "ExecutionError: ranks: expected the call of rank 0, stream, got generate"
    assert "rank 1" in outcomes[0].error and "expected the call of rank 0, stream" in outcomes[0].error


@pytest.mark.parametrize("mesh", [Mesh(dp=2), Mesh(ep=3)])
def test_an_error_of_one_rank_ends_all(mesh: Mesh) -> None:
    outcomes = on_processes(mesh.world, rank_work.serve, mesh, "fail")
    last = mesh.world - 1
    assert outcomes[last].error == "ExecutionError: the step of a rank failed"
    said = rf"RankError: rank {last} \(pid \d+ on .*\) ended: ExecutionError: the step of a rank failed$"
    for outcome in outcomes[:last]:
        assert re.match(said, outcome.error), outcome
        assert outcome.seconds < 5


def test_a_rank_that_is_killed_between_calls() -> None:
    outcomes = on_processes(3, rank_work.serve, Mesh(dp=3), "kill")
    for rank in (0, 2):
        assert re.match(r"RankError: rank 1 \(pid \d+ on .*\) is gone", outcomes[rank].error), outcomes


def test_a_bad_prompt_is_refused_on_all() -> None:
    outcomes = on_processes(2, rank_work.serve, Mesh(ep=2), "bad")
    assert {each.error for each in outcomes} == {
        "RequestError: request 1: prompt: expected token ids of 0 to 49, got 99 at position 0; "
        "was it encoded with this model's tokenizer?"
    }


def test_dealt() -> None:
    assert dealt([[0, 3, 6], [1, 4], [2, 5]]) == [*range(7)]
    assert dealt([[], []]) == []
