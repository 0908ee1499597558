"""`octavo view`: one file that works in a browser, with the keyboard, at 1280 pixels."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
from browser import Browser, find_chromium
from stages import SETTINGS, captured

from octavo.compiler.dump_files import DumpWriter
from octavo.compiler.options import CompileOptions
from octavo.compiler.pipeline import PIPELINE, lower

Run = Callable[..., tuple[int, str, str]]
CHROMIUM = find_chromium()
# What the page shows, read off its elements.
STEP = "document.querySelector('#steps [aria-selected=true] .name').textContent"
TAB = "document.querySelector('[role=tab][aria-selected=true]').id"
HITS = "document.getElementById('hits').textContent"


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model with refusals."""
    directory = tmp_path_factory.mktemp("view") / "dump"
    facts = {"target": "cpu", "model": {"name": "tiny <b>", "num_layers": 2}, "options": {}, "settings": {}}
    dumps = DumpWriter(directory, facts=facts)
    lower(captured("fused"), CompileOptions(), SETTINGS, dumps=dumps)
    dumps.write_summary([])
    return directory


def test_view_writes_one_page(dump: Path, run: Run, tmp_path: Path) -> None:
    code, out, err = run("view", dump, "-o", tmp_path / "page.html")
    assert (code, out) == (0, f"{tmp_path / 'page.html'}\n")
    assert err.endswith("KiB, needs no network\n")
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    with mock.patch("webbrowser.open", return_value=True) as opened:
        code, out, _ = run("view", dump, "--open")
    assert (code, out) == (0, f"{dump / 'view.html'}\n")
    opened.assert_called_once_with((dump / "view.html").as_uri())


def test_view_of_something_else_is_refused(run: Run, tmp_path: Path, dump: Path) -> None:
    code, out, err = run("view", tmp_path)
    assert (code, out) == (
        2,
        "",
    ) and "expected a dump, got no summary.json in it; `octavo compile MODEL" in err
    code, _, err = run("view", dump, "-o", tmp_path / "no/such/folder.html")
    assert code == 2 and "output: expected to write" in err


def test_view_waits_for_no_torch() -> None:
    program = "import sys, octavo.compiler.commands.view; print('torch' in sys.modules)"
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", program], env=paths, capture_output=True, text=True)
    assert result.stdout == "False\n", result.stderr


