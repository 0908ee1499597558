"""`octavo tune`: forms of kernels timed on the device that is present, and the artifact with the fastest."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from octavo.compiler.artifact import Artifact
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, titled
from octavo.compiler.tune import Tuned, facts_of, measure, with_winners
from octavo.runtime.cuda import Device
from octavo.runtime.cuda_driver import CudaDriver


def run(path: Path, as_json: bool) -> None:
    """Measure, write the artifact anew, and print what was measured."""
    artifact = Artifact.open(path)
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
