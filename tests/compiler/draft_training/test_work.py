from pathlib import Path

import pytest
import torch

from octavo.compiler.draft_training.work import Answer, WorkDirectory
from octavo.compiler.errors import OptionError

FACTS = {"model": "m", "prompts": ["a", "b"]}


def filled(path: Path) -> WorkDirectory:
    work = WorkDirectory(path, FACTS, resume=False)
    for job in range(3):
        work.add_answer(Answer(job, 1, [job, job + 1, job + 2]))
    for job in range(2):
        work.add_features(torch.full((3, 2), float(job)))
    work.spend("answers", 1.5)
    work.spend("answers", 1.0)
    return work


def test_all_is_there_when_it_is_opened_again(tmp_path: Path) -> None:
    first = filled(tmp_path / "w")
    again = WorkDirectory(tmp_path / "w", FACTS, resume=True)
    assert again.answers == first.answers
    assert again.seconds == {"answers": 2.5}
    assert again.num_with_features(2) == 2
    again.add_features(torch.full((3, 2), 2.0))
    [_, _, (answer, example)] = again.examples(2)
    assert answer.job == 2 and example.token_ids.tolist() == [2, 3, 4]
    assert (example.features == 2).all() and example.features.shape == (3, 2)


def test_what_was_cut_off_is_dropped(tmp_path: Path) -> None:
    filled(tmp_path / "w")
    with (tmp_path / "w/answers.jsonl").open("a") as file:
        file.write('{"job": 3, "prompt')
    with (tmp_path / "w/features.f32").open("ab") as file:
        file.write(b"1234567")
    work = WorkDirectory(tmp_path / "w", FACTS, resume=True)
    assert len(work.answers) == 3
    assert work.num_with_features(2) == 2
    assert (tmp_path / "w/features.f32").stat().st_size == 48
    work.add_answer(Answer(9, 1, [1, 2]))
    assert WorkDirectory(tmp_path / "w", FACTS, resume=True).answers[-1].job == 9


def test_a_state_comes_back(tmp_path: Path) -> None:
    work = WorkDirectory(tmp_path / "w", FACTS, resume=False)
    assert work.load_state() is None
    assert work.examples(2) == []
    work.save_state({"a": torch.arange(3.0)}, {"step": 4, "spent": 0.25})
    found = work.load_state()
    assert found is not None
    assert found[0]["a"].tolist() == [0, 1, 2] and found[1] == {"step": 4, "spent": 0.25}
    work.remove()
    assert not (tmp_path / "w").exists()


def test_other_work_is_not_gone_on_with(tmp_path: Path) -> None:
    filled(tmp_path / "w")
    with pytest.raises(OptionError, match="add --resume"):
        WorkDirectory(tmp_path / "w", FACTS, resume=False)
    with pytest.raises(OptionError, match="got others: model"):
        WorkDirectory(tmp_path / "w", {**FACTS, "model": "n"}, resume=True)
