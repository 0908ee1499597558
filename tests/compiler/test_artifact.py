import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.compiler import artifact as artifact_module
from octavo.compiler.artifact import Artifact, _manifest_text
from octavo.compiler.checked_files import entry_of
from octavo.compiler.errors import ArtifactError
from octavo.compiler.mesh import Mesh
from octavo.compiler.program import STEP_INPUTS, Buffer, Program, Shard, Step
from octavo.compiler.weights import Weight

MODEL = {
    "name": "tiny", "vocab_size": 11, "num_layers": 1, "max_model_len": 64, "max_batch_tokens": 32,
    "eos_token_ids": [2], "bos_token_id": None,
}  # fmt: skip
MANIFEST: dict[str, Any] = {
    "octavo_version": "0.1.0", "target": "cpu", "options": {"page_size": 16}, "model": MODEL,
    "provenance": {"é": 1.5},
}  # fmt: skip
FILES = {"kernels/program.cpp": b"// text\n", "graph/00_capture.py": b"", "report.json": b"{}\n"}


def make_program() -> Program:
    buffers = (
        *(Buffer(name, "input", dtype, shape) for name, (dtype, shape) in STEP_INPUTS.items()),
        Buffer("a.weight", "weight", "fp32", (3, 5)),
        Buffer("b.weight", "weight", "bf16", (11,)),
        Buffer("k_cache_0", "cache", "fp32", ("num_pages", 2, 16, 4)),
        Buffer("hidden", "workspace", "fp32", (1, "T", 8), "(T + 15) // 16 * 64"),
        Buffer("logits", "output", "fp32", (1, "L", 11)),
    )
    steps = (
        Step("rms_norm__h8__0123456789", ("hidden", "a.weight", "T * 8", 1e-05, 3), ("T", 1, 1), "T <= 16"),
        Step("linear", ("hidden", "b.weight", "logits")),
    )
    return Program(buffers, steps, "T * 128 + 64", 16)


def make_weights() -> dict[str, Weight]:
    b = np.arange(11, dtype=np.uint16)
    return {
        "b.weight": Weight("bf16", (11,), b.tobytes()),
        "a.weight": Weight("fp32", (3, 5), lambda: np.arange(15, dtype=np.float32).reshape(3, 5)),
    }


def write(path: Path, **changes: Any) -> Path:
    given: dict[str, Any] = {
        "manifest": MANIFEST, "program": make_program(), "weights": make_weights(), "files": FILES,
    }  # fmt: skip
    return Artifact.write(path, **{**given, **changes})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return write(tmp_path / "model")


