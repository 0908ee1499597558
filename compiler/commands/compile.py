"""`octavo compile`: a model by name -> an artifact, with its tables and times."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from octavo.compiler import api
from octavo.compiler.compiled import Compiled
from octavo.compiler.models import LoadedModel, load_model
from octavo.compiler.options import DType, Verify
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import seconds_line, size_text
from octavo.compiler.target import load_target


@dataclass(frozen=True)
class Choices:
    """What the user chose; the names are those of `octavo.compile`. output None: ./NAME-TARGET.octavo."""

    model: str
    output: Path | None
    target: str
    dtype: DType | None
    page_size: int | None
    max_model_len: int | None
    max_batch_tokens: int
    verify: Verify
    dump: Path | None


def run(choices: Choices) -> None:
    """Compile; tables and times go to standard error, the artifact's path to standard output."""
    load_target(choices.target)  # a name that is wrong is said before the model is loaded
    output = choices.output or default_output(choices.model, choices.target)
    loaded, load_s = load(choices.model)
    compiled = api.compile(
        loaded.model,
        choices.target,
        output=output,
        tokenizer=loaded.tokenizer,
        dtype=choices.dtype,
        page_size=choices.page_size,
        max_model_len=choices.max_model_len,
        max_batch_tokens=choices.max_batch_tokens,
        verify=choices.verify,
        dump=choices.dump,
    )
    show(compiled, {"load": load_s, **compiled.seconds}, choices.dump)
    print(output)


def load(name: str) -> tuple[LoadedModel, float]:
    """A model by its name, and the seconds that it took."""
    with progress_bars() as bars:
        loaded = load_model(name, bars("load"))
    return loaded, bars.seconds["load"]


def show(compiled: Compiled, seconds: dict[str, float], dump: Path | None) -> None:
    """The tables of a compilation, where its files are, and how long it took."""
    console = Console(stderr=True, highlight=False)
    report = compiled.report()
    console.print(report.pass_table())
    console.print()
    if compiled.artifact.manifest["target"] != "cpu":
        console.print(report.kernel_table())
        console.print()
    files = compiled.artifact.files
    total = sum(entry.num_bytes for entry in files.values())
    lines = {
        "times": seconds_line(seconds),
        "artifact": f"{compiled.path} ({len(files)} files, {size_text(total)})",
    }
    if dump is not None:
        lines["dumps"] = f"{dump} (graphs, diffs, summary.txt)"
    for name, text in lines.items():
        print(f"{name + ':':<10}{text}", file=sys.stderr)


def default_output(model: str, target: str) -> Path:
    """`demo` -> demo-cpu.octavo; the last part of a path without its ending."""
    path = Path(model.rsplit(":", 1)[0] if ".py:" in model else model)
    stem = path.stem if path.suffix in (".gguf", ".py") else path.resolve().name
    return Path(f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', stem) or 'model'}-{target}.octavo")
