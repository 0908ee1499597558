"""The page of a dump: everything is in it, nothing that a model names gets out of its place, sizes stay small."""

import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from octavo.compiler.dump_summary import read_summary
from octavo.compiler.errors import OptionError
from octavo.compiler.view import embedded, page, page_data

HOSTILE = "</script><script>alert(1)</script><!--\"'&"
NOTHING = {"sites": 0, "worst_error": 0.0, "error_bound": 0.0}


def text(*body: str, header: str = "x") -> str:
    lines = [
        f'"""{header}"""',
        "import torch",
        "",
        "WEIGHTS = {",
        '    "a.weight": "f32[4]",',
        "}",
        "",
        "",
        "def forward(",
    ]
    return (
        "\n".join([*lines, "    w,", '    x: "f32[1, T]",', "):", *(f"    {line}" for line in body)]) + "\n"
    )


def entry(index: int, name: str, file: str | None, **changes: Any) -> dict[str, Any]:
    known = {
        "index": index, "name": name, "file": file, "sha256": None, "stage": "canonical", "matched": 1, "rejected": [],
        "near_misses": [], "nodes_before": 3, "nodes_after": 3, "ms": 1.5, "exactness": "bitwise", "proof": NOTHING,
        "notes": {},
    }  # fmt: skip
    return {**known, **changes}


