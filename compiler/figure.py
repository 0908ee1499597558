"""Pictures that commands write with --plot: matplotlib's figures without a window, as SVG or PNG."""

from pathlib import Path
from typing import Any

from octavo.compiler.errors import MissingDependencyError, OptionError

SUFFIXES = (".svg", ".png")
DPI = 130


def check_picture(path: Path) -> None:
    """Raises OptionError for a name that ends otherwise: before what is to be drawn is worked out."""
    if path.suffix not in SUFFIXES:
        raise OptionError(f"--plot: expected a name that ends in {' or '.join(SUFFIXES)}, got {path}")


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches; no display and no state of matplotlib's own is needed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependencyError(
            "--plot: expected matplotlib, found none; pip install 'octavo[plot]'"
        ) from None
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Raises OptionError where the file cannot be written."""
    try:
        figure.savefig(path, dpi=DPI)
    except OSError as error:
        raise OptionError(f"--plot: expected a file that can be written, got {error}") from None
