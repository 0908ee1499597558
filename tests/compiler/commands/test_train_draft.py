import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tiny_llama import build

from octavo.compiler import cli
from octavo.compiler.drafts.checkpoints import load_draft_head
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.medusa import MedusaHeads

MODEL = f"{Path(__file__).parents[2] / 'support/tiny_llama.py'}:build"


def arguments(folder: Path, *more: str) -> list[str]:
    prompts = folder / "prompts.txt"
    prompts.write_text("".join(f"{n} {n + 1} 9\n" for n in range(3, 15)))
    return [
        "train-draft", MODEL, "-o", str(folder / "head"), "--prompts", str(prompts), "--tokens", "200",
        "--draft-vocab", "64", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_a_head_is_trained_and_written(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments(tmp_path, "--kind", kind, "--minutes", "0.05"))
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert out == f"{tmp_path / 'head'}\n"
    assert "greedy drafts from" in err and "learnt of:" in err
    head = load_draft_head(tmp_path / "head", build())
    assert isinstance(head, EagleHead if kind == "eagle" else MedusaHeads)
    assert head.target_ids is not None and len(head.target_ids) == 64
    assert not (tmp_path / "head.training").exists()
    logits = head(torch.tensor([[5, 6]]), torch.arange(2)[None], torch.zeros(1, 2, 32))
    assert (logits[0] if isinstance(logits, tuple) else logits).isfinite().all()
    with pytest.raises(SystemExit):
        cli.main(arguments(tmp_path))
    assert "expected no file at" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_training_is_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "octavo", *arguments(tmp_path, "--minutes", "5")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        work = tmp_path / "head.training"
        until = time.monotonic() + 120
        while not (work / "features.f32").exists() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        err = process.communicate(timeout=60)[1]
    assert process.returncode == 130, err
    assert f"{work} holds what was done; --resume goes on" in err
    before = (work / "answers.jsonl").read_text()
    with pytest.raises(SystemExit):
        cli.main(arguments(tmp_path))
    assert "add --resume" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments(tmp_path, "--resume", "--minutes", "0.05"))
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    assert out == f"{tmp_path / 'head'}\n"
    assert before.count("\n") >= 12
