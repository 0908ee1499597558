"""`octavo quantize` as it is typed."""

from collections.abc import Callable
from pathlib import Path

from tiny_llama import save_directory

from octavo.compiler.checkpoints.checkpoint import Checkpoint

Run = Callable[..., tuple[int, str, str]]


def test_quantize(run: Run, tmp_path: Path) -> None:
    source, destination = save_directory(tmp_path / "tiny"), tmp_path / "out"
    code, out, err = run(
        "quantize", source, destination, "--format", "compressed-tensors", "--weights", "nearest",
        "--keep", "*.o_proj", "--keep", "*.down_proj",
    )  # fmt: skip
    assert (code, out) == (0, f"{destination}\n")
    assert "5 weights quantised; the largest errors" in err and "named by '*.o_proj'" in err
    assert "makes the logits" in err and "weights:  95.1 KiB -> " in err
    checkpoint = Checkpoint(destination)
    assert checkpoint.scheme.layout == "compressed-tensors" and len(checkpoint.groups) == 5
    code, out, err = run("quantize", source, destination)
    assert (code, out) == (2, "") and "CheckpointError: " in err and "expected no file there, got one" in err


def test_modelopt_and_search_are_the_defaults(run: Run, tmp_path: Path) -> None:
    source = save_directory(tmp_path / "tiny")
    code, _, err = run("quantize", source, tmp_path / "out")
    assert code == 0 and "7 weights quantised" in err
    checkpoint = Checkpoint(tmp_path / "out")
    assert checkpoint.scheme.layout == "modelopt"
    # With room above the scale that carries the largest element, as only a search has.
    weight = checkpoint.read("model.layers.0.self_attn.o_proj")
    assert weight.scales is not None and float(weight.scales.float().max()) < 448


def test_what_needs_calibration_is_compiled_and_written(run: Run, tmp_path: Path) -> None:
    source, text = save_directory(tmp_path / "tiny"), tmp_path / "text"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    given = (
        "--to",
        "nvfp4",
        "--weights",
        "nearest",
        "--kv",
        "fp8",
        "--calibration",
        text,
        "--keep",
        "*.o_proj",
    )
    code, out, err = run("quantize", source, tmp_path / "out", *given)
    assert (code, out) == (0, f"{tmp_path / 'out'}\n"), err
    assert "1 in bf16: kept: named by '*.o_proj'" in err and "times:    load" in err
    checkpoint = Checkpoint(tmp_path / "out")
    assert (len(checkpoint.groups), checkpoint.pages) == (6, "fp8")
    assert {group.static_inputs for group in checkpoint.groups.values()} == {True}
    assert (tmp_path / "out/tokenizer.json").is_file()
    code, _, err = run("quantize", source, tmp_path / "out", *given)
    assert code == 2 and "expected no file there, got one" in err
    code, _, err = run("quantize", source, tmp_path / "more", "--calibration", text)
    assert code == 2 and "expected --to nvfp4, fp8 or auto" in " ".join(err.split())
