"""The command line: results on standard output only, exit codes, clean ends, light starts."""

import functools
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo.compiler import cli, cli_app
from octavo.compiler.errors import (
    ArtifactError,
    CodegenError,
    ExecutionError,
    OctavoError,
    PassError,
    RequestError,
    ToolchainError,
)

ROOT = Path(__file__).resolve().parents[2]
TINY = f"{ROOT}/tests/support/tiny_llama.py:build"
COMMANDS = ("compile", "run", "inspect", "check", "bisect", "kernels", "tune", "targets")

Result = tuple[int, str, str]
Run = Callable[..., Result]


def octavo_process(*arguments: object, **changes: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "80"}
    command = [sys.executable, "-m", "octavo", *map(str, arguments)]
    # A background job hands on an ignored SIGINT, with which nothing could be interrupted.
    listening = functools.partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    return subprocess.run(
        command, capture_output=True, text=True, env=environment, preexec_fn=listening, **changes
    )


def test_help_teaches(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0 and "Exit codes: 0 success; 1" in " ".join(out.split()) and "octavo compile demo" in out
    assert all(f"\n  {name} " in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example(name: str, run: Run) -> None:
    code, out, _ = run(name, "--help")
    assert code == 0 and f"Example: octavo {name}" in out.replace("git diff | ", "")
    assert max(map(len, out.splitlines())) <= 80
    assert run(name, "-h")[0] == 0


def test_version(run: Run) -> None:
    assert run("--version") == (0, f"octavo {octavo.__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("compile",),
        ("nonsense",),
        ("compile", "demo", "--verify", "maybe"),
        ("compile", "demo", "--page-size", "x"),
        ("run", "a", "b", "c"),
        (),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], run: Run) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "") and "Usage: octavo" in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compile", "nix"), "OptionError: model: expected 'demo'"),
        (
            ("compile", "nix", "--target", "b400"),
            "OptionError: target: expected one of b200, b300, cpu, h100, h200, rtx_5090, rtx_pro_6000, got 'b400'",
        ),
        (("compile", TINY, "--page-size", "3"), "OptionError: page_size: expected a power of two, got 3"),
        (("compile", TINY, "--max-model-len", "9999"), "OptionError: max_model_len"),
        (("bisect", TINY, "--max-model-len", "9999"), "OptionError: max_model_len"),
        (("inspect", "nix"), "ArtifactError: nix: expected an artifact directory"),
        (("kernels", "nix"), "ArtifactError"),
        (("run", "nix", "hello"), "ArtifactError"),
        (("run", "nix", "--temperature", "-1"), "RequestError: temperature: expected a number of 0 or more"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str, run: Run, tmp_path: Path) -> None:
    if arguments[0] == "compile":
        arguments += ("-o", str(tmp_path / "out"))
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("octavo: ") and err.count("\n") == 1 and said in err
    assert list(tmp_path.iterdir()) == []


def test_traceback_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ArtifactError):
        cli.main(["inspect", "nix", "--traceback"])


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (PassError("x"), 1),
        (CodegenError("x"), 1),
        (ExecutionError("x"), 1),
        (ToolchainError("x"), 2),
        (RequestError("x"), 2),
        (ArtifactError("x"), 2),
    ],
)
def test_exit_codes_of_errors(error: OctavoError, code: int) -> None:
    assert cli_app.code_of(error) == code


def test_interrupt_by_signal(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(
        "import os, signal\ndef build():\n    os.kill(os.getpid(), signal.SIGINT)\n"
    )
    result = octavo_process("compile", "model.py:build", cwd=tmp_path)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "octavo: interrupted\n")
    assert {p.name for p in tmp_path.iterdir()} <= {"model.py", "__pycache__"}


def test_interrupt_while_a_library_is_imported() -> None:
    program = (
        "import os, signal\nfrom octavo.compiler import cli\n"
        "with cli.starting():\n    try:\n        os.kill(os.getpid(), signal.SIGINT)\n"
        "    except BaseException:\n        print('a library would have seen it')"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "octavo: interrupted\n")


def test_a_reader_that_goes_away(chat_artifact: Path) -> None:
    command = f"{sys.executable} -m octavo.compiler.cli inspect {chat_artifact} | head -n 1"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=environment)
    assert result.stdout.startswith("artifact") and result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "heavy"),
    [
        (("--help",), {"torch", "numpy", "jinja2", "rich.table"}),
        (("targets",), {"torch", "jinja2", "sympy"}),
        (("inspect", "ARTIFACT"), {"torch", "jinja2", "sympy", "triton"}),
        (("kernels", "ARTIFACT"), {"torch", "jinja2", "sympy", "triton"}),
        (("run", "ARTIFACT", "Hi", "--max-tokens", "2"), {"torch", "sympy", "triton", "octavo.passes"}),
    ],
)
def test_starts_without(arguments: tuple[str, ...], heavy: set[str], chat_artifact: Path) -> None:
    given = [str(chat_artifact) if a == "ARTIFACT" else a for a in arguments]
    program = (
        "import sys\nfrom octavo.compiler.cli import main\n"
        f"try:\n    main({given!r})\nexcept SystemExit as end:\n    assert not end.code\n"
        "print('\\nmodules:', *sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert heavy & set(result.stdout.rpartition("modules:")[2].split()) == set()
