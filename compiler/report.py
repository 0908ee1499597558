"""What a compilation did, as data and as text."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table

from octavo.compiler.artifact import Artifact


@dataclass(frozen=True)
class Report:
    """`report.json` of an artifact. str() gives the tables; data holds everything."""

    data: dict[str, Any]

    @classmethod
    def of(cls, artifact: Artifact) -> "Report":
        return cls(json.loads(artifact.read("report.json")))

    def __str__(self) -> str:
        console = Console(width=120, color_system=None, force_terminal=False)
        with console.capture() as capture:
            console.print(self.pass_table())
            console.print(self.kernel_table())
        return capture.get()

    def pass_table(self) -> RenderableType:
        """Every pass: what it matched, rejected and nearly matched, and its proof."""
        table = Table(title="passes", title_justify="left")
        for name in ("pass", "matched", "rejected", "near misses", "nodes", "ms", "proof"):
            table.add_column(name, justify="left" if name in ("pass", "proof") else "right")
        for row in self.data["passes"]:
            table.add_row(
                row["pass"], str(row["matched"]), str(row["rejected"]), str(row["near_misses"]),
                f"{row['nodes_before']} -> {row['nodes_after']}", f"{row['ms']:.0f}", _proof(row),
            )  # fmt: skip
        return table

    def kernel_table(self) -> RenderableType:
        """Every distinct kernel and what is known of it without running it."""
        return kernel_table(self.data["kernels"])


def _proof(row: dict[str, Any]) -> str:
    if not row["proven_sites"]:
        return "-"
    return f"{row['proven_sites']} sites, error {row['worst_error']:.1e} <= {row['error_bound']:.1e}"


COLUMNS = {
    "name": "kernel", "when": "when", "registers": "regs", "spill_bytes": "spills", "shared_bytes": "smem",
    "tmem_columns": "tmem", "num_warps": "warps", "instructions": "instr", "key_opcodes": "key instructions",
    "bytes": "bytes", "flops": "flops",
}  # fmt: skip


def kernel_table(rows: Sequence[dict[str, Any]]) -> RenderableType:
    """Registers, spills, memories and instruction census of cubins, or bytes and FLOPs of host code."""
    table = Table(title="kernels", title_justify="left")
    shown = [name for name in COLUMNS if rows and name in rows[0]]
    for name in shown:
        text = name in ("name", "when", "key_opcodes", "bytes", "flops")
        table.add_column(COLUMNS[name], justify="left" if text else "right", overflow="fold")
    for row in rows:
        table.add_row(*(str(row[name]) for name in shown))
    return table
