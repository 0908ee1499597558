"""Writes the numbered dumps of a compilation: a graph for each pass that changed it, diffs and a summary."""

import difflib
from pathlib import Path

from torch.fx import GraphModule

from octavo.compiler.dump import print_graph
from octavo.passes.rule import PassReport


class DumpWriter:
    """Dumps into a directory, made when the first file is written. Texts are kept for the artifact too."""

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.texts: dict[str, str] = {}
        self.rows: list[str] = []
        self.previous: list[str] = []

    def write_capture(self, graph_module: GraphModule) -> None:
        self._add("00_capture", print_graph(graph_module, "as captured"))

    def write(self, index: int, report: PassReport, graph_module: GraphModule, stage: str) -> None:
        """The graph after a pass, if the pass changed it."""
        self.rows.append(_row(report))
        if not report.changed:
            return
        header = (
            f"after {report.name} | matched {report.matched}, rejected {len(report.rejected)} | "
            f"{report.nodes_before} -> {report.nodes_after} nodes | {report.ms:.0f} ms | legal: {stage}"
        )
        self._add(f"{index:02d}_{report.name}", print_graph(graph_module, header))

    def write_summary(self, lines: list[str]) -> None:
        """summary.txt: what was compiled, one row for each pass, then `lines`."""
        header = f"{'pass':<22} {'ms':>7} {'nodes':>12} {'matched':>7} {'rejected':>8}  top reason"
        self._save("summary.txt", "\n".join([header, *self.rows, *lines]) + "\n")

    def write_failure(self, index: int, name: str, graph_module: GraphModule, error: Exception) -> None:
        """The graph as the failing pass left it, and the error."""
        if self.directory is not None:
            self._save(
                f"{index + 1:02d}_{name}.failed.py", print_graph(graph_module, f"{name} failed: {error}")
            )
            self.write_summary([f"failed in {name}: {error}"])

    def _add(self, name: str, text: str) -> None:
        self.texts[f"{name}.py"] = text
        self._save(f"{name}.py", text)
        lines = text.splitlines(keepends=True)
        if self.previous:
            diff = difflib.unified_diff(self.previous, lines, "before", f"after {name[3:]}", n=2)
            self._save(f"{name}.diff", "".join(diff))
        self.previous = lines

    def _save(self, name: str, text: str) -> None:
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / name).write_text(text)


def _row(report: PassReport) -> str:
    reasons = [r.reason for r in (*report.rejected, *report.near_misses)]
    nodes = f"{report.nodes_before} -> {report.nodes_after}"
    top = reasons[0] if reasons else ""
    counts = f"{report.matched:>7} {len(report.rejected):>8}"
    return f"{report.name:<22} {report.ms:>7.1f} {nodes:>12} {counts}  {top}"
