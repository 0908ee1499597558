"""A roofline picture: operations a second over operations a byte, the roofs of a target and a mark for each kernel."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.compiler.errors import OptionError
from octavo.compiler.figure import check_picture, new_figure, save_figure
from octavo.compiler.target import Target

ROOFS = {"nvfp4": "NVFP4", "fp8": "FP8", "bf16": "BF16", "fp32": "FP32 (CUDA cores)"}
MARKERS = "osD^vPX*"
# Dark enough for small text on white.
COLOURS = (
    "#1b5e9b", "#b3470b", "#1e7a34", "#a61e22", "#6a3d9a", "#6d4534", "#b02a7f", "#4d4d4d", "#7a7a00", "#00798a",
)  # fmt: skip
SIZE_INCHES = (13.0, 8.0)
# Where a label may lie from its mark, in points: rings of eight directions.
_DIRECTIONS = ((1, 0), (1, 1), (1, -1), (-1, 0), (-1, 1), (-1, -1), (0, 1), (0, -1))
_RINGS = (9, 18, 30, 45, 62, 82, 105, 130)


@dataclass(frozen=True)
class Mark:
    """A kernel at a point: operations for each byte of memory, and operations a second."""

    name: str
    point: str
    intensity: float
    rate: float


def draw_roofline(path: Path, target: Target, marks: Sequence[Mark], title: str) -> None:
    """Write an SVG or a PNG, as the name ends. Raises OptionError for other names and where nothing is to draw."""
    check_picture(path)
    marks = [mark for mark in marks if mark.intensity > 0 and mark.rate > 0]
    if not marks or not target.hbm_bytes_per_s:
        raise OptionError("--plot: expected kernels with bytes and flops at these points, got none")
    figure, axes = _figure(target, marks)
    axes.set_title(f"{title}: predicted by the cost model, not measured", loc="left", fontsize=12)
    _draw_roofs(axes, target)
    _draw_marks(figure, axes, marks)
    save_figure(figure, path)


def _figure(target: Target, marks: Sequence[Mark]) -> tuple[Any, Any]:
    figure = new_figure(*SIZE_INCHES)
    axes = figure.add_subplot()
    intensities, rates = [mark.intensity for mark in marks], [mark.rate for mark in marks]
    ridge = max(target.flops.values()) / (target.hbm_bytes_per_s or 1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(min(intensities) / 3, max(*intensities, ridge) * 4)
    axes.set_ylim(min(rates) / 4, max(target.flops.values()) * 2.5)
    axes.set_xlabel("intensity (FLOP per byte of device memory)")
    axes.set_ylabel("rate (FLOP/s)")
    axes.grid(True, which="major", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _draw_roofs(axes: Any, target: Target) -> None:
    """The slope of memory up to the highest roof, and a level for each dtype from where it meets the slope."""
    bandwidth = target.hbm_bytes_per_s or 1.0
    left, right = axes.get_xlim()
    top = max(target.flops.values())
    axes.plot([left, top / bandwidth], [left * bandwidth, top], color="0.25", linewidth=2)
    inside = max(left * 1.3, axes.get_ylim()[0] / bandwidth * 1.6)
    axes.annotate(
        f"memory {bandwidth / 1e12:g} TB/s", (inside, inside * bandwidth), (-4, 14), textcoords="offset points",
        rotation=_slope_degrees(axes), rotation_mode="anchor", fontsize=9, color="0.25",
    )  # fmt: skip
    for dtype, label in ROOFS.items():
        if dtype in target.flops:
            rate = target.flops[dtype]
            axes.plot([rate / bandwidth, right], [rate, rate], color="0.25", linewidth=1.4, linestyle="--")
            axes.annotate(
                f"{label} {rate / 1e12:g} TFLOP/s", (right, rate), (-4, 4), textcoords="offset points", ha="right",
                fontsize=9, color="0.25",
            )  # fmt: skip


def _slope_degrees(axes: Any) -> float:
    """Angle of the memory roof on the page; it rises one decade for each decade of intensity."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    width, height = SIZE_INCHES
    across = width * 0.93 / math.log10(right / left)
    up = height * 0.88 / math.log10(high / low)
    return math.degrees(math.atan2(up, across))


