"""`octavo run --stats`: figures meanwhile on a terminal, figures at the end everywhere, and answers left whole."""

import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.compiler.artifact import ModelInfo
from octavo.compiler.commands.live_stats import LiveStats, figures
from octavo.compiler.report import as_text
from octavo.runtime.batch import Batch
from octavo.runtime.engine import Engine
from octavo.runtime.kv_cache import PageState
from octavo.runtime.page_moves import Move
from octavo.runtime.sampling_params import SamplingParams

Run = Callable[..., tuple[int, str, str]]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Runner:
    """Logits of nobody: token 5 follows everything."""

    num_pages, page_size, num_host_pages, page_windows, page_bytes = 17, 16, 0, (None,), 1024
    features: NDArray[np.generic] | None = None

    def move_pages(self, moves: Sequence[Move]) -> None: ...

    def run(self, batch: Batch) -> NDArray[np.float32]:
        return np.eye(1, 8, 5, np.float32).repeat(len(batch.logit_rows), 0)


@pytest.fixture
def engine() -> Engine:
    model = ModelInfo(
        "fake", vocab_size=8, num_layers=1, max_model_len=128, max_batch_tokens=64, eos_token_ids=()
    )
    return Engine(Runner(), model)


@contextmanager
def terminal() -> Iterator[Callable[[], str]]:
    """Standard output and standard error are one terminal; the call gives what it was sent since the last."""
    leader, follower = os.openpty()
    os.set_blocking(leader, False)

    def sent() -> str:
        pieces = []
        with suppress(BlockingIOError):
            while True:
                pieces.append(os.read(leader, 1 << 16))
        return b"".join(pieces).decode()

    with (
        open(follower, "w") as out,
        open(os.dup(follower), "w") as err,
        pytest.MonkeyPatch.context() as patched,
    ):
        patched.setenv("TERM", "xterm")
        patched.setenv("COLUMNS", "80")
        patched.setattr("sys.stdout", out)
        patched.setattr("sys.stderr", err)
        yield sent
        sent()
    os.close(leader)


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_figures_at_the_end(chat_artifact: Path, run: Run) -> None:
    _, out, err = run("run", chat_artifact, "Why?", "--raw", "--max-tokens", 8, "--stats")
    assert out == run("run", chat_artifact, "Why?", "--raw", "--max-tokens", 8)[1]
    assert "\x1b" not in err and err.count("most pages") == 1
    assert "1 private, 0 shared, 0 free-cached" in err, "the fullest moment, not the last"
    assert "1 running, 0 waiting, 0 swapped; 0 preemptions (0 swapped out)" in err
    assert re.search(
        r"tokens/s: [1-9][0-9.]* generated, [0-9.]+ prefill; prefix hits 0.0 %, 0 evictions", err
    )


def test_figures_of_shared_pages(engine: Engine) -> None:
    """40 prompt tokens are 2 pages for all; the rest, and what follows, is a page of each answer."""
    with LiveStats(engine, True) as live:
        for _ in engine.stream([[3] * 40], SamplingParams(8, 1.0, n=3)):
            live.tick()
    lines = as_text(live.summary()).splitlines()
    unused = f"{100 * (1 - (32 + 3 * 9) / 80):.1f} % unused"
    assert lines[0] == "most pages " + "█" * 6 + "▓" * 4 + "░" * 22 + f" 5.0 KiB held, {unused}"
    assert lines[1] == "  3 private, 2 shared, 0 free-cached, 11 free-clean"


def test_a_state_with_few_pages_has_a_cell_all_the_same(engine: Engine) -> None:
    states = (PageState.PRIVATE, PageState.SHARED, PageState.CACHED, PageState.CLEAN)
    for counts, bar in (((1, 2, 3, 2000), "█▓▒" + "░" * 29), ((995, 2, 2, 1), "█" * 29 + "▓▒░")):
        now = replace(engine.snapshot(), pages=dict(zip(states, counts, strict=True)))
        assert as_text(figures(now, now, now, "pages")).split()[1] == bar


def test_a_batch_shows_figures_in_place_of_bars(
    chat_artifact: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompts").write_text("Why?\nHow?\n")
    ask = ("run", chat_artifact, "--prompts-file", tmp_path / "prompts", "--max-tokens", 6)
    monkeypatch.setenv("TERM", "xterm")
    expected = run(*ask)[1]
    monkeypatch.setattr("sys.stderr", shown := Terminal())
    code, out, _ = run(*ask, "--stats")
    text = plain(shown.getvalue())
    assert (code, out) == (0, expected)
    assert "pages ░" in text and "2 running" in text and "prompts done" not in text
    assert shown.getvalue().count("\x1b[?25l") == shown.getvalue().count("\x1b[?25h") == 1
    assert text.index("load ") < text.index("most pages") and text.count("most pages") == 1


def test_an_answer_above_the_figures(engine: Engine) -> None:
    with terminal() as sent:
        with LiveStats(engine, True) as live:
            for piece in ("One [b]", "line\nand ", "another"):
                live.write(piece)
            shown = sent()
        end = sent()
        live.write(" ends\n")
        after = sent()
    assert "pages ░" in plain(shown) and "0 running" in shown
    assert "One [b]line\r\n" in plain(shown)
    *_, last = re.split(r"\x1b\[1A", shown)
    assert plain(last).split("\r\n")[0].strip() == "and another", "the figures are below the line"
    assert plain(end).endswith("and another"), "what was above the figures is left"
    assert after == " ends\r\n"


def test_nothing_is_drawn_unasked(engine: Engine) -> None:
    with terminal() as sent:
        with LiveStats(engine, False) as live:
            live.write("text")
            live.tick()
        shown = sent()
    assert shown == "text"
