"""What a compilation did, as data and as tables that fit 80 columns."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from octavo.compiler.artifact import Artifact

WIDTH = 80
MAX_REASONS = 3

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Report:
    """`report.json` of an artifact. str() gives the tables; data holds everything."""

    data: dict[str, Any]

    @classmethod
    def of(cls, artifact: Artifact) -> "Report":
        return cls(json.loads(artifact.read("report.json")))

    def __str__(self) -> str:
        tables = [self.pass_table()]
        if self.data["kernels"]:
            tables += ["", self.kernel_table()]
        if self.data.get("plans"):
            tables += ["", plan_table(self.data["plans"])]
        return as_text(*tables)

    def pass_table(self) -> RenderableType:
        """Every pass: what it matched, rejected and nearly matched, and its proof."""
        return pass_table(self.data["passes"])

    def kernel_table(self) -> RenderableType:
        """Every distinct kernel and what is known of it without running it."""
        return kernel_table(self.data["kernels"])


def as_text(*renderables: RenderableType, width: int = WIDTH) -> str:
    """As it looks on a terminal of that width, without colours and trailing blanks."""
    console = Console(width=width, color_system=None, force_terminal=False)
    with console.capture() as capture:
        console.print(*renderables, sep="\n")
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())


def plain_table(*names: str, left: Sequence[str] = ()) -> Table:
    """A table without vertical lines; numbers to the right, the columns of `left` to the left."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    return table


def titled(title: str, *parts: RenderableType) -> Group:
    """A line above a table. The table's own title would be wrapped to its width."""
    return Group(Text(title, style="bold"), *parts)


def pass_table(rows: Sequence[Row]) -> RenderableType:
    """sites: distinct ones, each proven once; error: the worst of them, relative, beside the bound it keeps.

    `nodes` counts the graph after the pass. Below the table is what passes noted, and the first reasons of
    rejected and nearly matched places.
    """
    before = rows[0]["nodes_before"] if rows else 0
    names = ("pass", "matched", "rejected", "near", "nodes", "ms", "sites", "error", "bound")
    table = plain_table(*names, left=("pass",))
    below = []
    for row in rows:
        notes = ", ".join(f"{name} {value}" for name, value in row.get("notes", {}).items() if value)
        below += [Text(f"{row['pass']}: {notes}")] if notes else []
        proof = (str(row["proven_sites"]), f"{row['worst_error']:.1e}", f"{row['error_bound']:.1e}")
        table.add_row(
            row["pass"], str(row["matched"]), str(row["rejected"]), str(row["near_misses"]),
            str(row["nodes_after"]), f"{row['ms']:.0f}", *(proof if row["proven_sites"] else ("-", "-", "-")),
        )  # fmt: skip
        below += [Text(f"{row['pass']}: {reason}") for reason in row["reasons"][:MAX_REASONS]]
    return titled(f"passes ({before} nodes as captured)", table, *below)


def kernel_table(rows: Sequence[Row]) -> RenderableType:
    """GPU: registers, spills, memory, warps, instructions. CPU: bytes and FLOPs of a step."""
    is_host = rows and "registers" not in rows[0]
    return titled(f"{len(rows)} kernels", _host_kernels(rows) if is_host else _gpu_kernels(rows))


def _host_kernels(rows: Sequence[Row]) -> Table:
    table = plain_table("kernel", "bytes", "flops", left=("kernel", "bytes", "flops"))
    names = short_names(rows)
    for row in rows:
        table.add_row(names[row["name"]], str(row["bytes"]), str(row["flops"]))
    return table


def _gpu_kernels(rows: Sequence[Row]) -> Table:
    """Two lines for each kernel: the second says when it runs, and its key instructions."""
    table = plain_table("kernel", "regs", "spill", "smem", "tmem", "warps", "instr", left=("kernel",))
    names = short_names(rows)
    for row in rows:
        notes = "; ".join(
            part for part in (f"if {row['when']}" if row["when"] else "", row["key_opcodes"]) if part
        )
        numbers = ("registers", "spill_bytes", "shared_bytes", "tmem_columns", "num_warps", "instructions")
        title = Text(names[row["name"]])
        below = [Padding(Text(notes, "dim"), (0, 0, 0, 2))] if notes else []
        table.add_row(Group(title, *below), *(str(row[name]) for name in numbers))
    return table


