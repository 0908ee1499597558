"""`octavo kernels ARTIFACT`: tables, JSON, points and the picture, of an artifact made by hand."""

import json
import sys
import xml.etree.ElementTree as xml
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu_artifact import ADD, FEW, LAYERS, MANY, record, write_gpu_artifact

from octavo.compiler.commands.kernels import parse_point
from octavo.compiler.errors import OptionError

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gpu_artifact(tmp_path_factory.mktemp("kernels") / "b200.octavo")


def test_tables(artifact: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, err = run("kernels", artifact)
    lines = [line.rstrip() for line in out.splitlines()]
    assert (code, err) == (0, "") and max(map(len, lines)) <= 80
    assert lines[0] == "3 kernels for b200"
    few = next(line for line in lines if line.startswith("linear_few_rows"))
    assert few.split() == ["linear_few_rows__bf16_n4096_k4096_m16", "29", "0", "61480", "0", "4", "3"]
    said = " ".join(" ".join(lines).split())
    assert (
        "if T <= 16; HMMA 8, UTMALDG 2, STG 2; fit is limited by shared memory; 1 other forms are slower"
        in said
    )
    titles = [line for line in lines if line.endswith("ms predicted")]
    assert [title.split(":")[0] for title in titles] == ["decode 1 at 8K", "decode 64 at 8K", "prefill 4K"]
    assert lines[-8].split()[:4] == ["decode", "1", "at", "1K"] and lines[-1].split()[0] == "prefill"


def test_json(artifact: Path, run: Run) -> None:
    facts = json.loads(run("kernels", artifact, "--json")[1])
    few, many, add = facts["kernels"]
    assert facts["target"] == "b200" and few["record"]["evidence"]["registers"] == 29
    assert few["occupancy"] == {"programs": 3, "limit": "shared memory"}
    assert set(few["points"]) == {f"decode {n} at {c}" for n in (1, 16) for c in ("1K", "8K")}
    assert set(many["points"]) == {"decode 64 at 1K", "decode 64 at 8K", "prefill 512", "prefill 4K"}
    one = few["points"]["decode 1 at 1K"]
    assert one["launches"] == LAYERS and one["intensity"] == one["flops"] / one["bytes"]
    assert one["fraction_of_floor"] == pytest.approx(one["floor_s"] / one["predicted_s"])
    assert add["points"]["prefill 4K"]["launches"] == LAYERS + 1
    step = facts["steps"][0]
    assert step["launches"] == 2 * LAYERS + 1
    assert step["tokens_per_s"] == pytest.approx(1 / step["predicted_s"])
    expected = LAYERS * (one["predicted_s"] + add["points"]["decode 1 at 1K"]["predicted_s"])
    assert LAYERS < step["predicted_s"] / expected * LAYERS < LAYERS + 1  # and the add of L rows


def test_a_kernel_is_judged_by_the_rows_of_each_launch(artifact: Path, run: Run) -> None:
    """Of a prefill of 4096 tokens, 3 adds have 4096 rows and one has 1."""
    facts = json.loads(run("kernels", artifact, "--json", "--at", "T=4096")[1])
    (step,) = facts["steps"]
    with_all = LAYERS * sum(kernel["points"]["T=4096"]["floor_s"] for kernel in facts["kernels"][1:])
    assert step["floor_s"] == pytest.approx(with_all + 12 / 8e12)


def test_points_that_are_asked_for(artifact: Path, run: Run) -> None:
    code, out, _ = run("kernels", artifact, "--at", "T=1,S=8192", "--at", "T=32, R=32, S=65536")
    titles = [line.split(":")[0] for line in out.splitlines() if line.endswith("ms predicted")]
    assert code == 0 and titles == ["T=1,S=8192", "T=32, R=32, S=65536"]
    point = parse_point("T=32, R=32, S=65536", 64)
    assert point.dims == {"T": 32, "R": 32, "L": 32, "S": 65536, "P": 32, "num_pages": 1024, "N": 32}
    assert parse_point("T=100", 16).dims == {
        "T": 100,
        "R": 1,
        "L": 1,
        "S": 100,
        "P": 7,
        "num_pages": 7,
        "N": 100,
    }
    assert parse_point("P=9,T=1,L=3", 16).dims["P"] == 9


@pytest.mark.parametrize("text", ["", "T=0", "T", "S=8", "T=1,X=2", "T=1,T=2", "T=-1", "T=1;S=2"])
def test_points_that_are_none(text: str) -> None:
    with pytest.raises(OptionError, match="--at: expected sizes of T, R, L, S, P of 1 or more"):
        parse_point(text, 64)


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_picture(suffix: str, artifact: Path, run: Run, tmp_path: Path) -> None:
    path = tmp_path / f"roof{suffix}"
    assert run("kernels", artifact, "--plot", path)[0] == 0
    content = path.read_bytes()
    if suffix == ".png":
        assert content.startswith(b"\x89PNG") and len(content) > 20_000
        return
    assert len(list(xml.fromstring(content).iter())) > 100
    text = content.decode()
    wanted = (
        "by-hand on b200",
        "FLOP per byte",
        "FLOP/s",
        "memory 8 TB/s",
        "NVFP4 9000",
        "BF16 2250",
        "prefill 4K",
    )
    assert [shown for shown in (*wanted, "linear few rows bf16 n4096 k4096 m16") if shown not in text] == []


def test_picture_without_matplotlib(
    artifact: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    code, out, err = run("kernels", artifact, "--plot", tmp_path / "roof.svg")
    assert (code, out) == (2, "") and "expected matplotlib, found none; pip install 'octavo[plot]'" in err


def test_pictures_that_cannot_be(artifact: Path, run: Run, tmp_path: Path) -> None:
    for name, said in (
        ("roof.pdf", "ends in .svg or .png"),
        ("no/such/roof.svg", "a file that can be written"),
    ):
        code, _, err = run("kernels", artifact, "--plot", tmp_path / name)
        assert code == 2 and said in err
    assert list(tmp_path.iterdir()) == []


def test_host_artifacts_have_no_points(chat_artifact: Path, run: Run) -> None:
    code, _, err = run("kernels", chat_artifact, "--at", "T=1")
    assert code == 2 and "--at, --plot: expected an artifact for a GPU, got one for cpu" in err


def test_metadata_that_is_damaged_or_old(run: Run, tmp_path: Path) -> None:
    old = record()
    del old["work"]
    path = write_gpu_artifact(tmp_path / "old.octavo", {FEW: old})
    code, _, err = run("kernels", path)
    assert code == 2 and f"kernels/{FEW}.json: expected a kernel's work and loops, got none of 'work'" in err
    path = write_gpu_artifact(tmp_path / "odd.octavo", {MANY: [1]})
    code, _, err = run("kernels", path)
    assert code == 2 and f"{MANY}.json: expected an object, got [1]" in err
    assert ADD not in err