def write_dump(directory: Path, steps: list[dict[str, Any]], texts: dict[str, str], **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    summary = {
        "format_version": 1, "octavo_version": "0.1.0", "torch": "2.13", "target": "cpu", "options": {"dtype": "fp32"},
        "model": {"name": "tiny", "num_layers": 2}, "settings": {"page_size": 16, "max_model_len": 64},
        "start": {"file": "00_capture.py", "nodes": 3}, "steps": steps, "weights": None, "error": None, **changes,
    }  # fmt: skip
    (directory / "summary.json").write_text(json.dumps(summary))
    for name, content in texts.items():
        (directory / name).write_text(content)
    return directory


def small_dump(directory: Path, name: str = "model.layers.0", **changes: Any) -> Path:
    where = {"node": "b", "module": name, "source": "m.py:7", "reason": "head_dim must be even, got 65"}
    steps = [
        entry(1, "fuse_norm", "01_fuse_norm.py", matched=2, rejected=[where], proof={**NOTHING, "sites": 1}),
        entry(2, "quiet", None, matched=0),
    ]
    texts = {
        "00_capture.py": text(
            f"# {name} | m.py:7  y = x", "b = aten.neg.default(x)  # f32[1, T]", "return (b,)"
        ),
        "01_fuse_norm.py": text(
            f"# {name} | m.py:7  y = x", "b = aten.abs.default(x)  # f32[1, T]", "return (b,)", header="y"
        ),
    }
    return write_dump(directory, steps, texts, **changes)


def rebuilt(data: dict[str, Any]) -> list[list[str]]:
    """The text after each step, as the page makes it from the edits."""
    texts: list[list[str]] = []
    lines: list[str] = []
    for step in data["steps"]:
        for start, removed, added in reversed(step["edits"]):
            lines = lines[:start] + [data["lines"][i] for i in added] + lines[start + removed :]
        texts.append(lines)
    return texts


def test_the_data_holds_every_text_once_and_what_the_passes_did(tmp_path: Path) -> None:
    data = page_data(small_dump(tmp_path))
    after = text("# model.layers.0 | m.py:7  y = x", "b = aten.abs.default(x)  # f32[1, T]", "return (b,)")
    texts = rebuilt(data)
    assert texts[1] == texts[2] == after[after.index("WEIGHTS") :].splitlines()
    assert [step["name"] for step in data["steps"]] == ["capture", "fuse_norm", "quiet"]
    assert sorted(data["lines"]) == sorted({line for one in texts for line in one})
    assert data["steps"][1]["edits"] == [(10, 1, [len(data["lines"]) - 1])]
    assert data["steps"][1]["first"] == 4  # where WEIGHTS stands in the file
    assert data["steps"][1]["rejected"][0]["reason"] == "head_dim must be even, got 65"
    assert data["title"] == "tiny"
    assert data["facts"] == [
        "for cpu", "2 layers", "fp32", "pages of 16 tokens", "up to 64 tokens", "octavo 0.1.0", "torch 2.13",
    ]  # fmt: skip
    assert data["totals"] == "2 passes, 2 rewrites, 1 proofs, 0.0 s"


def test_a_failure_is_a_step_of_its_own(tmp_path: Path) -> None:
    error = {
        "step": "fuse_rope",
        "index": 3,
        "file": "03_fuse_rope.failed.py",
        "type": "PassError",
        "message": "no",
    }
    directory = small_dump(tmp_path, error=error)
    (directory / "03_fuse_rope.failed.py").write_text(text("return (x,)"))
    data = page_data(directory)
    assert (data["steps"][-1]["failed"], data["steps"][-1]["index"]) == (True, 3)
    assert rebuilt(data)[-1][-1] == "    return (x,)"
    late = {**error, "step": "kernels", "index": None, "file": None}
    assert page_data(small_dump(tmp_path, error=late))["steps"][-1]["edits"] == []


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def elements(html: str) -> list[tuple[str, dict[str, str | None]]]:
    parser = Elements()
    parser.feed(html)
    return parser.tags


def test_a_hostile_name_stays_a_name(tmp_path: Path) -> None:
    plain = page(small_dump(tmp_path / "plain"))
    model = {"name": HOSTILE, "num_layers": None}
    html = page(small_dump(tmp_path / "hostile", name=HOSTILE, model=model))
    assert elements(html) == elements(plain)
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    assert data["title"] == HOSTILE
    assert f"    # {HOSTILE} | m.py:7  y = x" in data["lines"]
    assert "<" not in found[1] and json.loads(embedded("<&>\u2028")) == "<&>\u2028"


def test_the_page_needs_nothing_from_outside(tmp_path: Path) -> None:
    html = page(small_dump(tmp_path))
    for tag, attributes in elements(html):
        assert "src" not in attributes and tag not in ("img", "iframe", "object", "base"), tag
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (
            tag,
            attributes,
        )
        assert tag != "link" or attributes["href"] == "data:,"
    addresses = set(re.findall(r"https?://[^\s\"'`]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}  # the name of a namespace, never fetched
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|@import|url\(", html
    )
    assert "default-src 'none'" in html and len(re.findall(r"'sha256-[\w+/=]+'", html)) == 2


def test_keys_tabs_and_roles_are_in_the_page(tmp_path: Path) -> None:
    tags = elements(page(small_dump(tmp_path)))
    roles = [attributes.get("role") for _, attributes in tags]
    assert {"search", "listbox", "tablist", "alert", "region"} <= set(roles)
    assert (roles.count("tab"), roles.count("tabpanel")) == (3, 3)
    ids = {attributes["id"] for _, attributes in tags if "id" in attributes}
    for _, attributes in tags:
        for name in ("aria-controls", "aria-labelledby"):
            assert attributes.get(name, "help") in ids | {"help"}


def test_a_deep_model_makes_a_page_of_reasonable_size(tmp_path: Path) -> None:
    """80 layers, 30 steps: lines are kept once and steps as edits, not as texts."""

    def layers(changed: int) -> str:
        lines = []
        for layer in range(80):
            for op in range(60):
                lines.append(
                    f"# model.layers.{layer}.part{op} | modeling.py:{op}  hidden_states = self.part{op}(x)"
                )
                name = "new" if op < changed else "old"
                lines.append(f"v_{layer}_{op} = aten.{name}.default(x)  # f32[1, T, 4096]")
        return text(*lines, "return (x,)")

    steps = [entry(i, "step", f"{i:02d}_step.py") for i in range(1, 31)]
    texts = {"00_capture.py": layers(0), **{f"{i:02d}_step.py": layers(i) for i in range(1, 31)}}
    directory = write_dump(tmp_path / "deep", steps, texts)
    total = sum(len(content) for content in texts.values())
    html = page(directory)
    assert len(html) < 2_000_000 and len(html) < total / 9
    assert rebuilt(page_data(directory))[30][-2] == "    v_79_59 = aten.old.default(x)  # f32[1, T, 4096]"


def luminance(colour: str) -> float:
    """Relative, of #rrggbb, as WCAG defines it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(scheme: int) -> None:
    style = (files("octavo.compiler") / "view_page/style.css").read_text()
    blocks = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", blocks[0] + blocks[scheme]))
    texts = ["ink", "soft", *(f"{name}" for name in re.findall(r"\.f-(\w+) \{", style))]
    pairs = [(text, ground) for text in texts for ground in ("panel", "bg")]
    pairs += [("ink", g) for g in ("add", "del", "mod", "add-deep", "del-deep", "hover", "chosen")]
    pairs += [("soft", g) for g in ("add", "del", "mod", "hover", "chosen")]
    pairs += [
        ("mark-ink", "mark"),
        ("mark-ink", "mark-now"),
        ("bad", "del"),
        ("good", "panel"),
        ("warn", "panel"),
    ]
    assert len(texts) == 11
    for text, ground in pairs:
        high, low = sorted((luminance(colours[text]), luminance(colours[ground])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "expected a dump, got no summary.json in it; `octavo compile MODEL --dump DIR` writes one"),
        ("{", "expected JSON, got"),
        ("[]", "expected format_version 1, got None"),
        ('{"format_version": 99}', "expected format_version 1, got 99"),
        ('{"format_version": 1}', "got no error"),
    ],
)
def test_a_directory_without_a_dump_is_refused(content: str | None, said: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(OptionError, match=re.escape(said)):
        read_summary(tmp_path)
    with pytest.raises(OptionError, match="got no such directory"):
        read_summary(tmp_path / "none")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    directory = small_dump(tmp_path)
    (directory / "01_fuse_norm.py").unlink()
    with pytest.raises(OptionError, match=r"01_fuse_norm\.py: expected a graph of the dump, got"):
        page(directory)
