"""`octavo balance`: a placement that a runtime takes, a table, a picture, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from octavo.compiler import cli
from octavo.compiler.expert_placement import placements_from_json

SIZES = "ep=4,dp=4,redundant_experts=4"


def loads(path: Path) -> Path:
    """Of two layers; the first experts have most to do."""
    rows = 1000 / (1 + np.arange(16))
    np.save(path / "loads.npy", np.stack([rows, rows[::-1]]).astype(np.int64))
    return path / "loads.npy"


def octavo(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main([str(one) for one in arguments])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_it_places_shows_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "placement.json", tmp_path / "loads.svg"
    given = ("balance", loads(tmp_path), "--parallel", SIZES)
    assert octavo(*given, "-o", output, "--plot", plot) == 0
    placements = placements_from_json(output.read_text())
    assert [(one.num_experts, one.num_ranks, one.num_local) for one in placements] == [(16, 4, 5)] * 2
    assert len(placements[0].replicas()[0]) > 1 and len(placements[1].replicas()[15]) > 1
    shown = capsys.readouterr().out
    before, after = shown.splitlines()[-1].removeprefix("balance of 2 layers: ").split(" -> ")
    assert 0.25 < float(before) < 0.5 < 0.9 < float(after) <= 1
    assert plot.read_text().startswith("<?xml")
    assert octavo(*given, "--json") == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["experts"] for row in rows] == [[list(held) for held in one.experts] for one in placements]
    assert sum(rows[0]["before"]) == pytest.approx(sum(rows[0]["after"]))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--parallel", "ep=1"), "parallel: expected ep of 2 or more"),
        (("--parallel", "ep=4,dp=3"), "parallel: expected ep of 2 or more and a multiple of dp"),
        (("--parallel", "ep=4,redundant_experts=99"), "redundant experts: expected 0 to 48"),
        (("--parallel", "ep=4", "--plot", "a.jpg"), "--plot: expected a name that ends in .svg or .png"),
        (("--parallel", "ep=4", "-o", "no/such/folder.json"), "output: expected a file that can be written"),
        (("--parallel", "ep=4", "--nodes", "3"), "num_ranks: expected a multiple of the 3 nodes"),
    ],
)
def test_what_cannot_be_is_a_line(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert octavo("balance", loads(tmp_path), *arguments) == 2
    assert said in capsys.readouterr().err


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in (("flat.npy", np.zeros(3)), ("text.npy", np.array([["a"]]))):
        np.save(tmp_path / name, value)
        assert octavo("balance", tmp_path / name, "--parallel", "ep=2") == 2
        assert "loads: expected numbers of (layers, experts)" in capsys.readouterr().err
    (tmp_path / "no.npy").write_text("no")
    assert octavo("balance", tmp_path / "no.npy", "--parallel", "ep=2") == 2
    assert "loads: expected a .npy file" in capsys.readouterr().err
