"""The command line in this process, and artifacts of a tiny model for it."""

import io
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_llama import build, build_tokenizer

import octavo
from octavo.compiler import cli

Result = tuple[int, str, str]
Run = Callable[..., Result]


@pytest.fixture(scope="session")
def chat_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny model with a tokenizer and a chat template."""
    path = tmp_path_factory.mktemp("artifacts") / "chat.octavo"
    octavo.compile(build(), tokenizer=build_tokenizer(), verify="off", output=path)
    return path


@pytest.fixture(scope="session")
def id_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same model without a tokenizer."""
    path = tmp_path_factory.mktemp("artifacts") / "ids.octavo"
    octavo.compile(build(), verify="off", output=path)
    return path


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command in this process: exit code, standard output, standard error."""

    def call(*arguments: object, stdin: str | None = "") -> Result:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            cli.main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call
