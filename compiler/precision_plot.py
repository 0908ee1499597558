"""A picture of an artifact's formats: the bits of every product by layer, and below them what each loses alone."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.compiler.errors import OptionError
from octavo.compiler.figure import check_picture, new_figure, save_figure

Row = Mapping[str, Any]
FORMATS = {
    "nvfp4": ("NVFP4", "#3f9f63"), "nvfp4_weight_only": ("NVFP4, weights only", "#9bd0a8"), "fp8": ("FP8", "#4a83bd"),
    "bf16": ("BF16", "#c9ccd1"),
}  # fmt: skip
COLOURS = ("#1b5e9b", "#c2500e", "#1e7a34", "#a61e22", "#6a3d9a", "#6d4534", "#b02a7f", "#4d4d4d")
MARKERS = "osD^vPX*"
LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
MOST_NUMBERED = 48  # columns in whose cells the bits are written


@dataclass(frozen=True, eq=False)
class _Cell:
    """A product at (column, kind): column counts layers, then products that are in none."""

    column: int
    kind: str
    row: Row


def draw_precision(path: Path, precision: Row, title: str) -> None:
    """Write an SVG or a PNG, as the name ends, of `precision` in report.json. Raises OptionError for other names."""
    check_picture(path)
    cells = _cells([row for row in precision["products"] if row["may_be_quantised"]])
    if not cells:
        raise OptionError("--plot: expected products that are quantised, got none; compile with quantize=...")
    kinds = list(dict.fromkeys(cell.kind for cell in cells))
    columns = 1 + max(cell.column for cell in cells)
    figure, (above, below) = _figure(columns, len(kinds))
    figure.suptitle(title, x=0.012, ha="left", fontsize=12)
    _draw_bits(above, cells, kinds, columns)
    _draw_errors(below, cells, kinds)
    save_figure(figure, path)


def _cells(rows: Sequence[Row]) -> list[_Cell]:
    found: list[_Cell] = []
    layers = [int(match[1]) for row in rows if (match := LAYER.search(row["module"]))]
    others = 1 + max(layers, default=-1)
    for row in rows:
        match = LAYER.search(row["module"])
        if match is None:
            found.append(_Cell(others, row["module"], row))
            others += 1
        else:
            found.append(_Cell(int(match[1]), row["module"][match.end() :] or row["module"], row))
    return found


def _figure(columns: int, kinds: int) -> tuple[Any, Any]:
    height = 0.36 * kinds + 0.7
    figure = new_figure(min(6.5 + 0.3 * columns, 26), height + 4.4)
    return figure, figure.subplots(2, 1, sharex=True, height_ratios=(height, 4.0))


def _draw_bits(axes: Any, cells: Sequence[_Cell], kinds: Sequence[str], columns: int) -> None:
    """A rectangle for each product in the colour of its format; the legend says which share of the weights has it."""
    elements = sum(cell.row["elements"] for cell in cells)
    for cell in cells:
        left, bottom = cell.column - 0.46, kinds.index(cell.kind) - 0.42
        axes.broken_barh([(left, 0.92)], (bottom, 0.84), color=FORMATS[cell.row["format"]][1])
        if columns <= MOST_NUMBERED:
            axes.text(
                cell.column, kinds.index(cell.kind), f"{cell.row['bits']:g}", ha="center", va="center", fontsize=7,
                color="white" if cell.row["format"] in ("nvfp4", "fp8") else "0.25",
            )  # fmt: skip
    axes.set_yticks(range(len(kinds)), kinds, fontsize=9)
    axes.set_ylim(len(kinds) - 0.45, -0.55)
    axes.set_xlim(-0.8, columns - 0.2)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    for format, (label, colour) in FORMATS.items():
        own = sum(cell.row["elements"] for cell in cells if cell.row["format"] == format)
        if own:
            axes.broken_barh(
                [], (0, 0), color=colour, label=f"{label}: {100 * own / elements:.0f} % of weights"
            )
    average = sum(cell.row["elements"] * cell.row["bits"] for cell in cells) / elements
    axes.set_title(f"bits of a weight, {average:.2f} on average", loc="left", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)


def _draw_errors(axes: Any, cells: Sequence[_Cell], kinds: Sequence[str]) -> None:
    """What each product loses as it is; a hollow mark, and a line down from it: as NVFP4, where it was raised."""
    has_kl = any("kl" in values for cell in cells for values in cell.row["formats"].values())
    loss = _kl if has_kl else _noise
    lost = {cell: loss(cell.row, cell.row["format"]) for cell in cells}
    as_nvfp4 = {cell: _least(cell, loss) or lost[cell] for cell in cells}
    floor = min((value for value in lost.values() if value), default=1.0) / 2
    for index, kind in enumerate(kinds):
        own = sorted((cell for cell in cells if cell.kind == kind), key=lambda cell: cell.column)
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "marker": MARKERS[index % len(MARKERS)],
            "markersize": 5,
        }
        axes.plot(
            [c.column for c in own],
            [_at(as_nvfp4[c], floor) for c in own],
            color=style["color"],
            linewidth=0.9,
        )
        raised = [cell for cell in own if as_nvfp4[cell] != lost[cell]]
        for cell in raised:
            ends = [_at(as_nvfp4[cell], floor), _at(lost[cell], floor)]
            axes.plot([cell.column] * 2, ends, color=style["color"], linewidth=0.7, linestyle=":")
        axes.plot(
            [c.column for c in raised], [_at(as_nvfp4[c], floor) for c in raised], markerfacecolor="white",
            linestyle="none", **style,
        )  # fmt: skip
        axes.plot(
            [c.column for c in own], [_at(lost[c], floor) for c in own], linestyle="none", label=kind, **style
        )
    axes.set_yscale("log")
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("nats a token" if has_kl else "%")
    what = (
        "mean KL of the logits when this product alone is quantised"
        if has_kl
        else "error of the result, estimated"
    )
    hollow = "; hollow: as NVFP4, where it was raised" if any(as_nvfp4[c] != lost[c] for c in cells) else ""
    nothing = f"; BF16, without any, at {floor:.0e}" if 0 in lost.values() else ""
    axes.set_title(what + hollow + nothing, loc="left", fontsize=10)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)


def _least(cell: _Cell, loss: Callable[[Any, str], float | None]) -> float | None:
    """What the product loses in the format of least bits that was measured."""
    return loss(cell.row, "nvfp4") or loss(cell.row, "nvfp4_weight_only")


def _at(value: float | None, floor: float) -> float:
    """Where it is drawn on a logarithmic axis: nothing lost at the floor, nothing known nowhere."""
    return math.nan if value is None else max(value, floor)


def _kl(row: Row, format: str) -> float | None:
    if format == "bf16":
        return 0.0
    value: float | None = row["formats"].get(format, {}).get("kl")
    return value


def _noise(row: Row, format: str) -> float | None:
    """% of the result: noise of the weight and of the input add up."""
    ratios = [row["formats"].get(format, {}).get(name) for name in ("sqnr_weight", "sqnr_input")]
    known = [10 ** (-ratio / 10) for ratio in ratios if ratio is not None]
    return 100 * math.sqrt(sum(known)) if known else None
