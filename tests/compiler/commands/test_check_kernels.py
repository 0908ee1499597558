"""`octavo kernels --check` and `--model`: tables, JSON, exit codes; with corners and sets made small."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.codegen.corner import Corner
from octavo.codegen.linear_triton import with_param
from octavo.codegen.specs_triton import add_spec
from octavo.compiler.commands import check_kernels, model_kernels

Run = Callable[..., tuple[int, str, str]]
GOOD = add_spec("T", 576, "bf16")
BAD = replace(with_param(GOOD, "BLOCK", 1000), label="odd")


@pytest.fixture(autouse=True)
def few_corners(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path_factory.getbasetemp() / "kernels-of-commands"))
    corners = (
        Corner("add", lambda target: GOOD),
        Corner("add elsewhere", lambda target: GOOD, lambda target: "subtract instead"),
        Corner("broken", lambda target: BAD),
    )
    monkeypatch.setattr(check_kernels, "CORNERS", corners)


def test_check_prints_a_table_and_the_counts(run: Run) -> None:
    code, out, err = run("kernels", "--check", "--only", "add", "--target", "b200")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split() == [
        "corner",
        "arch",
        "regs",
        "spill",
        "smem",
        "tmem",
        "key",
        "instructions",
        "result",
    ]
    row = next(line for line in lines if line.lstrip().startswith("add "))
    assert "sm_100" in row and "STG" in row and row.rstrip().endswith("ok")
    assert any("refused: subtract instead" in line for line in lines)
    assert lines[-1] == "1 built, 1 refused with a reason, 0 failed"


def test_check_fails_for_what_does_not_build_and_for_templates_without_a_corner(run: Run) -> None:
    code, out, _ = run("kernels", "--check", "--target", "b200", "--json")
    results = {(one["corner"], one["result"]): one["reason"] for one in json.loads(out)}
    assert code == 1
    assert "power of 2" in results["broken", "FAILED"]
    assert "no corner builds this template" in results["rms_norm.py.jinja", "FAILED"]
    assert ("add.py.jinja", "FAILED") not in results


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--check", "--target", "cpu"), "--target: expected a GPU, got cpu"),
        (("--check", "--only", "nix"), "--only: expected part of the name of one of 3 corners, got 'nix'"),
        (
            ("--model", "llama-9"),
            "--model: expected one of llama-3-8b, deepseek-v3, gpt-oss-20b, got 'llama-9'",
        ),
        (
            ("--model", "llama-3-8b", "--precision", "int4"),
            "--precision: expected one of bf16, fp8, nvfp4, got 'int4'",
        ),
        (("--model", "llama-3-8b", "--target", "cpu"), "--target: expected a GPU, got cpu"),
    ],
)
def test_wrong_choices(arguments: tuple[str, ...], said: str, run: Run) -> None:
    code, out, err = run("kernels", *arguments)
    assert (code, out) == (2, "") and said in err


@pytest.mark.parametrize("arguments", [(), ("--check", "--model", "llama-3-8b"), ("some.octavo", "--check")])
def test_one_of_three_ways(arguments: tuple[str, ...], run: Run) -> None:
    code, _, err = run("kernels", *arguments)
    assert code == 2 and "expected one of ARTIFACT, --check and --model NAME" in " ".join(err.split())


def test_model(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_kernels, "kernel_set", lambda shape, precision, target, page_size: [GOOD])
    code, out, _ = run("kernels", "--model", "llama-3-8b", "--precision", "nvfp4")
    assert (
        code == 0 and "llama-3-8b in nvfp4 for b200: 1 kernels in " in out and "from the cache in 0.0" in out
    )
    facts = json.loads(run("kernels", "--model", "gpt-oss-20b", "--target", "h100", "--json")[1])
    assert (facts["target"], facts["precision"], len(facts["kernels"])) == ("h100", "bf16", 1)
    assert facts["again_s"] < 1.0 and facts["compile_s"] > 0.0
