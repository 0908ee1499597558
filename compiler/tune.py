"""Forms of an artifact's kernels measured on the device that is present, and the artifact with the fastest of each."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.codegen.evidence import row_of
from octavo.compiler.artifact import Artifact
from octavo.compiler.cost import Point, default_points, geometric_mean
from octavo.compiler.errors import OptionError
from octavo.compiler.expression import holds
from octavo.compiler.program import Buffer, Step
from octavo.compiler.progress import Report
from octavo.compiler.rewrite_artifact import files_of, write_anew
from octavo.compiler.step_cost import LOSERS, kernel_records, read_record
from octavo.compiler.target import load_target
from octavo.runtime.cuda import Device, Driver
from octavo.runtime.cuda_launch import Kernel, Sizes, parse_record
from octavo.runtime.cuda_memory import DeviceMemory
from octavo.runtime.model_runner import num_bytes

# Launches before and during a measurement; its time is the median of the latter.
WARM_UP, REPEATS = 3, 20
# Forms whose times differ by less are taken as equal, and the one that was chosen stays.
TIE = 0.01
# Random values of this size fill every operand, again and again: zeros would be faster than what a model holds.
PATTERN_BYTES = 32 * 2**20
REPORT = "report.json"


@dataclass
class FormTimes:
    """One form. us: point -> microseconds of a launch from a cold L2; predicted_us: the cost model's mean."""

    name: str
    metadata: dict[str, Any]
    us: dict[str, float] = field(default_factory=dict)

    @property
    def mean_us(self) -> float:
        return geometric_mean(list(self.us.values()))


@dataclass
class Tuned:
    """A kernel of which there are several forms, the chosen one first. skipped: why it was not measured."""

    kernel: str
    forms: list[FormTimes] = field(default_factory=list)
    skipped: str = ""

    @property
    def winner(self) -> FormTimes:
        fastest = min(form.mean_us for form in self.forms)
        return next(form for form in self.forms if form.mean_us <= fastest * (1 + TIE))


def measure(artifact: Artifact, driver: Driver, progress: Report) -> list[Tuned]:
    """Times of every kernel with several forms. Raises ArtifactError for an artifact of another GPU."""
    if load_target(artifact.manifest["target"]).family != "triton":
        raise OptionError(
            f"{artifact.path}: expected an artifact for a GPU, got one for {artifact.manifest['target']}"
        )
    records = kernel_records(artifact)
    with_losers = [name for name, record in records.items() if record["choice"].get("losers")]
    if not with_losers:
        raise OptionError(f"{artifact.path}: expected kernels of which several forms were built, got none")
    steps = {step.kernel: step for step in reversed(artifact.program.steps)}
    driver.activate()
    bench = _Bench(artifact, driver)
    results = []
    try:
        for done, name in enumerate(with_losers):
            progress(name, done, len(with_losers))
            results.append(_measure_one(bench, steps[name], records[name]))
    finally:
        bench.release()
    return results


def _measure_one(bench: "_Bench", step: Step, record: dict[str, Any]) -> Tuned:
    result = Tuned(step.kernel, [FormTimes(step.kernel, record)])
    result.skipped = bench.refusal(step, record)
    points = [p for p in default_points(bench.program.page_size) if holds(step.when, p.dims)]
    if not points:
        result.skipped = result.skipped or "it is launched at none of the points"
    if result.skipped:
        return result
    for loser in record["choice"]["losers"]:
        form = FormTimes(loser["name"], read_record(bench.artifact, f"{LOSERS}/{loser['name']}.json"))
        if _names(form.metadata) == _names(record):
            result.forms.append(form)
    kernels = [bench.load("kernels" if i == 0 else LOSERS, form) for i, form in enumerate(result.forms)]
    for point in points:
        with bench.operands(step, point) as places:
            for form, kernel in zip(result.forms, kernels, strict=True):
                form.us[point.label] = bench.time_us(
                    kernel, step, form.metadata["work"]["grid"], point, places
                )
    return result


def _names(metadata: Mapping[str, Any]) -> list[str]:
    return [parameter["name"] for parameter in metadata["launch"]["parameters"]]


