"""What every picture of a command shares: names, a missing matplotlib, a place that cannot be written."""

import sys
from pathlib import Path

import pytest

from octavo.compiler.errors import MissingDependencyError, OptionError
from octavo.compiler.figure import check_picture, new_figure, save_figure


def test_a_name_says_the_format(tmp_path: Path) -> None:
    check_picture(tmp_path / "a.svg")
    with pytest.raises(OptionError, match=r"expected a name that ends in \.svg or \.png, got .*a\.pdf"):
        check_picture(tmp_path / "a.pdf")


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'octavo\[plot\]'"):
        new_figure(1.0, 1.0)


def test_a_place_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    figure = new_figure(2.0, 1.0)
    save_figure(figure, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(OptionError, match="expected a file that can be written"):
        save_figure(figure, tmp_path / "none" / "a.png")
