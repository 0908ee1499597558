"""Every example runs by itself: the demo with a tiny model in place of SmolLM2, and, slowly, as it is."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_llama import save_directory

ROOT = Path(__file__).resolve().parents[2]
TESTED = {"demo.py", "hand_written.py"}


def run(name: str, *arguments: object, cwd: Path) -> str:
    """Standard output of an example that must succeed and, without a terminal, must not draw."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(ROOT / "examples" / name), *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "\x1b" not in result.stdout + result.stderr and "\r" not in result.stdout + result.stderr
    return result.stdout


def test_every_example_has_a_test() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == TESTED


def test_hand_written(tmp_path: Path) -> None:
    out = run("hand_written.py", cwd=tmp_path)
    assert "insert_paged_kv" in out and "paged_attention" in out
    assert re.search(r"^\[1, 2, 3\] -> \[(\d+, ){7}\d+\]$", out, re.MULTILINE)
    assert re.search(r"^sampled, seed 1: \[", out, re.MULTILINE)


def test_demo_with_a_tiny_model(tmp_path: Path) -> None:
    model = save_directory(tmp_path / "tiny")
    out = run(
        "demo.py", "--model", model, "--prompt", "Why?", "--targets", "cpu", "--max-tokens", 5, cwd=tmp_path
    )
    assert "passes (" in out and "tokens/s)" in out and "capture " in out
    assert (tmp_path / "demo/cpu.octavo/manifest.json").is_file()
    assert (tmp_path / "demo/dumps-cpu/summary.txt").is_file()
    assert max(len(line) for line in out.splitlines() if str(model) not in line) <= 100


@pytest.mark.slow
def test_demo(tmp_path: Path) -> None:
    out = run("demo.py", cwd=tmp_path)
    assert "The capital of France is Paris" in out
    assert re.search(r"^\d+ kernels", out, re.MULTILINE) and "UTCHMMA" in out
    assert (tmp_path / "demo/b200.octavo/manifest.json").is_file()
