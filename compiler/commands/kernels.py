"""`octavo kernels ARTIFACT`: what was built, and what the cost model expects of it. Needs neither torch nor Triton."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from octavo.codegen.evidence import key_opcodes
from octavo.compiler.artifact import Artifact
from octavo.compiler.cost import Estimate, Point, default_points, figures_of, occupancy, step_dims
from octavo.compiler.errors import OptionError
from octavo.compiler.report import Report, plain_table, short_names, titled
from octavo.compiler.roofline import Mark, draw_roofline
from octavo.compiler.step_cost import KernelTime, StepTime, kernel_records, step_time
from octavo.compiler.target import Target, load_target
from octavo.runtime.model_runner import FEATURES

# What the tables show unless points are asked for; the lines below them are of every default point.
SHOWN_POINTS = ("decode 1 at 8K", "decode 64 at 8K", "prefill 4K")
_SIZE = re.compile(r"\s*([TRLSP])\s*=\s*(\d+)\s*")


@dataclass(frozen=True)
class Evidence:
    """Kernels of an artifact by name, and its steps at some points."""

    target: Target
    records: dict[str, dict[str, Any]]
    steps: list[StepTime]


def show_kernels(path: Path, as_json: bool, at: Sequence[str] = (), plot: Path | None = None) -> None:
    """Evidence about every distinct kernel, predicted times of steps, and what a cpu program was built for."""
    artifact = Artifact.open(path)
    report = Report.of(artifact)
    target = load_target(artifact.manifest["target"])
    if target.family == "cpp":
        if at or plot:
            raise OptionError(f"--at, --plot: expected an artifact for a GPU, got one for {target.name}")
        _show_host(artifact, report, as_json)
        return
    page_size = artifact.program.page_size
    points = [parse_point(text, page_size) for text in at] or list(default_points(page_size))
    records = kernel_records(artifact)
    steps = [step_time(artifact.program, records, target, point) for point in points]
    evidence = Evidence(target, records, steps)
    if plot is not None:
        draw_roofline(plot, target, marks_of(evidence), f"{artifact.model.name} on {target.name}")
    if as_json:
        facts = {"target": target.name, "features": None, "kernels": kernel_facts(evidence, report)}
        steps_facts = [step_facts(step) for step in steps]
        print(json.dumps({**facts, "steps": steps_facts, "selections": report.data["selections"]}, indent=1))
        return
    shown = steps if at else [step for step in steps if step.point.label in SHOWN_POINTS]
    Console(highlight=False).print(*tables(evidence, shown), sep="\n")


def _show_host(artifact: Artifact, report: Report, as_json: bool) -> None:
    features = artifact.read(FEATURES).decode().strip() if FEATURES in artifact.files else None
    if as_json:
        facts = {"target": artifact.manifest["target"], "features": features}
        facts |= {"kernels": report.data["kernels"], "selections": report.data["selections"]}
        print(json.dumps(facts, indent=1))
        return
    Console(highlight=False).print(report.kernel_table())
    if features is not None:
        print(f"built for {features}; the source is {artifact.path}/kernels/program.cpp")


def parse_point(text: str, page_size: int) -> Point:
    """ "T=16,R=16,S=131072": R is 1, S is T and L is R where they are not given, P what holds S / R tokens."""
    found = [_SIZE.fullmatch(part) for part in text.split(",")]
    sizes = {match[1]: int(match[2]) for match in found if match is not None}
    if None in found or len(sizes) < len(found) or min(sizes.values()) < 1 or "T" not in sizes:
        raise OptionError(
            f"--at: expected sizes of T, R, L, S, P of 1 or more, as in T=1,S=8192, got {text!r}"
        )
    tokens, requests = sizes["T"], sizes.get("R", 1)
    context = sizes.get("S", tokens)
    pages = sizes.get("P", -(-context // (requests * page_size)))
    return Point(text, step_dims(tokens, requests, sizes.get("L", requests), context, pages))


def kernel_facts(evidence: Evidence, report: Report) -> list[dict[str, Any]]:
    """Of each kernel: its row in the report, the record of its build, its occupancy, and figures at each point."""
    facts = []
    for row in report.data["kernels"]:
        name = row["name"]
        figures = figures_of(evidence.records[name], name)
        times = {step.point.label: step.kernels[name] for step in evidence.steps if name in step.kernels}
        points = {label: time_facts(time) for label, time in times.items()}
        fit = asdict(occupancy(figures, evidence.target))
        facts.append({**row, "occupancy": fit, "points": points, "record": evidence.records[name]})
    return facts


def time_facts(time: KernelTime) -> dict[str, Any]:
    """Figures of one launch; launches: how many of the kernel a step has."""
    one = time.estimate
    ratios = {"intensity": one.intensity, "fraction_of_floor": one.fraction}
    return {**asdict(one), **ratios, "launches": time.launches}


def step_facts(step: StepTime) -> dict[str, Any]:
    return {
        "point": step.point.label, "dims": dict(step.point.dims), "launches": step.launches,
        "predicted_s": step.predicted_s, "floor_s": step.floor_s, "tokens_per_s": step.tokens_per_s,
    }  # fmt: skip


def tables(evidence: Evidence, shown: Sequence[StepTime]) -> list[RenderableType]:
    """Kernels, the steps of some points kernel by kernel, and all steps in a line each."""
    parts: list[RenderableType] = [kernel_table(evidence)]
    for step in shown:
        parts += ["", kernels_of_step(step)]
    return [*parts, "", step_table(evidence)]


def kernel_table(evidence: Evidence) -> RenderableType:
    """fit: programs that a multiprocessor holds at once. Below each kernel: when it runs, what holds it back."""
    names = ("kernel", "regs", "spill", "smem", "tmem", "warps", "fit")
    table = plain_table(*names, left=("kernel",))
    short = short_names([{"name": name} for name in evidence.records])
    for name, record in evidence.records.items():
        figures = figures_of(record, name)
        fit = occupancy(figures, evidence.target)
        numbers = (
            figures.registers, record["evidence"]["spill_bytes"], figures.shared_bytes, figures.tmem_columns,
            figures.num_warps, fit.programs,
        )  # fmt: skip
        notes = "; ".join(part for part in kernel_notes(record, figures.when, fit.limit) if part)
        title = Group(Text(short[name]), Padding(Text(notes, "dim"), (0, 0, 0, 2)))
        table.add_row(title, *map(str, numbers))
    return titled(f"{len(evidence.records)} kernels for {evidence.target.name}", table)


def kernel_notes(record: dict[str, Any], when: str, limit: str) -> list[str]:
    choice = record["choice"]
    others = len(choice.get("losers", ())), len(choice.get("dropped", ()))
    return [
        f"if {when}" if when else "",
        key_opcodes(record["evidence"]["census"]),
        f"fit is limited by {limit}",
        f"{others[0]} other forms are slower" if others[0] else "",
        f"{others[1]} other forms do not build" if others[1] else "",
    ]


def kernels_of_step(step: StepTime) -> RenderableType:
    """us: of all launches together; floor: how much of that time bandwidth or tensor core leave no way around."""
    table = plain_table(
        "kernel", "launches", "us", "MB", "flop/B", "bound", "floor", left=("kernel", "bound")
    )
    short = short_names([{"name": name} for name in step.kernels])
    for name, time in step.kernels.items():
        table.add_row(
            short[name], str(time.launches), f"{time.predicted_s * 1e6:.1f}", f"{time.bytes / 1e6:.1f}",
            f"{time.estimate.intensity:.1f}", f" {time.estimate.bound}", f"{time.floor_s / time.predicted_s:.0%}",
        )  # fmt: skip
    return titled(f"{step.point.label}: {step.predicted_s * 1e3:.3f} ms predicted", table)


def step_table(evidence: Evidence) -> RenderableType:
    table = plain_table("step", "launches", "ms", "floor ms", "tokens/s", left=("step",))
    for step in evidence.steps:
        table.add_row(
            step.point.label, str(step.launches), f"{step.predicted_s * 1e3:.3f}", f"{step.floor_s * 1e3:.3f}",
            f"{step.tokens_per_s:.0f}",
        )  # fmt: skip
    return titled("steps by the cost model, not measured", table)


def marks_of(evidence: Evidence) -> list[Mark]:
    """Every kernel at the shown points where it is launched, or at the points that were asked for."""
    shown = [step for step in evidence.steps if step.point.label in SHOWN_POINTS] or evidence.steps
    short = short_names([{"name": name} for name in evidence.records])
    return [
        mark_of(short[name], step.point.label, time.estimate)
        for step in shown
        for name, time in step.kernels.items()
        if time.estimate.flops
    ]


def mark_of(name: str, point: str, one: Estimate) -> Mark:
    return Mark(name, point, one.intensity, one.flops / one.predicted_s)