class _Operands:
    """Device memory of a step's buffers at one point, given back at the end of `with`."""

    def __init__(self, memory: DeviceMemory, places: dict[str, int]) -> None:
        self._memory, self._places = memory, places

    def __enter__(self) -> dict[str, int]:
        return self._places

    def __exit__(self, *_: object) -> None:
        for address in self._places.values():
            self._memory.free(address)


class _Bench:
    """What launches are timed with: a stream, events, random values, and memory that displaces L2."""

    def __init__(self, artifact: Artifact, driver: Driver) -> None:
        self.artifact, self.program, self.driver = artifact, artifact.program, driver
        self.buffers = {buffer.name: buffer for buffer in artifact.program.buffers}
        self._memory = DeviceMemory(driver)
        self._stream = driver.create_stream()
        self._events = driver.create_event(), driver.create_event()
        self._flush_bytes = max(2 * driver.device.l2_bytes, 1)
        self._flush = self._memory.allocate(self._flush_bytes)
        self._pattern = _bf16_pattern(PATTERN_BYTES)

    def release(self) -> None:
        self.driver.synchronize(self._stream)
        self._memory.release()
        for event in self._events:
            self.driver.free_event(event)
        self.driver.free_stream(self._stream)

    def refusal(self, step: Step, record: Mapping[str, Any]) -> str:
        """Why a launch by itself would not do what it does in a step; empty if it does."""
        if len(record.get("works", ())) > 1:
            return "its launches have several grids"
        made = [
            name for name in self._read(step)
            if self.buffers[name].kind != "input" and self.buffers[name].dtype in ("i32", "i64")
        ]  # fmt: skip
        return f"it reads indices that other kernels make ({', '.join(made)})" if made else ""

    def _read(self, step: Step) -> list[str]:
        return [arg for arg in step.args if isinstance(arg, str) and arg in self.buffers]

    def load(self, folder: str, form: FormTimes) -> Kernel:
        file = f"{folder}/{form.name}"
        record = parse_record(form.metadata["launch"], f"{self.artifact.path}/{file}.json")
        return Kernel(self.driver, record, self.artifact.read(f"{file}.cubin"), f"{file}.cubin")

    def operands(self, step: Step, point: Point) -> _Operands:
        dims = _with_null_page(point)
        inputs = step_inputs(dims, self.program.page_size)
        places = {}
        for name in self._read(step):
            buffer = self.buffers[name]
            places[name] = self._memory.allocate(max(num_bytes(buffer, dims), 1))
            self._fill(buffer, places[name], num_bytes(buffer, dims), inputs)
        self.driver.synchronize(self._stream)
        return _Operands(self._memory, places)

    def _fill(self, buffer: Buffer, place: int, size: int, inputs: Mapping[str, NDArray[Any]]) -> None:
        if buffer.kind == "input":
            self.driver.upload(place, inputs[buffer.name], self._stream)
            return
        for start in range(0, size, self._pattern.nbytes):
            self.driver.upload(place + start, self._pattern[: size - start], self._stream)

    def time_us(
        self, kernel: Kernel, step: Step, grid: Sequence[int | str], point: Point, places: Mapping[str, int]
    ) -> float:
        """Median time of a launch that finds nothing of its operands in L2."""
        sizes = Sizes(_with_null_page(point))
        arguments = [_argument(arg, places, sizes) for arg in step.args]
        prepared = kernel.prepare(arguments, sizes, grid)
        assert prepared is not None, f"{step.kernel} has an empty grid at {point.label}"
        times = []
        start, end = self._events
        for _ in range(WARM_UP + REPEATS):
            self.driver.fill(self._flush, 0, self._flush_bytes, self._stream)
            self.driver.record(start, self._stream)
            self.driver.launch(prepared, self._stream)
            self.driver.record(end, self._stream)
            self.driver.wait(end)
            times.append(self.driver.elapsed_ms(start, end) * 1e3)
        return statistics.median(times[WARM_UP:])


def _argument(arg: str | int | float, places: Mapping[str, int], sizes: Sizes) -> int | float:
    if isinstance(arg, str):
        return places[arg] if arg in places else sizes(arg)
    return arg


def _with_null_page(point: Point) -> dict[str, int]:
    return {**point.dims, "num_pages": point.dims["num_pages"] + 1}