def _draw_marks(figure: Any, axes: Any, marks: Sequence[Mark]) -> None:
    """A colour for each kernel, a shape for each point, and the kernel's name once."""
    names = list(dict.fromkeys(mark.name for mark in marks))
    points = list(dict.fromkeys(mark.point for mark in marks))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    shapes = {point: MARKERS[i % len(MARKERS)] for i, point in enumerate(points)}
    for mark in marks:
        axes.plot(
            mark.intensity, mark.rate, marker=shapes[mark.point], color=colours[mark.name], markersize=7,
            markeredgecolor="white", linestyle="none",
        )  # fmt: skip
    for point, shape in shapes.items():
        axes.plot([], [], marker=shape, color="0.4", linestyle="none", label=point)
    axes.legend(title="step", loc="lower right", fontsize=9, title_fontsize=9)
    _label(figure, axes, marks, colours)


def _label(figure: Any, axes: Any, marks: Sequence[Mark], colours: dict[str, str]) -> None:
    """Each kernel's name beside its first mark, at the nearest place where it meets no other name and no mark."""
    figure.draw_without_rendering()
    scale = figure.dpi / 72
    places = [tuple(axes.transData.transform((mark.intensity, mark.rate))) for mark in marks]
    taken = [(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale) for x, y in places]
    taken += [_box(axes.get_legend().get_window_extent())]
    taken += [_box(text.get_window_extent()) for text in axes.texts]
    taken += [box for line in axes.lines for box in _along(axes.transData.transform(line.get_xydata()))]
    frame = _box(axes.get_window_extent())
    seen: set[str] = set()
    for mark, place in zip(marks, places, strict=True):
        if mark.name in seen:
            continue
        seen.add(mark.name)
        shown = mark.name.replace("__", " ").replace("_", " ")
        probe = axes.text(mark.intensity, mark.rate, shown, fontsize=8)
        extent = probe.get_window_extent()
        probe.remove()
        offset, box = _free_place(place, (extent.width, extent.height), scale, taken, frame)
        side = 0.0 if offset[0] > 0 else 1.0 if offset[0] < 0 else 0.5
        axes.annotate(
            shown, (mark.intensity, mark.rate), offset, textcoords="offset points", fontsize=8, va="center",
            ha=("left", "center", "right")[int(side * 2)], color=colours[mark.name],
            arrowprops={
                "arrowstyle": "-", "color": "0.6", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 3,
                "relpos": (side, 0.5),
            },
        )  # fmt: skip
        taken.append(box)


def _along(ends: Any) -> list[tuple[float, float, float, float]]:
    """Small boxes along a straight line of two ends in pixels; none for other lines."""
    if len(ends) != 2:
        return []
    (x0, y0), (x1, y1) = ends
    steps = max(int(math.hypot(x1 - x0, y1 - y0) / 8), 1)
    middles = [(x0 + (x1 - x0) * i / steps, y0 + (y1 - y0) * i / steps) for i in range(steps + 1)]
    return [(x - 4, y - 4, x + 4, y + 4) for x, y in middles]


Box = tuple[float, float, float, float]


def _free_place(
    place: tuple[float, ...], size: tuple[float, float], scale: float, taken: Sequence[Box], frame: Box
) -> tuple[tuple[float, float], Box]:
    """Offset in points and box in pixels; the outermost where every place is taken."""
    choices = [(ring * dx, ring * dy) for ring in _RINGS for dx, dy in _DIRECTIONS]
    width, height = size
    box: Box = frame
    for dx, dy in choices:
        anchor, middle = place[0] + dx * scale, place[1] + dy * scale
        left = anchor if dx > 0 else anchor - width if dx < 0 else anchor - width / 2
        box = (left, middle - height / 2, left + width, middle + height / 2)
        is_inside = frame[0] <= box[0] and box[2] <= frame[2] and frame[1] <= box[1] and box[3] <= frame[3]
        if is_inside and not any(_overlap(box, other) for other in taken):
            return (dx, dy), box
    return choices[-1], box


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _box(extent: Any) -> Box:
    return extent.x0, extent.y0, extent.x1, extent.y1
