"""A picture of how loads of experts lie on ranks: every layer's, before and after they were placed."""

from collections.abc import Sequence
from pathlib import Path

from octavo.compiler.figure import check_picture, new_figure, save_figure


def draw_rank_loads(path: Path, before: Sequence[Sequence[float]], after: Sequence[Sequence[float]]) -> None:
    """Write an SVG or a PNG, as the name ends: loads (layers, ranks) as multiples of each layer's mean.

    Raises OptionError for another name.
    """
    check_picture(path)
    figure = new_figure(11.0, 2.0 + 0.12 * len(before))
    panels = figure.subplots(1, 2, sharey=True)
    shown = [[_over_mean(row) for row in rows] for rows in (before, after)]
    largest = max(max(row) for rows in shown for row in rows)
    images = []
    for axes, rows, title in zip(panels, shown, ("experts in order", "placed by load"), strict=True):
        image = axes.imshow(
            rows, aspect="auto", cmap="viridis", vmin=0.0, vmax=largest, interpolation="nearest"
        )
        images.append(image)
        axes.set(xlabel="rank")
        axes.set_title(f"{title}: largest {max(map(max, rows)):.2f} of the mean", loc="left", fontsize=10)
    panels[0].set(ylabel="layer")
    figure.colorbar(images[0], ax=panels, label="load over the layer's mean")
    save_figure(figure, path)


def _over_mean(row: Sequence[float]) -> list[float]:
    mean = sum(row) / len(row)
    return [load / mean if mean else 0.0 for load in row]
