"""`octavo compile`: options reach the artifact, and nothing half done stays."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_llama import build, save_directory

import octavo
from octavo.compiler.drafts.checkpoints import save_draft_head
from octavo.compiler.drafts.eagle import EagleHead

Run = Callable[..., tuple[int, str, str]]
TINY = f"{Path(__file__).resolve().parents[2]}/support/tiny_llama.py:build"


def test_compile(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--dtype", "bf16", "--page-size", "8", "--max-model-len", "32", "--max-batch-tokens", "16")
    code, out, err = run("compile", TINY, *options, "--verify", "sites", "--dump", "dumps", "--deterministic")
    assert (code, out) == (0, "tiny_llama-cpu.octavo\n")
    artifact = octavo.load(out.strip()).artifact
    expected = {
        "dtype": "bf16",
        "page_size": 8,
        "max_model_len": 32,
        "max_batch_tokens": 16,
        "verify": "sites",
        "deterministic": True,
    }
    assert expected.items() <= artifact.manifest["options"].items()
    assert {p.name for p in tmp_path.iterdir()} == {"tiny_llama-cpu.octavo", "dumps"}
    assert (tmp_path / "dumps/summary.txt").is_file()
    assert "passes (" in err and "insert_paged_kv" in err and "dumps:" in err
    assert "load " in err and "capture " in err and str(tmp_path / out.strip()) in err
    assert max(map(len, err.splitlines()[:-4])) <= 80


def test_quantised_as_the_options_say(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / "text.txt").write_text("To be quantised, or not to be quantised: that is the question. " * 4)
    options = ("--kv", "fp8", "--weights", "nearest", "--bits", "9", "--keep", "*.o_proj", "--verify", "off")
    code, out, err = run(
        "compile", save_directory(tmp_path / "tiny"), "--quantize", "auto", *options, "--calibration",
        tmp_path / "text.txt", "-o", tmp_path / "out.octavo",
    )  # fmt: skip
    assert (code, out) == (0, f"{tmp_path / 'out.octavo'}\n"), err
    assert "quantize_linear" in err and "calibrate " in err and "measure " in err
    told = octavo.load(out.strip()).artifact.manifest["provenance"]["quantization"]
    config = {key: told["config"][key] for key in ("mode", "kv", "weights", "bits", "keep")}
    assert config == {"mode": "auto", "kv": "fp8", "weights": "nearest", "bits": 9.0, "keep": ["*.o_proj"]}
    assert told["calibration"]["tokens"] == 4 * 63


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--quantize", "nvfp4"), "calibration: expected token ids, or a tokenizer, got neither"),
        (
            ("--quantize", "fp8", "--calibration", "nix"),
            "calibration: expected a text file in UTF-8, got nix",
        ),
        (("--quantize", "auto", "--bits", "3"), r"bits: expected 4.5 (NVFP4) to 16, got 3.0"),
        (("--bits", "5"), "Invalid value for --bits: expected --quantize beside it"),
    ],
)
def test_what_cannot_be_quantised_is_said(
    arguments: tuple[str, ...], said: str, run: Run, tmp_path: Path
) -> None:
    code, out, err = run("compile", TINY, *arguments, "-o", tmp_path / "out")
    assert (code, out) == (2, "") and said in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []


def test_compile_leaves_other_files_alone(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("precious")
    code, out, err = run("compile", TINY, "-o", tmp_path)
    assert (code, out) == (2, "") and "expected no file, or an artifact to replace" in err
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize(
    "where", ["octavo.compiler.api.check_whole_model", "octavo.compiler.artifact.write_weights"]
)
def test_interrupt_leaves_no_artifact(
    where: str, run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupt)
    code, out, err = run("compile", TINY, "-o", tmp_path / "out.octavo")
    assert (code, out, err) == (130, "", "octavo: interrupted\n")
    assert list(tmp_path.iterdir()) == []


def test_compile_goes_on_from_a_dumped_graph(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("compile", TINY, "--verify", "off", "--dump", "dumps", "-o", "whole.octavo")
    assert code == 0 and "`octavo view dumps` shows them" in err
    (file,) = Path("dumps").glob("??_fuse_rms_norm.py")
    code, out, err = run("compile", "--from", file, "--verify", "sites")
    assert (code, out.endswith("-cpu.octavo\n")) == (0, True)
    assert "insert_paged_kv" in err and "canonicalize" not in err.split("passes (")[1].split("\n\n")[0]
    whole, resumed = (octavo.load(path).artifact for path in ("whole.octavo", out.strip()))
    for name in ("program.json", "weights.safetensors"):
        assert whole.files[name] == resumed.files[name]
    text = file.read_text()
    file.write_text(text.replace("octavo.rms_norm.default", "octavo.rms_norn.default", 1))
    line = 1 + next(i for i, line in enumerate(file.read_text().splitlines()) if "rms_norn" in line)
    code, out, err = run("compile", "--from", file, "-o", "edited.octavo")
    assert (code, out) == (1, "") and f"{file}:{line}: octavo.rms_norn.default is not an op" in err
    assert not Path("edited.octavo").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "expected MODEL or --from FILE, got neither"),
        (("demo", "--from", "x.py"), "expected MODEL or --from FILE, got both"),
        (("--from", "x.py", "--dtype", "bf16"), "dtype: expected none with --from"),
        (("--from", "x.py", "--page-size", "8"), "page_size: expected none with --from"),
        (("--from", "x.py", "-o", "y"), "from: expected a dumped graph such as dump/07_fuse_rms_norm.py"),
        (("--from", "x.py"), "expected a dump, got no summary.json in it"),
    ],
)
def test_wrong_use_of_from_is_refused(
    arguments: tuple[str, ...], said: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run("compile", *arguments)
    assert (code, out) == (2, "") and said in err.replace("\n", " ")


def test_targets_of_heads_and_drafts(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    save_draft_head(EagleHead.for_target(build()), tmp_path / "head")
    two_layers = str(Path(TINY.rsplit(":", 1)[0]).with_name("models.py")) + ":llama"
    commands = {
        "target": (TINY, "--features", "0,-1", "--dtype", "bf16"),
        "head": (tmp_path / "head", "--draft-of", TINY, "--page-size", "8"),
        "self": (two_layers, "--skip-layers", "0"),
    }
    made = {}
    for name, arguments in commands.items():
        code, out, err = run("compile", *arguments, "--verify", "off", "-o", tmp_path / f"{name}.octavo")
        assert code == 0, err
        made[name] = octavo.load(out.strip()).artifact
    assert [(b.dtype, b.shape) for b in made["target"].program.hidden_states] == [("bf16", ("T", 32))] * 2
    assert made["target"].manifest["options"]["features"] == [0, -1]
    assert made["head"].manifest["provenance"]["draft"]["kind"] == "eagle"
    assert made["head"].program.page_size == 8
    assert made["self"].manifest["provenance"]["draft"] == {"kind": "layer_skip", "layers": [1]}
    assert [b.name for b in made["self"].program.of_kind("cache")] == ["k_cache_0", "v_cache_0"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--features", "5"), "features: expected different numbers from 0 (embeddings) to 1"),
        (("--skip-layers", "0"), "skip_layers: expected some of the layers 0 to 0"),
        (("--skip-layers", "9-2"), "expected layers such as 8-20,25, got 9-2"),
        (("--draft-of", TINY), "model: expected a directory with a draft head"),
        (("--draft-of", TINY, "--features", "-1"), "features: expected none with --draft-of"),
        (("--draft-of", TINY, "--quantize", "fp8"), "quantize: expected none with --draft-of"),
        (("--draft-of", TINY, "--skip-layers", "0"), "skip_layers: expected none with --draft-of"),
    ],
)
def test_drafts_that_cannot_be_are_refused(
    arguments: tuple[str, ...], said: str, run: Run, tmp_path: Path
) -> None:
    code, out, err = run("compile", TINY, *arguments, "-o", tmp_path / "out")
    assert (code, out) == (2, "") and said in " ".join(err.split())
    assert list(tmp_path.iterdir()) == []
