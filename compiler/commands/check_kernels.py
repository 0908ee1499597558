"""`octavo kernels --check`: every corner of every Triton template on every arch, as one table."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.text import Text

from octavo.codegen.catalogue import CORNERS
from octavo.codegen.check_corners import (
    FAILED,
    OK,
    REFUSED,
    TARGETS,
    Outcome,
    check_corners,
    uncovered_templates,
)
from octavo.compiler.errors import OptionError
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table
from octavo.compiler.target import Target, load_target

# Where no terminal says how wide it is, as in the log of a CI job.
LOG_WIDTH = 160


def check(targets: Sequence[str], only: str, as_json: bool) -> bool:
    """Build and print all corners whose name holds `only`; whether none failed."""
    machines = [_gpu(name) for name in targets or TARGETS]
    corners = [corner for corner in CORNERS if only in corner.name]
    if not corners:
        raise OptionError(f"--only: expected part of the name of one of {len(CORNERS)} corners, got {only!r}")
    with progress_bars() as bars:
        outcomes = list(check_corners(corners, machines, bars))
    outcomes += [] if only else [_uncovered(name) for name in uncovered_templates(CORNERS, machines)]
    if as_json:
        print(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    else:
        _print(outcomes)
    return all(outcome.result != FAILED for outcome in outcomes)


def _gpu(name: str) -> Target:
    target = load_target(name)
    if target.family != "triton":
        raise OptionError(f"--target: expected a GPU, got {name}")
    return target


def _uncovered(template: str) -> Outcome:
    return Outcome(
        template, "", "", "", FAILED, "no corner builds this template; add one to its family's CORNERS"
    )


def _print(outcomes: Sequence[Outcome]) -> None:
    names = ("corner", "arch", "regs", "spill", "smem", "tmem", "key instructions", "result")
    table = plain_table(*names, left=("corner", "key instructions", "result"))
    table.padding = (0, 1)
    for one in outcomes:
        numbers = (one.registers, one.spill_bytes, one.shared_bytes, one.tmem_columns)
        result = Text(f"{one.result}: {one.reason}" if one.reason else one.result)
        result.stylize({OK: "", REFUSED: "dim", FAILED: "bold red"}[one.result])
        label = f"{one.corner}\n  {one.kernel.rpartition('__')[0]}" if one.kernel else one.corner
        table.add_row(
            label, one.arch, *("" if n is None else str(n) for n in numbers), one.key_opcodes, result
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else LOG_WIDTH)
    console.print(table)
    counts = Counter(outcome.result for outcome in outcomes)
    print(f"{counts[OK]} built, {counts[REFUSED]} refused with a reason, {counts[FAILED]} failed")
