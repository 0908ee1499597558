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
