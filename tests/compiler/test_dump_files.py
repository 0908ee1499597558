"""The files of a compilation's dump: numbered, only where something changed, and complete on failure."""

import hashlib
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lowered import LoweredGraph
from stages import FP32, SETTINGS, captured

from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.dump_load import load_graph
from octavo.compiler.errors import PassError
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import PIPELINE, dump_directory, lower
from octavo.passes.rule import PassReport, Rejection


def names(directory: Path, pattern: str) -> list[str]:
    return sorted(path.name for path in directory.glob(pattern))


def test_a_file_for_the_capture_and_each_pass_that_changed_something(tmp_path: Path) -> None:
    dumps, model = DumpWriter(tmp_path / "new"), captured()
    lower(model, CompileOptions(verify="off"), SETTINGS, dumps=dumps)
    dumps.write_summary(["12 kernels"])
    files = names(tmp_path / "new", "*.py")
    order = [step.name for step in PIPELINE]
    norms = f"{order.index('fuse_rms_norm') + 1:02d}_fuse_rms_norm"
    assert files[:2] == ["00_capture.py", "01_canonicalize.py"]
    assert f"{norms}.py" in files
    assert files[-1].endswith("_fold_constants.py")
    assert not [name for name in files if "fuse_attention" in name]  # the library has named it already
    assert names(tmp_path / "new", "*.diff") == [name.replace(".py", ".diff") for name in files[1:]]
    assert set(dumps.texts) == set(files)
    text = (tmp_path / f"new/{norms}.py").read_text()
    assert text.startswith('"""after fuse_rms_norm | matched 5, rejected 0 | ')
    assert "| legal: canonical" in text.splitlines()[0]
    load_graph(text)
    diff = (tmp_path / f"new/{norms}.diff").read_text()
    assert "+    rms_norm = octavo.rms_norm.default(" in diff
    summary = (tmp_path / "new/summary.txt").read_text().splitlines()
    assert len(summary) == 1 + len(PIPELINE) + 1
    assert summary[-1] == "12 kernels"
    assert [line.split()[0] for line in summary[1:-1]] == order


def test_summary_json_has_every_step_with_its_file_proof_and_refusals(tmp_path: Path) -> None:
    dumps = DumpWriter(tmp_path, facts={"target": "cpu"})
    lower(captured("fused"), CompileOptions(), SETTINGS, dumps=dumps)
    dumps.write_summary(["12 kernels"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["target"], summary["error"], summary["results"]) == ("cpu", None, ["12 kernels"])
    assert (summary["start"]["file"], summary["start"]["nodes"] > 50) == ("00_capture.py", True)
    steps = summary["steps"]
    assert [step["name"] for step in steps] == [step.name for step in PIPELINE]
    assert [step["index"] for step in steps] == list(range(1, len(PIPELINE) + 1))
    files = {summary["start"]["file"], *(step["file"] for step in steps)} - {None}
    assert sorted(files) == names(tmp_path, "*.py")
    for entry in (summary["start"], *(step for step in steps if step["file"])):
        assert entry["sha256"] == hashlib.sha256((tmp_path / entry["file"]).read_bytes()).hexdigest()
    by_name = {step["name"]: step for step in steps}
    attention = by_name["fuse_attention"]
    assert 0 < attention["proof"]["worst_error"] <= attention["proof"]["error_bound"]
    assert attention["notes"]["attentions"] == "2 of 2"
    refused = by_name["merge_qkv"]["rejected"][0]
    assert refused["node"].startswith("paged_attention") and refused["module"] and refused["reason"]
    assert re.fullmatch(r"\w+\.py:\d+", refused["source"])
    assert all(step["nodes_after"] == after["nodes_before"] for step, after in itertools.pairwise(steps))


def test_a_step_that_changes_the_graph_without_sites_is_written(tmp_path: Path) -> None:
    """As folding does that makes one weight where there was one call."""
    dumps, module = DumpWriter(tmp_path), graph_module()
    dumps.write_start("00_capture", module, "as captured")
    dumps.write(1, PassReport("quiet"), module, "canonical")
    (node,) = (n for n in module.graph.nodes if n.op == "call_function")
    node.target = torch.ops.aten.abs.default
    dumps.write(2, PassReport("busy"), module, "canonical")
    assert names(tmp_path, "*.py") == ["00_capture.py", "02_busy.py"]


def graph_module() -> torch.fx.GraphModule:
    g = LoweredGraph()
    return g.finish(g.function(torch.ops.aten.neg.default, g.tokens("x", (4,), FP32)))


def test_summary_gives_the_first_reason(tmp_path: Path) -> None:
    dumps = DumpWriter(tmp_path)
    report = PassReport("fuse_rope", rejected=[Rejection("a", "node a", "head_dim must be even, got 65")])
    module = graph_module()
    dumps.write_start("00_capture", module, "as captured")
    dumps.write(3, report, module, "canonical")
    dumps.write_summary([])
    assert (tmp_path / "summary.txt").read_text().endswith("1  head_dim must be even, got 65\n")
    assert names(tmp_path, "*.py") == ["00_capture.py"]


def test_failure_keeps_the_graph_and_the_reason(tmp_path: Path) -> None:
    def broken(graph: torch.fx.GraphModule) -> PassReport:
        raise PassError("broken: nothing fits (node a)")

    dumps = DumpWriter(tmp_path)
    with pytest.raises(PassError):
        lower(captured(), CompileOptions(), SETTINGS, [replace(PIPELINE[0], run=broken)], dumps=dumps)
    assert names(tmp_path, "*.py") == ["00_capture.py", "01_broken.failed.py"]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["error"] == {
        "step": "broken", "index": 1, "file": "01_broken.failed.py", "type": "PassError",
        "message": "broken: nothing fits (node a)",
    }  # fmt: skip
    assert summary["steps"] == [] and summary["weights"]["file"] == "weights.safetensors"
    assert "broken failed: broken: nothing fits (node a)" in (tmp_path / "01_broken.failed.py").read_text()
    assert (
        (tmp_path / "summary.txt").read_text().endswith("failed in broken: broken: nothing fits (node a)\n")
    )


def test_without_a_directory_texts_are_kept_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dumps = DumpWriter(None)
    dumps.write_start("00_capture", graph_module(), "as captured")
    dumps.write_files({"tokenizer/x": b"x"})
    dumps.write_summary(["x"])
    dumps.write_failure(0, "x", graph_module(), PassError("x"))
    assert list(dumps.texts) == ["00_capture.py"]
    assert list(tmp_path.iterdir()) == []


def test_the_option_beats_the_environment() -> None:
    assert dump_directory(CompileOptions(), None) is None
    assert dump_directory(CompileOptions(), "a") == Path("a")
    assert dump_directory(CompileOptions(dump=Path("b")), "a") == Path("b")
