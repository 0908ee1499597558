"""The wheel holds exactly the files of the four folders, below `octavo` and under no other name."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("compiler", "passes", "codegen", "runtime")


def broken_links(root: Path) -> list[str]:
    """What is wrong with the links that make the four folders one package; empty if nothing is."""
    problems = []
    for name in FOLDERS:
        link = root / "src/octavo" / name
        if not link.is_symlink() or link.resolve() != (root / name).resolve():
            problems.append(
                f"src/octavo/{name} must be a link to ../../{name}, got "
                f"{'a file' if link.is_file() else 'none'}; "
                "clone again with `git clone -c core.symlinks=true`, or every wheel lacks that folder"
            )
    return problems


def copy_sources(to: Path) -> Path:
    """What setuptools reads, in a folder of its own: a build writes beside its sources."""
    for name in ("src", *FOLDERS):
        ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def build_wheel(sources: Path) -> Path:
    """Offline, with the setuptools that is installed."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", "dist", "."]
    result = subprocess.run(command, cwd=sources, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (sources / "dist").glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert broken_links(ROOT) == []
    return build_wheel(copy_sources(tmp_path_factory.mktemp("wheel") / "tree"))


def test_wheel_holds_the_four_folders(wheel: Path) -> None:
    expected = {"octavo/__init__.py", "octavo/__main__.py", "octavo/py.typed"} | {
        f"octavo/{path.relative_to(ROOT)}"
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    names = set(zipfile.ZipFile(wheel).namelist())
    held = {name for name in names if ".dist-info/" not in name}
    assert sorted(expected - held) == [], "package data not listed, or a folder without __init__.py?"
    assert sorted(held - expected) == []
    for suffix in (".py.jinja", ".cpp.jinja", ".toml"):
        assert any(name.endswith(suffix) for name in held), suffix


def test_wheel_has_licence_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        named = {name.split("/", 1)[1]: name for name in archive.namelist() if ".dist-info/" in name}
        assert "licenses/LICENSE" in named
        assert "octavo = octavo.compiler.cli:main" in archive.read(named["entry_points.txt"]).decode()


def test_unpacked_wheel_finds_its_data(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    program = (
        "import octavo.compiler.target\n"
        "from importlib.resources import files\n"
        "names = octavo.compiler.target.target_names()\n"
        "print(files('octavo.codegen') / 'templates', *names, octavo.__file__)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    templates, *targets, origin = result.stdout.split()
    assert {"cpu", "b200"} <= set(targets)
    assert Path(origin).is_relative_to(tmp_path)
    assert sorted(p.name for p in Path(templates).iterdir() if p.is_dir()) == ["cpp", "triton"]


def test_links_checked_out_as_text_are_reported(tmp_path: Path) -> None:
    tree = copy_sources(tmp_path / "tree")
    assert broken_links(tree) == []
    link = tree / "src/octavo/passes"
    link.unlink()
    link.write_text("../../passes")
    (problem,) = broken_links(tree)
    assert "src/octavo/passes must be a link to ../../passes, got a file; clone again" in problem
