"""The Triton templates as text, and their numbers: each file of interpreter/ in a process of its own."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from octavo.codegen.render import template_names

FOLDER = Path(__file__).parents[2] / "codegen" / "templates"
INTERPRETED = sorted((Path(__file__).parent / "interpreter").glob("test_*.py"))
EVERY = template_names("triton")
# Parts that kernels include have names with an underscore in front.
TEMPLATES = [name for name in EVERY if not name.startswith("triton/_")]


@pytest.mark.parametrize("template", EVERY)
def test_template_parses_as_python(template: str) -> None:
    text = (FOLDER / template).read_text()
    ast.parse(re.sub(r"\{\{\s*(\w+)\s*\}\}", r"\1", text))


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_is_short_and_says_what_it_computes(template: str) -> None:
    lines = (FOLDER / template).read_text().splitlines()
    header = [line for line in lines[: lines.index("import triton")] if line]
    assert len(lines) < 130
    assert all(line.startswith("# ") for line in header) and any("=" in line for line in header[:3])
    assert any("Parameters:" in line for line in header)


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_nests_two_levels_at_most(template: str) -> None:
    depth = deepest = 0
    for line in (FOLDER / template).read_text().splitlines():
        control = re.match(r"\s*#%\s*(\w+)", line)
        depth += {"if": 1, "for": 1, "endif": -1, "endfor": -1}.get(control[1] if control else "", 0)
        deepest = max(deepest, depth)
    assert depth == 0 and deepest <= 2


@pytest.mark.parametrize("path", INTERPRETED, ids=lambda path: path.stem)
def test_numbers_in_the_interpreter(path: Path) -> None:
    output = interpret(path, "not slow")
    all_are_slow = "def test_" not in re.sub(r"@pytest.mark.slow\n(@.*\n)*def test_", "", path.read_text())
    assert all_are_slow or re.search(r"\d+ passed", output), output


@pytest.mark.slow
@pytest.mark.parametrize("path", INTERPRETED, ids=lambda path: path.stem)
def test_sweep_of_sizes_in_the_interpreter(path: Path) -> None:
    interpret(path, "slow")


def interpret(path: Path, marked: str) -> str:
    """What pytest printed; a file without a test of that mark is fine."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", marked, "-p", "no:cacheprovider", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root, timeout=1800)
    assert result.returncode in (0, 5), result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout
