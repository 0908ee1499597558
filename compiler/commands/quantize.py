"""`octavo quantize`: a Hugging Face directory in full precision -> one in NVFP4 that engines load."""

import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from octavo.compiler import api
from octavo.compiler.checkpoints.checkpoint import is_quantized
from octavo.compiler.checkpoints.convert import Converted, Method, Target, convert
from octavo.compiler.commands.compile import load, text_of
from octavo.compiler.errors import CheckpointError
from octavo.compiler.options import QuantConfig
from octavo.compiler.precision_table import precision_tables
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, seconds_line, size_text, titled

SHOWN = 8


def run(source: Path, destination: Path, target: Target, method: Method, keep: Sequence[str]) -> None:
    """Convert; the tables and times go to standard error, the directory to standard output."""
    with progress_bars() as bars:
        converted = convert(source, destination, target, method, keep, progress=bars("quantise"))
    show(converted, bars.seconds)
    print(destination)


def run_compiled(
    source: Path, destination: Path, layout: Target, config: QuantConfig | None, calibration: Path | None
) -> None:
    """Compile, prove, and write what the artifact holds; tables to standard error, the directory to standard output."""
    if os.path.lexists(destination):
        raise CheckpointError(
            f"{destination}: expected no file there, got one; choose another path or remove it"
        )
    if not (source / "config.json").is_file():
        raise CheckpointError(f"{source}: expected a directory with a config.json, got none")
    text = None if calibration is None else text_of(calibration)
    if is_quantized(source):
        raise CheckpointError(f"{source}: its weights are quantised already; expected bf16, fp16 or fp32")
    loaded, load_s = load(str(source))
    compiled = api.compile(loaded.model, tokenizer=loaded.tokenizer, quantize=config, calibration=text)
    compiled.export_checkpoint(destination, source, layout)
    console = Console(stderr=True, highlight=False)
    for table in precision_tables(compiled.report().data["precision"]):
        console.print(table)
        console.print()
    print(f"times:    {seconds_line({'load': load_s, **compiled.seconds})}", file=sys.stderr)
    print(destination)


def show(converted: Converted, seconds: dict[str, float]) -> None:
    """The modules with the largest errors, what stayed and why, sizes and times."""
    console = Console(stderr=True, highlight=False)
    worst = sorted(converted.errors.items(), key=lambda item: -item[1])[:SHOWN]
    table = plain_table("module", "error", left=("module",))
    for module, error in worst:
        table.add_row(module, f"{error:.2%}")
    console.print(titled(f"{len(converted.errors)} weights quantised; the largest errors", table))
    if converted.kept:
        reasons = plain_table("kept", "why", left=("kept", "why"))
        for reason, count in Counter(converted.kept.values()).most_common():
            reasons.add_row(str(count), reason)
        console.print()
        console.print(reasons)
    before, after = size_text(converted.bytes_before), size_text(converted.bytes_after)
    print(f"\ntimes:    {seconds_line(seconds)}", file=sys.stderr)
    print(f"weights:  {before} -> {after}", file=sys.stderr)