def plan_table(rows: Sequence[Row]) -> RenderableType:
    """What a rank of each mesh holds and sends; bytes are decimal. compiler/rank_plan.py says how it is counted."""
    table = plain_table("a rank", *(mesh_text(row["parallel"]) for row in rows), left=("a rank",))
    kinds = [kind for kind in rows[0]["weights"] if any(row["weights"][kind] for row in rows)]
    lines: list[tuple[str, Callable[[Row], str]]] = [
        ("ranks", lambda row: str(row["ranks"])),
        ("experts a layer", lambda row: f"{row['experts'][1]} of {row['experts'][0]}"),
        ("weights", lambda row: decimal_text(sum(row["weights"].values()))),
        *((f"  {kind}", lambda row, kind=kind: decimal_text(row["weights"][kind])) for kind in kinds),
        (f"workspace of {rows[0]['tokens']} tokens", lambda row: decimal_text(row["workspace"] + row["logits"])),
        ("KV bytes a token", lambda row: f"{row['kv_token_bytes']:,}"),
        ("KV tokens", lambda row: "-" if row["kv_tokens"] is None else f"{row['kv_tokens']:,}"),
        (_fits_in(rows), lambda row: "-" if row["fits"] is None else "yes" if row["fits"] else "no"),
    ]  # fmt: skip
    for kind in dict.fromkeys(
        (one["kernel"], one["axis"], one["rows"]) for row in rows for one in row["exchanges"]
    ):
        lines += _exchange_lines(*kind)
    lines.append(("collectives a step", lambda row: str(sum(one["count"] for one in row["exchanges"]))))
    for name, text in lines:
        table.add_row(name, *(text(row) for row in rows))
    return titled("plan: figures of the program of each rank, nothing measured", table)


def _fits_in(rows: Sequence[Row]) -> str:
    return "fits" if rows[0]["memory"] is None else f"fits {decimal_text(rows[0]['memory'])}"


def _exchange_lines(kernel: str, axis: str, counted: str) -> list[tuple[str, Callable[[Row], str]]]:
    """Of one kind of collective: how large a row is, to how many it goes, what then leaves a rank, and how often."""

    def of(row: Row, text: Callable[[Row], str]) -> str:
        kind = (kernel, axis, counted)
        found = [one for one in row["exchanges"] if (one["kernel"], one["axis"], one["rows"]) == kind]
        return " + ".join(map(text, found)) or "-"

    name, unit = f"{kernel}, {axis}: ", "token" if counted == "T" else "row of logits"
    lines: list[tuple[str, Callable[[Row], str]]] = [
        (f"{name}bytes sent a {unit}", lambda row: of(row, lambda one: f"{one['sent']:,.0f}")),
        ("  times a step", lambda row: of(row, lambda one: str(one["count"]))),
    ]
    if kernel in ("dispatch", "combine"):
        lines[1:1] = [
            ("  bytes of a row", lambda row: of(row, lambda one: f"{one['row_bytes']:,}")),
            ("  other ranks a row goes to", lambda row: of(row, lambda one: f"{one['destinations']:.2f}")),
            ("    at most", lambda row: of(row, lambda one: f"{one['most']:g}")),
        ]
    return lines


def mesh_text(parallel: Row) -> str:
    """`ep 72, dp 72, 32 more`, without axes of one rank; `one rank`."""
    axes = [f"{axis} {parallel[axis]}" for axis in ("ep", "tp", "dp") if parallel[axis] > 1]
    more = [f"{parallel['redundant_experts']} more"] if parallel["redundant_experts"] else []
    return ", ".join(axes + more) or "one rank"


def decimal_text(num_bytes: int) -> str:
    """`61.3 GB`, `17.2 MB`, `512 B`: as memory of GPUs is sold."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def short_names(rows: Sequence[Row]) -> dict[str, str]:
    """Kernel names without the hash at their end, where that leaves them different."""
    short = {row["name"]: row["name"].rpartition("__")[0] or row["name"] for row in rows}
    taken = list(short.values())
    return {name: one if taken.count(one) == 1 else name for name, one in short.items()}


def seconds_line(seconds: Mapping[str, float]) -> str:
    """`capture 4.1 s, passes 9.8 s, ... (in all 31.0 s)`."""
    parts = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
    return f"{parts} (in all {sum(seconds.values()):.1f} s)"


def size_text(num_bytes: int) -> str:
    """`12 B`, `4.0 KiB`, `512.9 MiB`."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
