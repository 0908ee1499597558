"""Bisection: a mutated pass is named with its site, a clean pipeline is not, and reproducers stand alone."""

import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_llama import build
from torch.fx import GraphModule

from octavo.compiler.bisect import bisect
from octavo.compiler.errors import OptionError
from octavo.compiler.pipeline import PIPELINE, Step
from octavo.compiler.report import as_text
from octavo.passes.fuse_gated_mlp import fuse_gated_mlp
from octavo.passes.fuse_rms_norm import FUSE_RMS_NORM
from octavo.passes.insert_paged_kv import insert_paged_kv
from octavo.passes.rule import PassReport, apply_rules

octavo = torch.ops.octavo
ROOT = Path(__file__).resolve().parents[2]


def mutated(name: str, run: Callable[..., PassReport]) -> tuple[Step, ...]:
    """The pipeline with the pass of that name replaced."""
    assert name in [step.name for step in PIPELINE]
    run.__name__ = name
    return tuple(dataclasses.replace(step, run=run) if step.name == name else step for step in PIPELINE)


def with_larger_eps(graph_module: GraphModule, factor: float = 10.0) -> PassReport:
    rule = dataclasses.replace(
        FUSE_RMS_NORM,
        replacement=lambda b, f: b.call(octavo.rms_norm.default, f["x"], f["weight"], factor * f["eps"]),
    )
    return apply_rules([rule], graph_module, PassReport("fuse_rms_norm", "reassociates"))


def that_drops_a_residual(graph_module: GraphModule) -> PassReport:
    """Every site is right; then a sum outside of them loses a term."""
    report = fuse_gated_mlp(graph_module)
    total = next(n for n in graph_module.graph.nodes if n.target is torch.ops.aten.add.Tensor)
    total.replace_all_uses_with(total.args[0])
    return report


def that_crashes(graph_module: GraphModule) -> PassReport:
    raise KeyError("lost")


def with_k_for_v(graph_module: GraphModule, page_size: int) -> PassReport:
    report = insert_paged_kv(graph_module, page_size=page_size)
    for node in graph_module.graph.nodes:
        if node.target is octavo.kv_write.default:
            node.args = (node.args[0], node.args[0], *node.args[2:])
    return report


def run(program: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run([sys.executable, program], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_clean_pipeline_is_cleared(dtype: str, tmp_path: Path) -> None:
    verdict = bisect(build(), dtype=dtype, output=tmp_path / "found")  # type: ignore[arg-type]
    assert verdict.is_clean and verdict.site is None, verdict.text()
    assert [row.name for row in verdict.rows] == ["capture", *(step.name for step in PIPELINE)]
    assert verdict.text() == "every pass is right"
    assert "wrong" not in as_text(verdict.table())
    assert not (tmp_path / "found").exists()


def test_names_pass_and_site_and_writes_a_reproducer(tmp_path: Path) -> None:
    verdict = bisect(build(), mutated("fuse_rms_norm", with_larger_eps), output=tmp_path / "found")
    assert verdict.guilty == "fuse_rms_norm"
    assert verdict.site is not None and "norm" in verdict.site.where
    assert verdict.rows[-1].name == "fuse_rms_norm" and not verdict.rows[-1].is_right
    assert all(row.is_right for row in verdict.rows[:-1])
    assert verdict.site.where in verdict.text() and str(verdict.reproducer) in verdict.text()
    assert [line.split()[-1] for line in as_text(verdict.table()).splitlines()[-2:]] == ["right", "wrong"]

    assert verdict.reproducer is not None
    shown = run(verdict.reproducer)
    assert shown.returncode == 1, shown.stderr
    assert "relative error" in shown.stdout and "bound" in shown.stdout
    text = verdict.reproducer.read_text()
    assert "octavo.rms_norm.default" in text and "aten.rsqrt.default" in text
    eps = "1e-05" if "1e-05" in text else "1e-06"
    verdict.reproducer.write_text(text.replace(f"{10 * float(eps)!r})", f"{eps})"))
    fixed = run(verdict.reproducer)
    assert fixed.returncode == 0 and "agree" in fixed.stdout, fixed.stdout + fixed.stderr


def test_a_site_over_pages_has_a_reproducer(tmp_path: Path) -> None:
    def swapped(graph_module: GraphModule, page_size: int) -> PassReport:
        report = insert_paged_kv(graph_module, page_size=page_size)
        for graph in (graph_module.graph, *(site.after.graph for site in report.sites)):
            for node in graph.nodes:
                if node.target is octavo.kv_write.default:
                    node.args = (node.args[0], node.args[0], *node.args[2:])
        for site in report.sites:
            site.after.recompile()
        return report

    verdict = bisect(build(), mutated("insert_paged_kv", swapped), output=tmp_path)
    assert verdict.guilty == "insert_paged_kv" and verdict.site is not None
    assert verdict.reproducer is not None
    shown = run(verdict.reproducer)
    assert shown.returncode == 1 and "paged" in shown.stdout, shown.stdout + shown.stderr


@pytest.mark.parametrize(
    ("name", "change"), [("fuse_gated_mlp", that_drops_a_residual), ("insert_paged_kv", with_k_for_v)]
)
def test_a_fault_between_sites_names_the_pass_only(
    name: str, change: Callable[..., PassReport], tmp_path: Path
) -> None:
    verdict = bisect(build(), mutated(name, change), output=tmp_path)
    assert (verdict.guilty, verdict.site) == (name, None)
    assert "each rewrite by itself is right" in verdict.reason
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"after_{name}.py", f"before_{name}.py"]


def test_a_crash_is_a_verdict() -> None:
    verdict = bisect(build(), mutated("fuse_rope", that_crashes))
    assert verdict.guilty == "fuse_rope" and "KeyError" in verdict.reason
    assert verdict.rows[-1].error != verdict.rows[-1].error


def test_a_small_fault_that_logits_hide_is_found() -> None:
    def slightly(graph_module: GraphModule) -> PassReport:
        return with_larger_eps(graph_module, 1.0001)

    verdict = bisect(build(), mutated("fuse_rms_norm", slightly))
    assert all(row.is_right for row in verdict.rows) and len(verdict.rows) == len(PIPELINE) + 1
    assert verdict.guilty == "fuse_rms_norm" and verdict.site is not None


def test_options_are_those_of_compile() -> None:
    with pytest.raises(OptionError, match="max_model_len"):
        bisect(build(), max_model_len=10**6)
