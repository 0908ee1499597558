"""Checks and times everything on this machine's GPU: every kernel, the runner, a model of a billion parameters.

    bash benchmarks/device_check.sh                 under 8 minutes, no network; writes benchmarks/results
    bash benchmarks/device_check.sh --dry-run --target b200     builds, and prints what would run; needs no GPU

Parts: build (every corner of every kernel for this GPU), kernels (each against a reference, its floor and torch's own),
end to end (decode tokens a second), tests (those marked gpu). Each has a time box and a process of its own, so that
none takes the others along. Exit code: 0; 1 if a comparison failed; 2 without a GPU.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from benchmarks.device_inputs import needed_bytes, points, unknown_sizes
from benchmarks.device_kernels import chosen
from benchmarks.device_references import REFERENCES
from octavo.codegen import build_triton
from octavo.codegen.corner import Corner
from octavo.compiler.device_target import automatic_target
from octavo.compiler.errors import MissingDependencyError
from octavo.compiler.target import Target, load_target
from octavo.runtime.cuda_driver import CudaDriver

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Seconds for each part; together with what surrounds them under 8 minutes.
BUILD_S, KERNELS_S, END_TO_END_S, TESTS_S = 110.0, 150.0, 110.0, 60.0
# A child that runs kernels and says nothing for so long hangs; a kernel may be compiled for so long.
SILENCE_S = KERNEL_S = 40.0
WANTED = (
    "numpy",
    "jinja2",
    "sympy",
    "triton",
    "torch",
    "rich",
    "typer",
    "safetensors",
    "pytest",
    "ml_dtypes",
)
OK, FAILED, NO_GPU = 0, 1, 2

Result = dict[str, Any]


def main() -> int:
    options = parse()
    missing = [name for name in WANTED if find_spec(name) is None]
    if missing:
        print(f"not installed: {', '.join(missing)}; it goes on without")
    if options.dry_run:
        return dry_run(load_target(options.target or "b200"), options.only)
    try:
        device = CudaDriver().device
    except MissingDependencyError as error:
        print(f"device_check: {error}")
        return NO_GPU
    choice = automatic_target()
    target = load_target(options.target) if options.target else choice.target
    print(
        f"{device.name}: sm_{device.arch}, {device.sm_count} SMs, CUDA {device.driver}; target {target.name}"
    )
    if choice.warning:
        print(choice.warning)
    report: Result = {"device": vars(device), "target": target.name, "missing": missing, "clocks": clocks()}
    report["triton"] = build_triton.triton_version()
    name = re.sub(r"[^a-z0-9]+", "_", device.name.lower()).strip("_")
    path = RESULTS / f"device_{name}.json"
    parts: dict[str, Callable[[], Any]] = {
        "build": lambda: build_all(target, options.only, BUILD_S),
        "kernels": lambda: run_kernels(target, options.only, KERNELS_S),
        "end_to_end": lambda: run_end_to_end(target, END_TO_END_S),
        "tests": lambda: run_tests(TESTS_S),
        "failures": lambda: failures(report),
    }
    RESULTS.mkdir(exist_ok=True)
    for part, work in parts.items():
        began = time.perf_counter()
        report[part] = work()
        print(f"{part}: {time.perf_counter() - began:.0f} s", flush=True)
        path.write_text(json.dumps(report, indent=1, default=str) + "\n")  # what is known, whatever comes
    show(report)
    print(f"\n{path}")
    return FAILED if report["failures"] else OK


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", help="a file of compiler/targets (default: that of the device)")
    parser.add_argument("--only", default="", help="corners whose name holds this")
    parser.add_argument("--dry-run", action="store_true", help="build, and print what would run")
    return parser.parse_args()


def clocks() -> str:
    """What nvidia-smi says of the clocks and the power, for whoever reads the figures later."""
    query = "--query-gpu=clocks.sm,clocks.max.sm,clocks.mem,power.limit,driver_version"
    try:
        result = subprocess.run(
            ["nvidia-smi", query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown ({error})"
    return result.stdout.strip()


def build_all(target: Target, word: str, seconds: float) -> Result:
    """Compile every corner into the cache, so that the children find them; who failed and who was not reached."""
    began = time.perf_counter()
    workers = max(os.cpu_count() or 2, 2)
    corners = [corner for corner in chosen(word) if corner.refuse(target) is None]
    refused = {c.name: c.refuse(target) for c in chosen(word) if c.refuse(target) is not None}
    build_triton.NUM_WORKERS = 1  # for each thread below
    failed: dict[str, str] = {}
    pool = ThreadPoolExecutor(workers)
    # a share for each worker, whose compiler is started once
    shares = [corners[first::workers] for first in range(workers)]
    deadline = began + seconds
    jobs: list[Future[None]] = [
        pool.submit(build_share, share, target, failed, deadline) for share in shares if share
    ]
    wait(jobs, timeout=seconds + KERNEL_S)
    pool.shutdown(wait=False, cancel_futures=True)
    for job in jobs:
        if job.done() and job.exception() is not None:
            failed[f"worker of {workers}"] = str(job.exception())
    took = time.perf_counter() - began
    print(f"build: {len(corners)} corners, {len(failed)} failed, {len(refused)} refused, {took:.0f} s")
    return {"corners": len(corners), "failed": failed, "refused": refused, "seconds": round(took, 1)}


def build_share(corners: Sequence[Corner], target: Target, failed: dict[str, str], deadline: float) -> None:
    """Ten corners at a time; where one of them fails, each by itself."""
    for first in range(0, len(corners), 10):
        group = corners[first : first + 10]
        for some in (group, *([corner] for corner in group)):
            if time.perf_counter() > deadline:
                failed.update({corner.name: "not reached in time" for corner in corners[first:]})
                return
            try:
                specs = [spec for corner in some for spec in corner.make(target).launches]
                build_triton.build_kernels(specs, target, timeout_s=KERNEL_S)
            except Exception as error:  # whatever it is, it is this corner's
                if len(some) == 1:
                    failed[some[0].name] = f"{type(error).__name__}: {error}"[:500]
                continue
            if some is group:
                break


def lines_of(module: str, arguments: Sequence[str], seconds: float, silence: float) -> Iterator[Result]:
    """JSON lines of a child as they come. Ends with {"ended": why} if it ended without being done."""
    command = [sys.executable, "-m", module, *arguments]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout is not None
        queue: Queue[str | None] = Queue()
        reader = threading.Thread(target=_read, args=(process.stdout, queue), daemon=True)
        reader.start()
        deadline = time.perf_counter() + seconds
        why = ""
        while not why:
            left = deadline - time.perf_counter()
            try:
                line = queue.get(timeout=max(min(left, silence), 0.1))
            except Empty:
                why = (
                    "its time is over"
                    if deadline - time.perf_counter() <= 0
                    else f"silent for {silence:.0f} s"
                )
                break
            if line is None:
                errors.seek(0)
                words = errors.read().strip().splitlines()
                why = f"exit code {process.wait()}: {words[-1][:300] if words else 'no message'}"
                break
            if line.startswith("{"):
                parsed = json.loads(line)
                if parsed.get("done"):
                    process.wait(timeout=60)
                    return
                yield parsed
        process.kill()
        process.wait()
        yield {"ended": why}


def _read(stream: Any, queue: "Queue[str | None]") -> None:
    for line in stream:
        queue.put(line)
    queue.put(None)


def run_kernels(target: Target, word: str, seconds: float) -> Result:
    """Results of every corner and point. A child that dies or hangs costs the corner that it was at, no other."""
    deadline = time.perf_counter() + seconds
    found: Result = {"rates": {}, "results": [], "left_out": ""}
    first, corners = 0, chosen(word)
    while first < len(corners):
        current: Result = {"begin": first, "corner": ""}
        ended = ""
        arguments = ["--target", target.name, "--first", str(first), "--only", word]
        left = deadline - time.perf_counter()
        for line in lines_of("benchmarks.device_kernels", arguments, left, SILENCE_S):
            if "rates" in line:
                found["rates"] = line["rates"]
            elif "begin" in line:
                current = line
            elif "ended" in line:
                ended = line["ended"]
            else:
                found["results"].append(line)
        if not ended:
            break
        if time.perf_counter() >= deadline or not current["corner"]:
            found["left_out"] = f"from corner {current['begin']} of {len(corners)} on: {ended}"
            break
        found["results"].append(
            {"corner": current["corner"], "ok": False, "note": f"the process ended: {ended}"}
        )
        first = current["begin"] + 1
    return found


def run_end_to_end(target: Target, seconds: float) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        arguments = [
            "benchmarks.device_end_to_end",
            "--target",
            target.name,
            "--output",
            f"{folder}/artifact",
        ]
        # compiling is silent, and takes most of the time
        lines = list(lines_of("benchmarks.device_bare", arguments, seconds, seconds))
    return {"lines": lines}


def run_tests(seconds: float) -> Result:
    """The tests that are marked gpu."""
    if find_spec("pytest") is None:
        return {"left_out": "pytest is not installed"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "tests/runtime/test_gpu.py",
        "-p",
        "no:cacheprovider",
    ]
    try:
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return {"ok": False, "note": f"not done after {seconds:.0f} s"}
    lines = result.stdout.strip().splitlines()
    return {"ok": result.returncode == 0, "note": lines[-1] if lines else "", "output": result.stdout[-4000:]}


def failures(report: Result) -> list[str]:
    """Every comparison that failed, and every part that did not come to one."""
    found = [f"build {name}: {why}" for name, why in report["build"]["failed"].items()]
    for result in report["kernels"]["results"]:
        if not result["ok"]:
            where = f"{result['corner']} {result.get('point', '')}".strip()
            found.append(f"{where}: {result.get('note') or 'off by'} {result.get('error', '')}")
    left_out = report["kernels"]["left_out"]
    if left_out and "its time is over" not in left_out:
        found.append(f"kernels {left_out}")
    for line in report["end_to_end"]["lines"]:
        if "ended" in line:
            found.append(f"end to end: {line['ended']}")
        elif line.get("ok") is False:
            found.append(f"end to end, batch {line['batch']}: logits are off by {line['error']:.3g}")
    if report["tests"].get("ok") is False:
        found.append(f"tests: {report['tests']['note']}")
    return found


def show(report: Result) -> None:
    rates = report["kernels"]["rates"]
    print("\nmeasured: " + ", ".join(f"{name} {rate / 1e12:.2f} T/s" for name, rate in rates.items()))
    print(
        f"{'corner':44} {'step':5} {'check':10} {'error':>8} {'us':>9} {'floor':>9} {'of it':>6} {'torch':>9}  torch's"
    )
    for r in report["kernels"]["results"]:
        state = r.get("checked", "") if r["ok"] else "FAILED"
        figures = [r.get(name) for name in ("error", "us", "floor_us", "of_floor", "torch_us")]
        texts = ["-" if f is None else f"{f:.3g}" if f < 1 else f"{f:.1f}" for f in figures]
        widths = (8, 9, 9, 6, 9)
        cells = " ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True))
        note = r.get("left_out") or r.get("note") or r.get("torch_how", "")
        print(f"{r['corner'][:44]:44} {r.get('point', ''):5} {state or 'left out':10} {cells}  {note[:90]}")
    for line in report["end_to_end"]["lines"]:
        print(
            "end to end: "
            + ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in line.items())
        )
    print(f"tests: {report['tests'].get('note') or report['tests'].get('left_out')}")
    for left_out in filter(None, [report["kernels"]["left_out"]]):
        print(f"not run: {left_out}")
    print(f"\n{len(report['failures'])} failures")
    for failure in report["failures"]:
        print(f"  {failure}")


def dry_run(target: Target, word: str) -> int:
    """Build everything here, and print for every corner what would be run and compared."""
    built = build_all(target, word, BUILD_S)
    for corner in chosen(word):
        if why := corner.refuse(target):
            print(f"{corner.name[:44]:44} refused: {why}")
            continue
        spec = corner.make(target)
        kind = "reference" if spec.op in REFERENCES else "finite"
        for point in points(spec):
            why = unknown_sizes(spec, point.dims)
            size = "" if why else f"{needed_bytes(spec, point.dims) / 1e9:.2f} GB"
            print(f"{corner.name[:44]:44} {point.label:5} {kind:10} {size} {why}".rstrip())
    for name, why in built["failed"].items():
        print(f"failed: {name}: {why}")
    return FAILED if built["failed"] else OK


if __name__ == "__main__":
    sys.exit(main())
