"""The README tells the truth: its Python block runs, and the commands that it names exist."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.compiler.cli import app

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_python_block_runs(tmp_path: Path) -> None:
    program = blocks("python")[0]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert "insert_paged_kv" in result.stdout and "token_ids=(" in result.stdout
    assert (tmp_path / "artifact/manifest.json").is_file()


def test_the_block_of_check_runs(tmp_path: Path) -> None:
    """With a smaller model; the one it names is measured by benchmarks/bench_full_size.py."""
    program = blocks("python")[1].replace(
        'for_model("deepseek_v3")', 'for_model("llama", num_hidden_layers=4)'
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert "unfold_layers: layers 4, of which the passes saw 3" in result.stdout


BEFORE_SERVING = """
import octavo
from octavo.runtime.stats import prometheus_text
from tiny_llama import build, build_tokenizer
octavo.compile(build(), tokenizer=build_tokenizer(), verify="off", output="smol.octavo")
prompts, schema = ["Why?", "How?"], {"enum": ["yes", "no"]}
"""


def test_the_block_of_serving_runs(tmp_path: Path) -> None:
    program = (
        BEFORE_SERVING + blocks("python")[2] + "print(typed[0].text, [len(c.answers) for c in searched])"
    )
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests/support"))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert re.search(r'"(yes|no)" \[2, 2\]', result.stdout) and "octavo_pages" in result.stdout


# What the block about torch.compile leaves to the reader; its backend is known by name where octavo is installed.
BEFORE_COMPILE = """
import torch, octavo
from models import llama
from octavo.compiler.backend import octavo_backend
torch._dynamo.register_backend(octavo_backend, name="octavo")
model, input_ids = llama(num_hidden_layers=1), torch.ones(2, 5, dtype=torch.long)
attention_mask = torch.ones_like(input_ids)
"""


def test_the_block_of_torch_compile_runs(tmp_path: Path) -> None:
    program = BEFORE_COMPILE + blocks("python")[3]
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("src", "tests/support"))
    environment = {**os.environ, "PYTHONPATH": paths}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert result.returncode == 0, result.stderr
    assert "1 graphs compiled, 0 graph breaks" in result.stdout and "fuse_rms_norm 3" in result.stdout


def test_commands_exist() -> None:
    commands = {
        (command.name or command.callback.__name__).replace("_", "-")
        for command in app.registered_commands
        if command.callback
    }
    named = set(
        re.findall(
            r"\boctavo ([a-z]+(?:-[a-z]+)*)\b(?=[^\n]*(?:`|\n))", "\n".join(re.findall(r"`[^`\n]+`", README))
        )
    )
    assert len(named) >= 5
    assert named - commands == set(), "the README names commands that there are not"
    assert commands - named == set(), "the README leaves out commands"


def shell_lines() -> list[str]:
    lines = [line.strip() for block in blocks("") for line in block.splitlines()]
    return [
        line.split("#")[0].removeprefix("$ ").strip()
        for line in lines
        if re.match(r"(\$ )?(make|octavo) ", line)
    ]


@pytest.mark.parametrize("line", shell_lines())
def test_shell_lines_parse(line: str) -> None:
    program, *arguments = shlex.split(line)
    if program == "make":
        assert all(re.search(rf"^{name}:", MAKEFILE, re.MULTILINE) for name in arguments), line
        return
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    shown = subprocess.run(
        [sys.executable, "-m", "octavo.compiler.cli", arguments[0], "--help"],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    options = [a.split("=")[0] for a in arguments if a.startswith("-")]
    assert shown.returncode == 0 and all(re.search(rf"{o}\b", shown.stdout) for o in options), line


def test_links_and_folders_exist() -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", README) if "://" not in link]
    folders = re.findall(r"^\| (?:`(\w+)/`,? ?)+", README, re.MULTILINE)
    assert links and folders
    assert [path for path in (*links, *folders) if not (ROOT / path).exists()] == []
