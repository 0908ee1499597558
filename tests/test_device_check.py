"""What benchmarks/device_check.py does around its children, here with one that fails in the ways that kernels do."""

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.compiler.target import load_target

ROOT = Path(__file__).resolve().parents[1]
CHILD = """
import os, sys, time
first = int(sys.argv[sys.argv.index("--first") + 1])
def say(text):
    print(text, flush=True)
if first == 0:
    say('{"rates": {"copy": 1e12}}')
for i in range(first, 5):
    say('{"begin": %d, "corner": "c%d"}' % (i, i))
    if i == 1:
        print("out of range", file=sys.stderr)
        os._exit(139)
    if i == 3:
        time.sleep(100)
    ok = "false" if i == 4 else "true"
    say('{"index": %d, "corner": "c%d", "point": "few", "ok": %s, "error": 0.5}' % (i, i, ok))
say('{"done": true}')
"""

pytestmark = pytest.mark.slow  # it imports torch and waits for a child that hangs


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.device_check")


def run_the_child_instead(module: Any, monkeypatch: pytest.MonkeyPatch, silence_s: float) -> None:
    """CHILD with five corners in place of the real one, given up after so long without a word."""
    run = module.lines_of
    monkeypatch.setattr(
        module, "lines_of", lambda name, arguments, s, silence: run("child", arguments, s, silence_s)
    )
    monkeypatch.setattr(module, "chosen", lambda word: list(range(5)))


def test_a_child_that_dies_or_hangs_costs_one_corner(
    module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_the_child_instead(module, monkeypatch, 5.0)
    kernels = module.run_kernels(load_target("b200"), "", 60.0)
    assert kernels["rates"] == {"copy": 1e12} and kernels["left_out"] == ""
    assert [(r["corner"], r["ok"], r.get("note", "")) for r in kernels["results"]] == [
        ("c0", True, ""), ("c1", False, "the process ended: exit code 139: out of range"), ("c2", True, ""),
        ("c3", False, "the process ended: silent for 5 s"), ("c4", False, ""),
    ]  # fmt: skip
    lines = [{"batch": 1, "ok": False, "error": 0.2}, {"ended": "its time is over"}]
    report = {
        "build": {"failed": {"x": "no"}}, "kernels": kernels, "end_to_end": {"lines": lines},
        "tests": {"ok": False, "note": "1 failed"},
    }  # fmt: skip
    report["failures"] = module.failures(report)
    assert len(report["failures"]) == 7
    never_began = {
        **report,
        "kernels": {**kernels, "left_out": "from corner 0 of 5 on: exit code 1: no driver"},
    }
    assert "kernels from corner 0 of 5 on: exit code 1: no driver" in module.failures(never_began)
    module.show(report)
    out = capsys.readouterr().out
    assert "7 failures" in out and "c4 few: off by 0.5" in out and "end to end: its time is over" in out


def test_the_time_box_ends_a_part(module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child.py").write_text(CHILD.replace("i == 1", "False"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    run_the_child_instead(module, monkeypatch, 60.0)
    kernels = module.run_kernels(load_target("b200"), "", 6.0)
    assert [r["corner"] for r in kernels["results"]] == ["c0", "c1", "c2"]
    assert kernels["left_out"] == "from corner 3 of 5 on: its time is over"


def test_a_dry_run_builds_and_says_what_it_would_run(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks.device_check",
        "--dry-run",
        "--target",
        "b200",
        "--only",
        "add fp32",
    ]
    environment = {
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        "OCTAVO_CACHE": str(tmp_path),
        "PATH": "/usr/bin:/bin",
    }
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=200)
    assert result.returncode == 0, result.stderr
    assert "build: 1 corners, 0 failed, 0 refused" in result.stdout
    assert result.stdout.count("add fp32 w7") == 2 and "many  finite     0.10 GB" in result.stdout
