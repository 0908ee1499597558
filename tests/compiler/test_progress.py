"""Bars on a terminal, nothing elsewhere, and the time of every phase."""

import io
import time

import pytest

from octavo.compiler.progress import progress_bars


def test_phases_are_timed_and_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bars() as bars:
        bars("first")("step", 0, 3)
        time.sleep(0.01)
        bars("second")
        bars("first")
        time.sleep(0.01)
    assert list(bars.seconds) == ["first", "second"]
    assert bars.seconds["first"] >= 0.02 > bars.seconds["second"]
    assert capsys.readouterr() == ("", "")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_bars_show_work_and_vanish(
    error: type[BaseException] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")

    def work() -> None:
        with progress_bars() as bars:
            report = bars("passes")
            report("fuse_rope", 3, 16)
            time.sleep(0.15)  # longer than a frame
            if error is not None:
                raise error

    if error is None:
        work()
    else:
        with pytest.raises(error):
            work()
    shown = terminal.getvalue()
    assert "passes" in shown and "3/16" in shown and "fuse_rope" in shown
    assert "\x1b[2K" in shown.splitlines()[-1]  # the last line is erased
    assert shown.count("\x1b[?25l") == shown.count("\x1b[?25h") == 1  # the cursor is back


def test_show_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress_bars(False) as bars:
        bars("passes")("a", 0, 1)
    assert terminal.getvalue() == ""
