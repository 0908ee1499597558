"""One HTML page that shows a dump: what every pass did, its diff, the graph of a layer. Needs no network."""

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from octavo.compiler.dump_summary import read_summary
from octavo.compiler.errors import OptionError
from octavo.compiler.line_diff import opcodes

SCRIPTS = ("data.js", "diff.js", "layer.js", "main.js", "refused.js", "keys.js")
FIRST_LINE = "WEIGHTS = {"  # what stands above is the same in every file but for the header
Edit = tuple[int, int, list[int]]  # first line, how many go, which come in


def page(directory: Path) -> str:
    """The page of the dump in `directory`. Raises OptionError if there is none, or a file of it is missing."""
    resources = files("octavo.compiler") / "view_page"
    style = (resources / "style.css").read_text(encoding="utf-8")
    parts = [(resources / name).read_text(encoding="utf-8") for name in SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n"
    data = page_data(directory)
    template = Environment(autoescape=True).from_string(
        (resources / "page.html.jinja").read_text(encoding="utf-8")
    )
    return template.render(
        title=data["title"],
        style=Markup(style),
        style_hash=_content_hash(style),
        script=Markup(script),
        script_hash=_content_hash(script),
        data=Markup(embedded(data)),
    )


def _content_hash(text: str) -> str:
    """As a Content-Security-Policy names what may run: nothing but our own script and style."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def embedded(data: Any) -> str:
    """JSON that no name in it can end the script element of: `<`, `>` and `&` are escaped."""
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def page_data(directory: Path) -> dict[str, Any]:
    """What the page shows. `lines` holds every distinct line of all texts once; steps are edits in them."""
    summary = read_summary(directory)
    texts = _Texts(directory)
    start = summary["start"]
    steps = [
        {**_start_entry(start), **texts.edits(start.get("file"))},
        *({**step, **texts.edits(step["file"])} for step in summary["steps"]),
    ]
    error = summary["error"]
    if error is not None:
        steps.append(_failed_entry(error, steps[-1], texts.edits(error["file"])))
    return {
        "title": str(summary["model"].get("name", "model")),
        "facts": _facts(summary),
        "totals": _totals(summary),
        "error": error,
        "steps": steps,
        "lines": texts.lines,
    }


class _Texts:
    """Reads the files of a dump one after the other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.lines: list[str] = []
        self._numbers: dict[str, int] = {}
        self._previous: list[str] = []
        self._first = 1

    def edits(self, file: str | None) -> dict[str, Any]:
        """first: number of the text's first line in the file; edits: from the text before. None: no change."""
        if file is None:
            return {"first": self._first, "edits": []}
        path = self.directory / file
        try:
            lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise OptionError(f"{path}: expected a graph of the dump, got: {error}") from None
        head = lines.index(FIRST_LINE) if FIRST_LINE in lines else 0
        self._first, text = head + 1, lines[head:]
        edits: list[Edit] = [
            (i1, i2 - i1, [self._number(line) for line in text[j1:j2]])
            for tag, i1, i2, j1, j2 in opcodes(self._previous, text)
            if tag != "equal"
        ]
        self._previous = text
        return {"first": self._first, "edits": edits}

    def _number(self, line: str) -> int:
        if line not in self._numbers:
            self._numbers[line] = len(self.lines)
            self.lines.append(line)
        return self._numbers[line]


_NOTHING = {
    "stage": "captured", "matched": 0, "rejected": [], "near_misses": [], "notes": {},
    "proof": {"sites": 0, "worst_error": 0, "error_bound": 0},
}  # fmt: skip


def _start_entry(start: Mapping[str, Any]) -> dict[str, Any]:
    file = str(start.get("file", "00_capture.py"))
    index, _, name = file.removesuffix(".py").partition("_")
    nodes = start.get("nodes", 0)
    return {
        **_NOTHING,
        "index": int(index),
        "name": name,
        "file": file,
        "nodes_before": nodes,
        "nodes_after": nodes,
    }


def _failed_entry(
    error: Mapping[str, Any], last: Mapping[str, Any], edits: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        **_NOTHING, "index": error["index"] or "!", "name": error["step"], "file": error["file"], "failed": True,
        "nodes_before": last["nodes_after"], "nodes_after": last["nodes_after"], "ms": 0, **edits,
    }  # fmt: skip


def _facts(summary: Mapping[str, Any]) -> list[str]:
    options, settings = summary.get("options", {}), summary.get("settings", {})
    layers = summary["model"].get("num_layers")
    parts = [
        f"for {summary['target']}",
        f"{layers} layers" if layers else "",
        options.get("dtype") or "",
        f"pages of {settings['page_size']} tokens" if "page_size" in settings else "",
        f"up to {settings['max_model_len']} tokens" if "max_model_len" in settings else "",
        f"resumed from {summary['resumed_from']}" if "resumed_from" in summary else "",
        f"octavo {summary.get('octavo_version', '')}",
        f"torch {summary['torch']}" if "torch" in summary else "",
    ]
    return [part for part in parts if part]


def _totals(summary: Mapping[str, Any]) -> str:
    steps = summary["steps"]
    seconds = sum(step["ms"] for step in steps) / 1e3
    sites = sum(step["proof"]["sites"] for step in steps)
    rewritten = sum(step["matched"] for step in steps)
    return f"{len(steps)} passes, {rewritten} rewrites, {sites} proofs, {seconds:.1f} s"
