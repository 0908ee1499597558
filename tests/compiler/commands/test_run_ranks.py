"""`octavo run` of an artifact for several ranks, on processes as torchrun starts them."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import rank_work
from rank_processes import on_processes

from octavo.compiler.artifact import Artifact
from octavo.compiler.mesh import Mesh
from octavo.compiler.weights import Weight

Run = Callable[..., tuple[int, str, str]]
GIVEN = ("octavo_version", "target", "options", "model", "provenance")


@pytest.fixture
def spread(chat_artifact: Path, tmp_path: Path) -> Callable[[Mesh], Path]:
    """The same program on every rank of a mesh: it has no collectives, so each computes all."""

    def make(mesh: Mesh) -> Path:
        whole = Artifact.open(chat_artifact)
        files = {
            name: whole.read(name)
            for name in whole.files
            if name not in ("program.json", "weights.safetensors")
        }
        return Artifact.write(
            tmp_path / "spread", manifest={name: whole.manifest[name] for name in GIVEN},
            program=replace(whole.program, mesh=mesh), files=files,
            weights={name: Weight(w.dtype, w.shape, w.array) for name, w in whole.weights.items()},
        )  # fmt: skip

    return make


def test_answers_of_all_ranks_are_printed_by_the_first(
    spread: Callable[[Mesh], Path], chat_artifact: Path, run: Run, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Why?\nWhat is it?\nWho\n")
    path = str(spread(Mesh(dp=2, ep=2)))
    many = ("--prompts-file", str(prompts), "--max-tokens", "6")
    outcomes = on_processes(4, rank_work.run_command, "run", path, *many)
    assert [each.value for each in outcomes] == [run("run", chat_artifact, *many), *[(0, "", "")] * 3]
    one = ("Why?", "--max-tokens", "6", "--dispatcher", "padded")
    outcomes = on_processes(4, rank_work.run_command, "run", path, *one)
    assert [each.value for each in outcomes] == [run("run", chat_artifact, *one[:3]), *[(0, "", "")] * 3]


def test_what_is_wrong_is_said(spread: Callable[[Mesh], Path], chat_artifact: Path, run: Run) -> None:
    path = spread(Mesh(dp=2))
    code, out, err = run("run", path, "Why?")
    assert (code, out) == (2, "") and "expected 2 processes (dp 2 x ep 1 x tp 1)" in err
    assert "type `torchrun --nproc-per-node 2 -m octavo run ARTIFACT ...`" in err
    code, _, err = run("run", chat_artifact, "Why?", "--dispatcher", "padded")
    assert code == 2 and "dispatcher: expected an artifact for several ranks" in err
    for name, said in (("best", "expected one of all_gather, all_to_all, padded"), ("deepep", "it has cuda")):
        code, _, err = run("run", path, "Why?", "--dispatcher", name)
        assert code == 2 and said in err
    # A prompt that cannot run is the first rank's to say, and the others end too.
    outcomes = on_processes(2, rank_work.run_command, "run", str(path), "Why?", "--max-tokens", "0")
    assert [each.value and each.value[0] for each in outcomes] == [2, 2], outcomes
    outcomes = on_processes(2, rank_work.run_command, "run", str(path), " ")
    assert [each.value[:2] for each in outcomes] == [(2, ""), (0, "")]
    assert "expected some text" in outcomes[0].value[2]


def test_the_record_of_a_prompt_holds_what_its_rank_said(
    spread: Callable[[Mesh], Path], tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Why?\nWho\n")
    arguments = (
        "run",
        str(spread(Mesh(dp=2))),
        "--prompts-file",
        str(prompts),
        "--max-tokens",
        "4",
        "--n",
        "2",
    )
    outcomes = on_processes(2, rank_work.run_command, *arguments, "--temperature", "1", "--seed", "3")
    records = [json.loads(line) for line in outcomes[0].value[1].splitlines()]
    assert [record["prompt"] for record in records] == ["Why?", "Who"]
    assert all(len(answer["token_ids"]) <= 4 for record in records for answer in record["answers"])
    assert all(len(record["answers"]) == 2 for record in records)
