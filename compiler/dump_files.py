"""Writes the dump of a compilation: a numbered graph for each step that changed it, diffs, summaries, weights."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.dump import print_graph
from octavo.compiler.dump_summary import FORMAT_VERSION, SUMMARY
from octavo.compiler.dump_weights import save_weights
from octavo.compiler.errors import ArtifactError
from octavo.compiler.line_diff import unified
from octavo.compiler.step_rows import step_entry
from octavo.passes.rewrite import held
from octavo.passes.rule import PassReport


class DumpWriter:
    """Dumps into a directory, made when the first file is written. Texts are kept for the artifact too.

    facts         what was compiled, how, and by which versions: goes into summary.json as it is
    keep_weights  write what the graphs read beside them, so that `octavo compile --from` can go on
    """

    def __init__(
        self,
        directory: Path | None,
        keep_weights: bool = True,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self.keep_weights = keep_weights
        self.facts = dict(facts or {})
        self.texts: dict[str, str] = {}
        self.rows: list[str] = []
        self.entries: list[dict[str, Any]] = []
        self.start: dict[str, Any] = {}
        self.error: dict[str, Any] | None = None
        self.tensors: dict[str, Tensor] = {}
        self.saved: dict[str, Any] | None = None
        self.previous: list[str] = []
        self.shape: list[tuple[str, str]] = []

    def write_start(self, name: str, graph_module: GraphModule, header: str) -> None:
        """The graph before the first step: `00_capture`, or the one that compiling goes on from."""
        digest = self._add(name, graph_module, header)
        self.start = {"file": f"{name}.py", "sha256": digest, "nodes": len(graph_module.graph.nodes)}

    def write(self, index: int, report: PassReport, graph_module: GraphModule, stage: str) -> None:
        """The graph after step `index` (from 1), if the step changed it, and what the step did."""
        self.rows.append(_row(report))
        file: dict[str, Any] = {"file": None, "sha256": None}
        if report.changed or _shape(graph_module) != self.shape:
            header = (
                f"after {report.name} | matched {report.matched}, rejected {len(report.rejected)} | "
                f"{report.nodes_before} -> {report.nodes_after} nodes | legal: {stage}"
            )
            name = f"{index:02d}_{report.name}"
            file = {"file": f"{name}.py", "sha256": self._add(name, graph_module, header)}
        self.entries.append({"index": index, **file, "stage": stage, **step_entry(report)})

    def write_summary(self, lines: list[str]) -> None:
        """summary.txt: what was compiled, one row for each pass, then `lines`; summary.json; the weights."""
        if self.directory is None:
            return
        header = f"{'pass':<22} {'ms':>7} {'nodes':>12} {'matched':>7} {'rejected':>8}  top reason"
        self._save("summary.txt", "\n".join([header, *self.rows, *lines]) + "\n")
        weights, missing = self._write_weights()
        data = {
            "format_version": FORMAT_VERSION, **self.facts, "start": self.start, "steps": self.entries,
            "weights": weights, "weights_missing": missing, "error": self.error, "results": lines,
        }  # fmt: skip
        self._save(SUMMARY, json.dumps(data, indent=1, default=str) + "\n")

    def write_failure(self, index: int, name: str, graph_module: GraphModule, error: Exception) -> None:
        """The graph as the failing step left it, and the error. index: of the step, from 0."""
        if self.directory is not None:
            file = f"{index + 1:02d}_{name}.failed.py"
            self._save(file, print_graph(graph_module, f"{name} failed: {error}"))
            self.fail(name, error, index + 1, file)

    def fail(self, name: str, error: Exception, index: int | None = None, file: str | None = None) -> None:
        """Both summaries, with what went wrong."""
        self.error = {
            "step": name, "index": index, "file": file, "type": type(error).__name__, "message": str(error),
        }  # fmt: skip
        self.write_summary([f"failed in {name}: {error}"])

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Files of the artifact that no graph holds (its tokenizer)."""
        for name, content in files.items() if self.directory is not None else ():
            path = self.directory / name  # type: ignore[operator]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)

    def _write_weights(self) -> tuple[dict[str, Any] | None, str]:
        """What is in the weights' file, or why there is none."""
        assert self.directory is not None
        if not self.keep_weights:
            return None, "they were not asked for"
        try:
            self.saved = self.saved or save_weights(self.directory, self.tensors)
        except ArtifactError as error:
            return None, str(error)
        return self.saved, ""

    def _add(self, name: str, graph_module: GraphModule, header: str) -> str:
        """Returns the hash of the text."""
        text = print_graph(graph_module, header)
        self.shape = _shape(graph_module)
        self.texts[f"{name}.py"] = text
        self._save(f"{name}.py", text)
        if self.directory is not None:
            lines = text.splitlines()
            if self.previous:
                diff = unified(self.previous, lines, ("before", f"after {name[3:]}"))
                self._save(f"{name}.diff", diff)
            self.previous = lines
            weights = [str(n.target) for n in graph_module.graph.nodes if n.op == "get_attr"]
            self.tensors |= {weight: held(graph_module, weight) for weight in weights}
        return hashlib.sha256(text.encode()).hexdigest()

    def _save(self, name: str, text: str) -> None:
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / name).write_text(text, encoding="utf-8")


def _shape(graph_module: GraphModule) -> list[tuple[str, str]]:
    """What changes with a graph even where a pass counts no sites and as many nodes come as go."""
    return [(node.name, str(node.target)) for node in graph_module.graph.nodes]


def _row(report: PassReport) -> str:
    reasons = [r.reason for r in (*report.rejected, *report.near_misses)]
    nodes = f"{report.nodes_before} -> {report.nodes_after}"
    top = reasons[0] if reasons else ""
    counts = f"{report.matched:>7} {len(report.rejected):>8}"
    return f"{report.name:<22} {report.ms:>7.1f} {nodes:>12} {counts}  {top}"
