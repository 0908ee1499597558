"""`octavo inspect`, `kernels` and `targets`: what artifacts and targets hold."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import octavo
from octavo.compiler.artifact import Artifact
from octavo.compiler.mesh import Mesh
from octavo.compiler.program import ExpertLayer, Program, Shard, Step
from octavo.compiler.weights import Weight

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


def cut(program: Program, name: str, length: int) -> Program:
    """Two ranks, each with half of a weight, take part in three collectives and need room for all their tokens."""
    half = length // 2
    steps = [
        Step("all_reduce", (name, name), axis="dp"),
        Step("all_gather", (name, name), axis="tp", options=(-1, 0)),
    ]
    return replace(
        program,
        mesh=Mesh(dp=2),
        workspace="100 * N",
        buffers=tuple(
            replace(buffer, shape=(half, *buffer.shape[1:])) if buffer.name == name else buffer
            for buffer in program.buffers
        ),
        shards={name: Shard(0, (((0, half),), ((half, length),)))},
        experts=(ExpertLayer(name, (name,)),),
        steps=(*program.steps, *steps, steps[0]),
    )


def test_inspect_of_several_ranks(chat_artifact: Path, run: Run, tmp_path: Path) -> None:
    whole = Artifact.open(chat_artifact)
    even = [name for name, weight in whole.weights.items() if len(weight.array) % 2 == 0]
    name = max(even, key=lambda name: whole.weights[name].array.nbytes)
    weight = whole.weights[name]
    length = len(weight.array)
    given = ("octavo_version", "target", "options", "model", "provenance")
    kept = [name for name in whole.files if name not in ("program.json", "weights.safetensors")]
    path = Artifact.write(
        tmp_path / "spread", manifest={name: whole.manifest[name] for name in given},
        program=cut(whole.program, name, length), files={name: whole.read(name) for name in kept},
        weights={name: Weight(w.dtype, w.shape, w.array) for name, w in whole.weights.items()},
    )  # fmt: skip
    code, out, err = run("inspect", path, "--json")
    assert (code, err) == (0, "")
    facts = json.loads(out)
    assert facts["ranks"] == {
        "mesh": "dp 2 x ep 1 x tp 1",
        "processes": 2,
        "experts": f"1 layer of {length}, room for {length // 2} on a rank",
        "wire": "model",
        "weights_cut": f"1 of {len(whole.weights)}; every rank has the others whole",
        "all_gather over tp": 1,
        "all_reduce over dp": 2,
    }
    memory = facts["memory"]
    assert memory["workspace_at_most"] == 100 * 2 * whole.model.max_batch_tokens
    assert memory["weights_of_a_rank"] == memory["weights"] - weight.array.nbytes // 2
    code, out, _ = run("inspect", path)
    assert code == 0 and "dp 2 x ep 1 x tp 1" in out
    assert "ranks" not in json.loads(run("inspect", chat_artifact, "--json")[1])


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
