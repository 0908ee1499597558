"""Cold compilation for the CPU: a fresh process and an empty cache, by phase, with the peak of memory.

python benchmarks/bench_compile.py --runs 3
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console

from octavo.compiler.options import DType
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, titled

PHASES = ("imports", "load", "capture", "passes", "kernels", "pack", "verify")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="as `octavo compile` takes it (default: demo)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument("--runs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        measure(options.model, options.dtype, options.child)
        return
    with progress_bars() as bars:
        report = bars("compile")
        results = []
        for run in range(options.runs):
            report("processes", run, options.runs)
            results.append(in_fresh_process(options.model, options.dtype))
    show(results, options)


def measure(model: str, dtype: DType, output: Path) -> None:
    """In the child: seconds of each phase, and bytes of memory at the peak, as JSON."""
    began = time.perf_counter()
    from octavo.compiler import api
    from octavo.compiler.models import load_model

    imported = time.perf_counter()
    loaded = load_model(model)
    ready = time.perf_counter()
    compiled = api.compile(
        loaded.model, output=output, tokenizer=loaded.tokenizer, dtype=dtype, progress=False
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = {"imports": imported - began, "load": ready - imported, **compiled.seconds}
    print(json.dumps({**seconds, "peak_bytes": peak}))


def in_fresh_process(model: str, dtype: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            __file__,
            "--model",
            model,
            "--dtype",
            dtype,
            "--child",
            f"{folder}/artifact",
        ]
        environment = {**os.environ, "OCTAVO_CACHE": f"{folder}/cache"}
        began = time.perf_counter()
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=True)
        whole = time.perf_counter() - began
    measured: dict[str, float] = json.loads(result.stdout.splitlines()[-1])
    return {**measured, "process": whole}


def show(results: list[dict[str, float]], options: argparse.Namespace) -> None:
    title = f"{options.model} {options.dtype} for cpu, cold, {options.runs} runs, {os.cpu_count()} cores"
    table = plain_table("phase", "median s", "least s", "most s", left=("phase",))
    for result in results:
        result["compile"] = sum(result.get(name, 0.0) for name in PHASES[2:])
    for name in (*PHASES, "compile", "process"):
        row = [result.get(name, 0.0) for result in results]
        table.add_row(name, *(f"{value:.1f}" for value in (median(row), min(row), max(row))))
    console = Console(highlight=False)
    console.print(titled(title, table))
    print(f"peak memory {median(result['peak_bytes'] for result in results) / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
