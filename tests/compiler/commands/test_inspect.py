"""`octavo inspect`, `kernels` and `targets`: what artifacts and targets hold."""

import json
from collections.abc import Callable
from pathlib import Path

import octavo

Run = Callable[..., tuple[int, str, str]]


def test_inspect(chat_artifact: Path, run: Run) -> None:
    code, out, err = run("inspect", chat_artifact, "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "")
    assert facts["model"]["name"] == "tiny-llama" and facts["artifact"]["target"] == "cpu"
    artifact = octavo.load(chat_artifact).artifact
    assert facts["memory"]["weights"] == sum(w.array.nbytes for w in artifact.weights.values())
    assert facts["memory"]["workspace_at_most"] == facts["memory"]["token"] * artifact.model.max_batch_tokens
    assert facts["memory"]["context_token"] * facts["program"]["page_size"] == facts["memory"]["page"] > 0
    assert facts["program"]["launches"] == len(artifact.program.steps)
    assert set(facts["files"]) == set(artifact.files)

    code, out, _ = run("inspect", chat_artifact)
    assert code == 0 and max(len(line.rstrip()) for line in out.splitlines()) <= 80 + len(str(chat_artifact))
    assert "all match their sha256" in out
    assert all(f"\n{name} " in out for name in artifact.files)


def test_inspect_finds_damage(chat_artifact: Path, run: Run, tmp_path: Path) -> None:
    path = octavo.load(chat_artifact).save(tmp_path / "copy")
    weights = path / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    code, out, err = run("inspect", path)
    assert (code, out) == (2, "") and "weights.safetensors: expected sha256" in err


def test_kernels(chat_artifact: Path, run: Run) -> None:
    code, out, _ = run("kernels", chat_artifact)
    assert code == 0 and "paged_attention" in out and "T * " in out and "built for " in out
    code, out, _ = run("kernels", chat_artifact, "--json")
    facts = json.loads(out)
    assert facts["target"] == "cpu" and facts["features"] in ("portable", "avx2", "avx512", "avx512_bf16")
    assert all({"name", "op", "bytes", "flops"} <= set(row) for row in facts["kernels"])


def test_targets(run: Run) -> None:
    code, out, _ = run("targets")
    assert code == 0 and "sm_100" in out and "cpu" in out and "\nauto: " in out
    rows = json.loads(run("targets", "--json")[1])
    assert {row["name"] for row in rows} >= {"b200", "b300", "cpu", "h100"}
    assert sum(row["is_auto"] for row in rows) == 1