def reseal(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest and give it a fitting checksum, as a forger would."""
    manifest = json.loads((root / "manifest.json").read_text())
    change(manifest)
    (root / "manifest.json").write_text(_manifest_text(manifest))


def reseal_file(root: Path, name: str, content: bytes) -> None:
    (root / name).write_bytes(content)
    entry = entry_of(root / name)
    listed = {"bytes": entry.num_bytes, "sha256": entry.sha256}
    reseal(root, lambda manifest: manifest["files"].update({name: listed}))


def test_round_trip(saved: Path) -> None:
    opened = Artifact.open(saved)
    assert opened.program == make_program()
    assert opened.model.name == "tiny" and opened.model.eos_token_ids == (2,)
    assert opened.manifest["provenance"] == {"é": 1.5} and opened.manifest["format_version"] == 1
    assert {name: opened.read(name) for name in FILES} == FILES
    a, b = opened.weights["a.weight"], opened.weights["b.weight"]
    assert (a.array == np.arange(15).reshape(3, 5)).all() and a.array.dtype == np.float32
    assert (b.array == np.arange(11)).all() and b.array.dtype == np.uint16 and b.dtype == "bf16"
    assert not a.array.flags.writeable and a.array.ctypes.data % 64 == 0 and b.array.ctypes.data % 64 == 0


def test_the_same_content_gives_the_same_bytes(tmp_path: Path) -> None:
    reordered = {name: make_weights()[name] for name in sorted(make_weights())}
    one, two = write(tmp_path / "one"), write(tmp_path / "two", weights=reordered)
    names = sorted(path.relative_to(one) for path in one.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(two) for path in two.rglob("*") if path.is_file())
    assert all((one / name).read_bytes() == (two / name).read_bytes() for name in names)


def test_permissions_follow_the_umask(saved: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    assert saved.stat().st_mode & 0o777 == 0o777 & ~umask
    assert (saved / "program.json").stat().st_mode & 0o777 == 0o666 & ~umask


def all_files(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def test_every_flipped_bit_of_every_file_is_found(saved: Path) -> None:
    flips = 0
    for name in all_files(saved):
        content = (saved / name).read_bytes()
        for at in range(0, len(content), max(1, len(content) // 40)):
            damaged = bytearray(content)
            damaged[at] ^= 1 << (at % 8)
            (saved / name).write_bytes(damaged)
            with pytest.raises(ArtifactError, match=f"{name}.*expected .*got "):
                Artifact.open(saved)
            flips += 1
        (saved / name).write_bytes(content)
    assert flips > 100
    Artifact.open(saved)


def test_every_truncation_and_growth_is_found(saved: Path) -> None:
    for name in all_files(saved):
        content = (saved / name).read_bytes()
        for changed in (content[:-1], content[: len(content) // 2], b"", content + b"\0"):
            if changed == content:
                continue
            (saved / name).write_bytes(changed)
            with pytest.raises(ArtifactError, match=f"{name}: expected .*got "):
                Artifact.open(saved)
        (saved / name).write_bytes(content)
    Artifact.open(saved)


def test_a_truncated_file_is_named_with_both_sizes(saved: Path) -> None:
    content = (saved / "weights.safetensors").read_bytes()
    (saved / "weights.safetensors").write_bytes(content[:-4])
    expected = (
        rf"weights\.safetensors: expected {len(content)} bytes, got {len(content) - 4}; .*compile or copy it"
    )
    with pytest.raises(ArtifactError, match=expected):
        Artifact.open(saved)


def test_every_missing_file_is_named(saved: Path, tmp_path: Path) -> None:
    for name in all_files(saved):
        copy = tmp_path / "copy"
        shutil.copytree(saved, copy)
        (copy / name).unlink()
        with pytest.raises(ArtifactError, match=f"{name}: expected a .*file.*, got "):
            Artifact.open(copy)
        shutil.rmtree(copy)


def test_foreign_files_are_refused(saved: Path) -> None:
    (saved / "kernels" / "extra.so").write_bytes(b"x")
    with pytest.raises(
        ArtifactError, match=r"kernels/extra\.so: expected only files that manifest\.json lists"
    ):
        Artifact.open(saved)


@pytest.mark.parametrize("name", ["report.json", "manifest.json", "program.json", "weights.safetensors"])
def test_links_are_refused_even_to_equal_content(saved: Path, tmp_path: Path, name: str) -> None:
    shutil.move(saved / name, tmp_path / "moved")
    (saved / name).symlink_to(tmp_path / "moved")
    with pytest.raises(ArtifactError, match=f"{name}: expected a (regular|readable) file, got "):
        Artifact.open(saved)


def test_linked_directories_and_special_files_are_refused(saved: Path, tmp_path: Path) -> None:
    shutil.move(saved / "graph", tmp_path / "graph")
    (saved / "graph").symlink_to(tmp_path / "graph")
    with pytest.raises(ArtifactError, match="graph: expected a regular file, got a symbolic link"):
        Artifact.open(saved)
    (saved / "graph").unlink()
    os.mkfifo(saved / "graph")
    with pytest.raises(ArtifactError, match="graph: expected a regular file, got a special file"):
        Artifact.open(saved)


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "/etc/passwd",
        "kernels/../../outside",
        "a//b",
        "./a",
        "a/.",
        "",
        "a\\b",
        "a\nb",
        "a/",
        "x" * 300,
    ],
)
def test_escaping_paths_are_refused_reading_and_writing(saved: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "outside").write_bytes(b"")
    entry = {"bytes": 0, "sha256": entry_of(tmp_path / "outside").sha256}
    reseal(saved, lambda manifest: manifest["files"].update({name: entry}))
    with pytest.raises(ArtifactError, match="expected a relative path of plain names"):
        Artifact.open(saved)
    with pytest.raises(ArtifactError, match="expected a relative path of plain names"):
        write(tmp_path / "other", files={name: b""})
    assert not (tmp_path / "other").exists()


def test_versions(saved: Path) -> None:
    reseal(saved, lambda manifest: manifest.update(format_version=2, octavo_version="9.9", surprise=1))
    with pytest.raises(
        ArtifactError, match=r"expected format_version 1, got 2 \(written by octavo 9.9\); install a newer"
    ):
        Artifact.open(saved)
    reseal(saved, lambda manifest: manifest.update(format_version=0))
    with pytest.raises(ArtifactError, match=r"expected format_version 1, got 0 .*; compile the model again"):
        Artifact.open(saved)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"a": 1}', '{"format_version": "1"}', "[" * 100_000, '{"format_version": true}'],
)
def test_a_foreign_manifest_is_refused(saved: Path, text: str) -> None:
    (saved / "manifest.json").write_text(text)
    with pytest.raises(ArtifactError, match=r"manifest\.json: expected .*got"):
        Artifact.open(saved)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"files": []}, "files with program.json"),
        ({"files": {}}, "files with program.json"),
        ({"files": {"program.json": 3, "weights.safetensors": 4}}, "bytes and sha256 of 'program.json'"),
        ({"surprise": 1}, "the keys"),
        ({"model": None}, "model: expected name"),
        ({"model": {**MODEL, "vocab_size": 0}}, "expected vocab_size of 1"),
        ({"model": {**MODEL, "max_model_len": 2**40}}, "expected max_model_len of 1"),
        ({"model": {**MODEL, "eos_token_ids": [11]}}, "expected eos_token_ids below 11, got 11"),
        ({"model": {**MODEL, "eos_token_ids": ["x"]}}, "expected eos_token_ids below 11"),
    ],
)
def test_manifest_fields_are_checked(saved: Path, change: dict[str, Any], expected: str) -> None:
    reseal(saved, lambda manifest: manifest.update(change))
    with pytest.raises(ArtifactError, match=expected):
        Artifact.open(saved)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "size"),
    [("a.weight", "fp32", (5, 3), 60), ("a.weight", "bf16", (3, 5), 30), ("c", "fp32", (1,), 4)],
)
def test_weights_must_be_those_of_the_program(
    tmp_path: Path, name: str, dtype: str, shape: tuple[int, ...], size: int
) -> None:
    changed = {**make_weights(), name: Weight(dtype, shape, bytes(size))}
    with pytest.raises(ArtifactError, match=f"tensor '{name}': expected .*got "):
        write(tmp_path / "model", weights=changed)
    missing = {"a.weight": make_weights()["a.weight"]}
    with pytest.raises(ArtifactError, match=r"tensor 'b\.weight': expected .*, got none"):
        write(tmp_path / "model", weights=missing)


def test_a_resealed_program_is_still_checked_against_the_weights(saved: Path) -> None:
    text = (saved / "program.json").read_bytes().replace(b"[3, 5]", b"[3, 500000]")
    reseal_file(saved, "program.json", text)
    with pytest.raises(ArtifactError, match=r"tensor 'a\.weight': expected \('fp32', \(3, 500000\)\)"):
        Artifact.open(saved)


def test_what_could_not_be_opened_is_not_written(tmp_path: Path) -> None:
    program = make_program()
    broken = Program(program.buffers, program.steps, "T * undefined", 16)
    with pytest.raises(ArtifactError, match="got 'undefined'"):
        write(tmp_path / "model", program=broken)
    assert list(tmp_path.iterdir()) == []


def test_writing_replaces_an_artifact(saved: Path) -> None:
    write(saved, files={"report.json": b"new"})
    assert Artifact.open(saved).read("report.json") == b"new"
    assert not (saved / "graph").exists()
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


@pytest.mark.parametrize("kind", ["file", "directory", "artifact with notes", "damaged artifact"])
def test_writing_leaves_anything_else_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
        (path / "precious").write_text("precious")
    else:
        write(path)
        precious = path / ("manifest.json" if kind == "damaged artifact" else "notes.txt")
        precious.write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ArtifactError, match="nothing was changed; choose another path or remove it yourself"):
        write(path)
    assert sorted(tmp_path.rglob("*")) == before


def test_writing_into_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    Artifact.open(write(tmp_path / "model"))


def test_a_write_that_fails_midway_leaves_the_old_artifact(saved: Path) -> None:
    def interrupt() -> bytes:
        raise KeyboardInterrupt

    before = {name: (saved / name).read_bytes() for name in all_files(saved)}
    weights = {**make_weights(), "b.weight": Weight("bf16", (11,), interrupt)}
    with pytest.raises(KeyboardInterrupt):
        write(saved, weights=weights, files={"report.json": b"new"})
    assert {name: (saved / name).read_bytes() for name in all_files(saved)} == before
    assert [path.name for path in saved.parent.iterdir()] == ["model"]


def test_an_operating_system_error_is_an_artifact_error(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(artifact_module, "write_weights", full)
    with pytest.raises(ArtifactError, match="No space left on device; nothing was changed"):
        write(saved)
    Artifact.open(saved)


def test_opening_nothing_or_a_file(tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match="expected an artifact directory, got nothing there; `octavo compile`"
    ):
        Artifact.open(tmp_path / "missing")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ArtifactError, match="expected an artifact directory, got a file"):
        Artifact.open(tmp_path / "file")


def test_read_checks_again_and_names_a_missing_file(saved: Path) -> None:
    opened = Artifact.open(saved)
    (saved / "report.json").write_bytes(b"[]\n")
    with pytest.raises(ArtifactError, match=r"report\.json: expected sha256"):
        opened.read("report.json")
    with pytest.raises(ArtifactError, match=r"expected a file 'kernels/none', got none"):
        opened.read("kernels/none")


def test_the_weights_stay_mapped_after_the_artifact_is_replaced(saved: Path) -> None:
    opened = Artifact.open(saved)
    write(saved, weights={**make_weights(), "a.weight": Weight("fp32", (3, 5), bytes(60))})
    assert (opened.weights["a.weight"].array == np.arange(15).reshape(3, 5)).all()


def of_ranks(last: int) -> Program:
    """Rank 0 holds rows 0 and 1 of a.weight, rank 1 those in front of `last`."""
    program = make_program()
    pieces = (((0, 2),), ((last - 2, last),))
    buffers = [replace(b, shape=(2, 5)) if b.name == "a.weight" else b for b in program.buffers]
    return replace(program, buffers=tuple(buffers), mesh=Mesh(tp=2), shards={"a.weight": Shard(0, pieces)})


def test_ranks_hold_pieces_of_weights_that_are_there_whole(tmp_path: Path) -> None:
    opened = Artifact.open(write(tmp_path / "model", program=of_ranks(3)))
    assert opened.weights["a.weight"].shape == (3, 5) and opened.program.mesh == Mesh(tp=2)
    with pytest.raises(ArtifactError, match=r"a\.weight': expected 4 or more elements on axis 0, got 3"):
        write(tmp_path / "other", program=of_ranks(4))
