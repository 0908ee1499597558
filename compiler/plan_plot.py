"""A picture of plans: what the memory of a rank holds, and what a token of a layer costs on the wire, mesh by mesh."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from octavo.compiler.errors import OptionError
from octavo.compiler.figure import check_picture, new_figure, save_figure

Row = Mapping[str, Any]
COLOURS = {
    "experts": "#1b5e9b", "attention": "#c2500e", "FFNs": "#1e7a34", "embeddings and logits": "#6a3d9a",
    "other": "#6d4534", "workspace": "#9a9a9a", "room for KV": "#dfe8d8",
}  # fmt: skip
WIRES = ("#4a83bd", "#e0995e", "#3f9f63", "#b02a7f")
SIZE_INCHES = (11.0, 5.2)


def draw_plans(path: Path, rows: Sequence[Row], names: Sequence[str], title: str) -> None:
    """Write an SVG or a PNG, as the name ends, of "plans" in a report's data; names: of the meshes.

    Raises OptionError for other names, and where nothing is planned.
    """
    check_picture(path)
    if not rows:
        raise OptionError("--plot: expected plans, got none; give --parallel")
    figure = new_figure(*SIZE_INCHES)
    memory, wire = figure.subplots(1, 2)
    figure.suptitle(f"{title}: counted in programs, not measured", x=0.012, ha="left", fontsize=12)
    _draw_memory(memory, rows)
    _draw_wire(wire, rows)
    for axes in (memory, wire):
        axes.set_xticks(range(len(rows)), [name.replace(", ", "\n") for name in names])
        axes.set_xlim(-0.6, len(rows) - 0.4)
        axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        axes.grid(True, axis="y", color="0.9", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    save_figure(figure, path)


def _draw_memory(axes: Any, rows: Sequence[Row]) -> None:
    """Stacked bars of GB, up to the memory of the device where that is known."""
    parts = [{**row["weights"], "workspace": row["workspace"] + row["logits"]} for row in rows]
    for part, row in zip(parts, rows, strict=True):
        part["room for KV"] = max((row["memory"] or 0) - row["used"], 0)
    bottoms = [0.0] * len(rows)
    for kind in parts[0]:
        heights = [part[kind] / 1e9 for part in parts]
        if any(heights):
            axes.bar(range(len(rows)), heights, 0.6, bottoms, label=kind, color=COLOURS[kind])
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for x, row in enumerate(rows):
        axes.annotate(f"{row['used'] / 1e9:.1f}", (x, row["used"] / 1e9), (0, 2), textcoords="offset points",
                      ha="center", fontsize=9)  # fmt: skip
    if rows[0]["memory"]:
        axes.axhline(rows[0]["memory"] / 1e9, color="#a61e22", linewidth=1.2)
    axes.set_title(f"memory of a rank, GB; workspace of {rows[0]['tokens']} tokens", loc="left", fontsize=10)


def _draw_wire(axes: Any, rows: Sequence[Row]) -> None:
    """Stacked bars of KB that leave a rank for a token: of each kind of collective, in one step of it."""
    kinds = list(
        dict.fromkeys(one["kernel"] for row in rows for one in row["exchanges"] if one["rows"] == "T")
    )
    bottoms = [0.0] * len(rows)
    for kind, colour in zip(kinds, WIRES, strict=False):
        heights = [
            sum(one["sent"] for one in row["exchanges"] if one["kernel"] == kind) / 1e3 for row in rows
        ]
        axes.bar(range(len(rows)), heights, 0.6, bottoms, label=kind, color=colour)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    for x, top in enumerate(bottoms):
        axes.annotate(f"{top:.1f}", (x, top), (0, 2), textcoords="offset points", ha="center", fontsize=9)
    axes.set_title("sent by a rank for a token, KB: one of each collective", loc="left", fontsize=10)
