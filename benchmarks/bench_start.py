"""Artifact to first token, in fresh processes: with the interpreter's start and without.

python benchmarks/bench_start.py smol.octavo --runs 5
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console

from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, titled

PARTS = ("imports", "load", "first token", "imports to token", "process")
# Nothing but the runtime is imported, as a server would.
CHILD = """
import time
marks = [time.perf_counter()]
import json, sys
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams
marks.append(time.perf_counter())
artifact, prompt = sys.argv[1:]
engine = Engine.from_artifact(artifact)
marks.append(time.perf_counter())
given = prompt if engine.tokenizer is not None else [int(word) for word in prompt.split()]
next(engine.stream([given], SamplingParams(max_tokens=1)))
marks.append(time.perf_counter())
spent = [later - earlier for earlier, later in zip(marks, marks[1:])]
print(json.dumps([*spent, marks[-1] - marks[0]]))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "artifact", nargs="?", type=Path, help="default: the demo model is compiled in bf16 first"
    )
    parser.add_argument(
        "--prompt", default="Why is the sky blue?", help="text, or token ids without a tokenizer"
    )
    parser.add_argument("--runs", type=int, default=7, help="processes (default: 7)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact = options.artifact or compiled_demo(Path(folder))
        with progress_bars() as bars:
            report = bars("start")
            results = []
            for run in range(options.runs):
                report("processes", run, options.runs)
                results.append(in_fresh_process(artifact, options.prompt))
    show(results, str(options.artifact or "demo bf16"))


def compiled_demo(folder: Path) -> Path:
    command = [sys.executable, "-m", "octavo.compiler.cli", "compile", "demo", "--dtype", "bf16"]
    subprocess.run([*command, "-o", str(folder / "demo")], check=True, stdout=subprocess.DEVNULL)
    return folder / "demo"


def in_fresh_process(artifact: Path, prompt: str) -> dict[str, float]:
    command = [sys.executable, "-c", CHILD, str(artifact), prompt]
    began = time.perf_counter()
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(zip(PARTS, [*json.loads(result.stdout), time.perf_counter() - began], strict=True))


def show(results: list[dict[str, float]], name: str) -> None:
    title = f"{name}: from disk to the first token, {len(results)} processes; seconds"
    table = plain_table("part", "median", "least", "most", left=("part",))
    for part in PARTS:
        row = [result[part] for result in results]
        table.add_row(part, *(f"{value:.3f}" for value in (median(row), min(row), max(row))))
    Console(highlight=False).print(titled(title, table))


if __name__ == "__main__":
    main()
