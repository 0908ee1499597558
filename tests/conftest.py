"""Shared by all tests: tables that a test wants printed at the end of the run."""

from collections.abc import Callable

import pytest

_TABLES = pytest.StashKey[list[tuple[str, list[str]]]]()


@pytest.fixture(scope="session")
def print_at_end(request: pytest.FixtureRequest) -> Callable[[str, list[str]], None]:
    """Call with a title and lines; they follow the run's report whether or not the test passed."""
    tables = request.config.stash.setdefault(_TABLES, [])
    return lambda title, lines: tables.append((title, lines))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    for title, lines in config.stash.get(_TABLES, []):
        terminalreporter.section(title, sep="-")
        for line in lines:
            terminalreporter.write_line(line)