def _bf16_pattern(size: int) -> NDArray[np.uint8]:
    """Random values around 0 that are finite as bf16, as fp16 and, in pairs, as fp32."""
    values = np.random.default_rng(0).normal(size=size // 2).astype(np.float32)
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def step_inputs(dims: Mapping[str, int], page_size: int) -> dict[str, NDArray[Any]]:
    """Inputs of a step in which R requests share tokens, context and pages evenly, each behind the one before."""
    tokens, requests, pages = dims["T"], dims["R"], dims["P"]
    new, context = tokens // requests, dims["S"] // requests
    table = 1 + np.arange(requests * pages, dtype=np.int32).reshape(requests, pages)
    positions = np.tile(np.arange(context - new, context, dtype=np.int64), requests)
    rows = np.repeat(np.arange(requests), new)
    return {
        "input_ids": np.zeros(tokens, np.int64),
        "positions": positions,
        "slot_mapping": table[rows, positions // page_size].astype(np.int64) * page_size
        + positions % page_size,
        "page_table": table,
        "seq_lens": np.full(requests, context, np.int32),
        "cu_seqlens_q": np.arange(requests + 1, dtype=np.int32) * new,
        "logit_rows": np.arange(dims["L"], dtype=np.int64),
        "tree": np.zeros(tokens, np.int64),
    }


def with_winners(artifact: Artifact, tuned: Sequence[Tuned], driver: Driver) -> None:
    """Write the artifact anew, in its place: winners instead of what was chosen, and what was measured where."""
    changed = {one.kernel: one for one in tuned if not one.skipped}
    winners = {name: one.winner for name, one in changed.items()}
    steps = tuple(
        replace(step, kernel=winners[step.kernel].name, grid=_grid(winners[step.kernel]))
        if step.kernel in winners
        else step
        for step in artifact.program.steps
    )
    files = files_of(artifact)
    for name, one in changed.items():
        _exchange(files, name, one, driver.device.name)
    report = json.loads(files[REPORT])
    report["kernels"] = [_row(row, winners) for row in report["kernels"]]
    report["tuning"] = facts_of(tuned, driver.device)
    files[REPORT] = _text(report)
    write_anew(artifact, files, {"tuned_on": driver.device.name}, replace(artifact.program, steps=steps))


def _grid(form: FormTimes) -> tuple[int | str, int | str, int | str]:
    x, y, z = form.metadata["work"]["grid"]
    return x, y, z


def _exchange(files: dict[str, bytes], name: str, one: Tuned, device: str) -> None:
    """The winner's files among the kernels, the others' among the losers; the winner's metadata has the times."""
    winner = one.winner
    times = {form.name: form.us for form in one.forms}
    kept = {ending: files.pop(f"kernels/{name}.{ending}") for ending in ("py", "cubin", "json")}
    files.update({f"{LOSERS}/{name}.{ending}": content for ending, content in kept.items()})
    for ending in kept:
        files[f"kernels/{winner.name}.{ending}"] = files.pop(f"{LOSERS}/{winner.name}.{ending}")
    losers = [{"name": form.name, "mean_us": form.mean_us} for form in one.forms if form is not winner]
    choice = {**winner.metadata["choice"], "losers": losers, "measured_us": times, "measured_on": device}
    files[f"kernels/{winner.name}.json"] = _text({**winner.metadata, "choice": choice})


def _row(row: dict[str, Any], winners: Mapping[str, FormTimes]) -> dict[str, Any]:
    if row["name"] not in winners:
        return row
    winner = winners[row["name"]]
    return row_of(winner.name, row["op"], row["when"], winner.metadata)


def facts_of(tuned: Sequence[Tuned], device: Device) -> dict[str, Any]:
    """Everything that was measured, and on which device: its clocks are in kHz."""
    return {"device": asdict(device), "kernels": [_facts(one) for one in tuned]}


def _facts(one: Tuned) -> dict[str, Any]:
    if one.skipped:
        return {"kernel": one.kernel, "skipped": one.skipped}
    forms = [{"name": form.name, "mean_us": form.mean_us, "us": form.us} for form in one.forms]
    return {"kernel": one.kernel, "winner": one.winner.name, "forms": forms}


def _text(value: Any) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()
