"""`octavo tune`: what this machine makes of an artifact: the fastest forms of its kernels, and times of steps."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from octavo.compiler.artifact import Artifact
from octavo.compiler.measure_steps import add_step_times, measure_steps
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, titled
from octavo.compiler.tune import Tuned, facts_of, measure, with_winners
from octavo.runtime.cuda import Device
from octavo.runtime.cuda_driver import CudaDriver
from octavo.runtime.open_runner import is_for_gpu


def run(path: Path, as_json: bool) -> None:
    """Measure, write the artifact anew, and print what was measured."""
    artifact = Artifact.open(path)
    if not is_for_gpu(artifact):
        _time_steps(artifact, as_json)
        return
    driver = CudaDriver()
    try:
        with progress_bars() as bars:
            tuned = measure(artifact, driver, bars("tune"))
        with_winners(artifact, tuned, driver)
    finally:
        driver.close()
    if as_json:
        print(json.dumps(facts_of(tuned, driver.device), indent=1))
        return
    Console(highlight=False).print(table_of(tuned, driver.device))


def _time_steps(artifact: Artifact, as_json: bool) -> None:
    with progress_bars() as bars:
        times = measure_steps(artifact, bars("tune"))
    add_step_times(artifact, times)
    if as_json:
        print(json.dumps(times, indent=1))
        return
    table = plain_table("tokens", "ms", "of one token")
    for tokens, seconds in zip(times["tokens"], times["seconds"], strict=True):
        table.add_row(str(tokens), f"{seconds * 1e3:.2f}", f"{seconds / times['seconds'][0]:.2f}")
    Console(highlight=False).print(
        titled(f"a step of so many tokens of one request, {times['source']}", table)
    )


def table_of(tuned: Sequence[Tuned], device: Device) -> RenderableType:
    """A line for each form, the winner marked; us: geometric mean over the points."""
    table = plain_table("", "form", "us", left=("", "form"))
    below = []
    for one in tuned:
        if one.skipped:
            below.append(Text(f"not measured: {one.kernel}: {one.skipped}"))
            continue
        for form in one.forms:
            table.add_row("*" if form is one.winner else "", form.name, f"{form.mean_us:.2f}")
    clocks = f"{device.clock_khz // 1000} MHz, memory {device.memory_clock_khz // 1000} MHz"
    return titled(
        f"measured on {device.name} ({clocks}, CUDA {device.driver // 1000}); * is kept", table, *below
    )
