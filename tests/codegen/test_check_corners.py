"""What a check of corners says of kernels that build, that are refused and that fail, and of templates without any."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.codegen.catalogue import CORNERS
from octavo.codegen.check_corners import FAILED, OK, REFUSED, TARGETS, check_corners, uncovered_templates
from octavo.codegen.corner import Corner
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.linear_triton import with_param
from octavo.codegen.specs_triton import add_spec
from octavo.compiler.target import Target, load_target

B200, H100 = load_target("b200"), load_target("h100")


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_CACHE", str(tmp_path / "cache"))


def silent(phase: str) -> Callable[[str, int, int], None]:
    return lambda name, done, total: None


def no_spec(target: Target) -> KernelSpec:
    raise ValueError("rows must have a multiple of 16 elements, got 7")


def test_outcomes() -> None:
    good, bad = add_spec("T", 576, "bf16"), with_param(add_spec("T", 48, "bf16"), "BLOCK", 1000)
    corners = [
        Corner("add", lambda target: good),
        Corner("add 48", lambda target: replace(bad, label="odd")),
        Corner(
            "add of Blackwell",
            lambda target: good,
            lambda t: None if t.arch == 100 else "sm_90 adds otherwise",
        ),
        Corner("add of nothing", no_spec),
    ]
    outcomes = list(check_corners(corners, [B200, H100], silent))
    found = {(one.corner, one.target): one for one in outcomes}
    assert len(outcomes) == len(found) == 8
    built = found["add", "b200"]
    assert (built.result, built.arch, built.kernel, built.spill_bytes) == (OK, "sm_100", good.name, 0)
    assert built.registers and "STG" in built.key_opcodes
    assert found["add of Blackwell", "b200"].result == OK
    refused = found["add of Blackwell", "h100"]
    assert (refused.result, refused.reason, refused.arch) == (REFUSED, "sm_90 adds otherwise", "sm_90")
    failed = found["add 48", "h100"]
    assert failed.result == FAILED and "power of 2" in failed.reason and "add__odd" in failed.kernel
    assert (
        found["add of nothing", "b200"].reason == "no spec: rows must have a multiple of 16 elements, got 7"
    )


def test_templates_without_a_corner_are_found() -> None:
    corners = [Corner("add", lambda target: add_spec("T", 8, "bf16")), Corner("nothing", no_spec)]
    missing = uncovered_templates(corners, [B200])
    assert "add.py.jinja" not in missing and "rms_norm.py.jinja" in missing
    assert not any(name.startswith("_") for name in missing)
    only_refused = [replace(corners[0], refuse=lambda target: "another kernel serves")]
    assert "add.py.jinja" in uncovered_templates(only_refused, [B200])


def test_every_template_has_a_corner_and_every_corner_a_name_of_its_own() -> None:
    assert uncovered_templates(CORNERS, [load_target(name) for name in TARGETS]) == []
    names = [corner.name for corner in CORNERS]
    assert sorted(names) == sorted(set(names))
