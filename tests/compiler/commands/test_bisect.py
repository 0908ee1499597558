"""`octavo bisect`: its exit codes."""

from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]
TINY = f"{Path(__file__).resolve().parents[2]}/support/tiny_llama.py:build"


def test_bisect_clears_a_good_model(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("bisect", TINY, "-o", tmp_path / "found")
    assert code == 0 and out.endswith("every pass is right\n") and "fuse_rope_kv_write" in out
    assert not (tmp_path / "found").exists()


def test_bisect_exits_1_with_a_finding(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("octavo.compiler.bisect.WIDE_BOUND", -1.0)
    code, out, _ = run("bisect", TINY, "-o", tmp_path / "found")
    assert code == 1 and "canonicalize is at fault" in out