@pytest.fixture(scope="module")
def browser(dump: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed (Debian: apt-get install chromium)")
    with Browser(CHROMIUM, tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture
def opened(browser: Browser, dump: Path, run: Run) -> Iterator[Browser]:
    """The page of the dump at its start; whatever a test does, nothing may go wrong or leave the machine."""
    assert run("view", dump)[0] == 0
    browser.open(dump / "view.html")
    yield browser
    assert browser.errors == []
    assert [url for url in browser.requests if not url.startswith(("file:", "about:", "data:"))] == []


def test_keys_choose_passes_and_views(opened: Browser) -> None:
    assert opened.evaluate("document.title") == "tiny <b>: octavo view"
    names = ["capture", *(step.name for step in PIPELINE)]
    count = opened.evaluate("document.querySelectorAll('#steps .step').length")
    assert count == len(names)
    opened.press("Home")
    assert opened.evaluate(STEP) == "capture"
    opened.press("j")
    assert opened.evaluate(STEP) == names[1]
    opened.press("ArrowDown")
    assert opened.evaluate(STEP) == names[2]
    opened.press("k")
    opened.press("ArrowUp")
    opened.press("ArrowUp")
    assert opened.evaluate(STEP) == "capture"
    for key, tab in (("2", "tab-graph"), ("3", "tab-refused"), ("1", "tab-diff")):
        opened.press(key)
        assert opened.evaluate(TAB) == tab
    opened.press("?")
    assert opened.evaluate("document.getElementById('help').open") is True
    opened.press("j")
    assert opened.evaluate(STEP) == "capture"
    opened.press("Escape")
    assert opened.evaluate("document.getElementById('help').open") is False


def test_search_counts_marks_and_goes_round(opened: Browser, dump: Path) -> None:
    lines = [line for line in (dump / "00_capture.py").read_text().splitlines() if "softmax" in line]
    count = len(lines)
    assert count >= 2
    opened.press("Home")
    opened.press("/")
    for letter in "softMAX":
        opened.press(letter)
    assert opened.evaluate("document.activeElement.id") == "query"
    assert opened.evaluate(HITS) == f"1 / {count}"
    assert opened.evaluate("document.querySelector('#right mark.now').textContent") == "softmax"
    assert opened.evaluate("document.querySelector('#steps .found').textContent") == str(count)
    opened.press("Enter")
    assert opened.evaluate(HITS) == f"2 / {count}"
    opened.evaluate("document.getElementById('query').blur()")
    for key, at in (("N", 1), ("N", count), ("n", 1)):
        opened.press(key)
        assert opened.evaluate(HITS) == f"{at} / {count}"
    opened.press("/")
    for letter in "paged_attention":
        opened.press(letter)
    assert (opened.evaluate(HITS), opened.evaluate(STEP)) == ("none here", "capture")
    opened.press("Enter")
    assert opened.evaluate(STEP) == "insert_paged_kv" and opened.evaluate(HITS).startswith("1 / ")
    opened.press("Escape")
    assert opened.evaluate(HITS) == "" and opened.evaluate("document.querySelectorAll('mark').length") == 0


def test_both_texts_scroll_together_and_folds_open(opened: Browser) -> None:
    opened.evaluate("location.hash = ''")
    shown = "document.getElementById('right').scrollHeight"
    folds = "document.querySelectorAll('#right .fold').length"
    assert opened.evaluate(folds) > 0
    before = opened.evaluate(shown)
    opened.press("a")
    assert opened.evaluate(shown) > before and opened.evaluate(folds) == 0
    opened.evaluate(
        "document.getElementById('left').scrollTop = 200; document.getElementById('left').scrollLeft = 90"
    )
    opened.wait("document.getElementById('right').scrollTop === 200")
    opened.wait("document.getElementById('right').scrollLeft === 90")
    opened.evaluate("document.getElementById('right').scrollTop = 40")
    opened.wait("document.getElementById('left').scrollTop === 40")
    opened.press("a")
    assert opened.evaluate(shown) == before
    opened.press("Enter")
    assert opened.evaluate(shown) > before
    assert opened.evaluate("document.querySelectorAll('#left .row').length") < 120


def test_a_node_of_the_graph_leads_to_its_line(opened: Browser) -> None:
    opened.evaluate("document.querySelector('#tab-graph').click()")
    layers = opened.evaluate("[...document.getElementById('layer').options].map((o) => o.value)")
    assert {"layers.0", "layers.1"} <= {name.removeprefix("inner.") for name in layers}
    boxes = opened.evaluate("document.querySelectorAll('#canvas .box:not(.port)').length")
    assert boxes > 5 and opened.evaluate("document.querySelectorAll('#canvas .edge').length") >= boxes
    box = "document.querySelectorAll('#canvas .box:not(.port)')[3]"
    opened.evaluate(f"{box}.dispatchEvent(new MouseEvent('click'))")
    name = opened.evaluate("document.querySelector('#canvas .chosen').dataset.key")
    facts = opened.evaluate("document.getElementById('node').textContent")
    assert name in facts and "f32[" in facts and ".py:" in facts
    assert opened.evaluate("document.querySelector('#excerpt .here .d').textContent") == name
    opened.press("Enter")
    assert opened.evaluate(TAB) == "tab-diff"
    assert opened.evaluate("document.querySelector('#right .here .d').textContent") == name
    assert name in opened.evaluate("document.getElementById('detail').textContent")


def test_boxes_of_a_rank_do_not_overlap(opened: Browser) -> None:
    opened.press("2")
    frames = "[...document.querySelectorAll('#canvas .box .frame')]"
    boxes = opened.evaluate(f"{frames}.map((b) => b.getBoundingClientRect()).map((r) => [r.x, r.right, r.y])")
    assert len(boxes) > 5
    for a in boxes:
        assert [b for b in boxes if b is not a and abs(b[2] - a[2]) < 1 and a[0] < b[1] and b[0] < a[1]] == []


def test_what_was_left_alone_is_listed_with_its_reason(opened: Browser) -> None:
    at = next(i for i, step in enumerate(PIPELINE, 1) if step.name == "merge_qkv")
    opened.evaluate(f"document.getElementById('step-{at}').click()")
    opened.press("3")
    panel = opened.evaluate("document.getElementById('panel-refused').textContent")
    assert "Rejected" in panel and "(2 places)" in panel and "paged_attention" in panel
    opened.evaluate("document.querySelector('#panel-refused button').click()")
    assert opened.evaluate(TAB) == "tab-diff"
    assert opened.evaluate("document.querySelector('#right .here .d').textContent").startswith(
        "paged_attention"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(scheme: str, opened: Browser) -> None:
    opened.scheme(scheme)
    colours = "getComputedStyle(document.body).backgroundColor"
    assert (opened.evaluate(colours) == "rgb(18, 22, 28)") == (scheme == "dark")
    for key in "123":
        opened.press(key)
        for _ in range(len(PIPELINE) + 1):
            opened.press("k")
        for _ in range(len(PIPELINE) + 1):
            opened.press("j")
            assert opened.evaluate("document.documentElement.scrollWidth") <= 1280
    hidden = (
        "[...document.querySelectorAll('header > *')].some((e) => e.getBoundingClientRect().right > 1280)"
    )
    assert opened.evaluate(hidden) is False


def test_the_texts_take_the_width_of_the_passes(opened: Browser) -> None:
    width = "document.getElementById('right').clientWidth"
    before = opened.evaluate(width)
    opened.press("w")
    assert opened.evaluate(width) > before + 120
    opened.press("w")
    assert opened.evaluate(width) == before


def test_print_shows_the_passes_and_the_change(opened: Browser) -> None:
    opened.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    printed = opened.evaluate("document.getElementById('print').textContent")
    assert "fuse_rms_norm" in printed and "unchanged lines" in printed and "octavo." in printed
