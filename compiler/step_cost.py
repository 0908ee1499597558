"""What a whole step of a program takes by the cost model: every launch of every layer, added up."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.compiler.artifact import Artifact
from octavo.compiler.cost import Estimate, Figures, Point, estimate, figures_of, step_dims
from octavo.compiler.errors import ArtifactError
from octavo.compiler.expression import holds
from octavo.compiler.program import Program, Step
from octavo.compiler.target import Target

# The folder of forms of kernels that the cost model did not choose, for a device to judge.
LOSERS = "kernels/losers"
# Tokens of a step and of the context before it, at which step times are taken.
PROFILED_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)
PROFILED_CONTEXT = 256


@dataclass
class KernelTime:
    """All launches of one kernel in a step. Times in seconds."""

    estimate: Estimate
    launches: int = 0
    predicted_s: float = 0.0
    floor_s: float = 0.0
    bytes: int = 0
    flops: int = 0

    def add(self, one: Estimate) -> None:
        self.launches += 1
        self.predicted_s += one.predicted_s
        self.floor_s += one.floor_s
        self.bytes += one.bytes
        self.flops += one.flops


@dataclass
class StepTime:
    """A step at one point: its kernels by name, in the order of their first launch."""

    point: Point
    kernels: dict[str, KernelTime] = field(default_factory=dict)

    @property
    def predicted_s(self) -> float:
        return sum(kernel.predicted_s for kernel in self.kernels.values())

    @property
    def floor_s(self) -> float:
        return sum(kernel.floor_s for kernel in self.kernels.values())

    @property
    def launches(self) -> int:
        return sum(kernel.launches for kernel in self.kernels.values())

    @property
    def tokens_per_s(self) -> float:
        return self.point.dims["T"] / self.predicted_s if self.predicted_s else 0.0


def kernel_records(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """The metadata of every GPU kernel of the artifact by name: launch, evidence, work, choice."""
    names = sorted({step.kernel for step in artifact.program.steps})
    return {name: read_record(artifact, f"kernels/{name}.json") for name in names}


def read_record(artifact: Artifact, file: str) -> dict[str, Any]:
    """The metadata in one file of the artifact."""
    try:
        record = json.loads(artifact.read(file))
    except ValueError as error:
        raise ArtifactError(f"{artifact.path}/{file}: expected JSON, got: {error}") from None
    if not isinstance(record, dict):
        raise ArtifactError(f"{artifact.path}/{file}: expected an object, got {str(record)[:80]}")
    return record


def step_time(
    program: Program, records: Mapping[str, Mapping[str, Any]], target: Target, point: Point
) -> StepTime:
    """Predicted time of a step of `program` at a point, with each launch inside a graph of launches."""
    known: dict[tuple[object, ...], Estimate] = {}
    result = StepTime(point)
    for step in program.steps:
        if not holds(step.when, point.dims):
            continue
        key = (step.kernel, step.grid, step.when)
        if key not in known:
            known[key] = estimate(step_figures(step, records[step.kernel]), target, point.dims)
        result.kernels.setdefault(step.kernel, KernelTime(known[key])).add(known[key])
    return result


def predicted_step_times(
    program: Program, records: Mapping[str, Mapping[str, Any]], target: Target
) -> dict[str, Any]:
    """What the artifact's STEP_TIMES say where no device was there: one request with a step of so many tokens."""
    seconds = []
    for tokens in PROFILED_TOKENS:
        dims = step_dims(tokens, 1, tokens, PROFILED_CONTEXT, -(-PROFILED_CONTEXT // program.page_size))
        point = Point(f"{tokens} tokens at {PROFILED_CONTEXT}", dims)
        seconds.append(step_time(program, records, target, point).predicted_s)
    return step_times_table(seconds, f"cost model of {target.name}")


def step_times_table(seconds: Sequence[float], source: str) -> dict[str, Any]:
    """seconds: of steps of PROFILED_TOKENS. source: where they are from, for people."""
    return {"tokens": list(PROFILED_TOKENS), "seconds": list(seconds), "source": source}


def step_figures(step: Step, record: Mapping[str, Any]) -> Figures:
    """The kernel's figures with the work of this launch of it: one kernel may serve T rows here, L there."""
    figures = figures_of(record, f"kernels/{step.kernel}.json")
    for work in record.get("works", ()):
        if tuple(work["grid"]) == step.grid and work["when"] == step.when:
            return replace(
                figures, bytes=work["bytes"], flops=work["flops"], iterations=work["iterations"],
                tiles=work["tiles"], grid=tuple(work["grid"]), when=work["when"],
            )  # fmt: skip
    return figures
