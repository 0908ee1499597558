"""Milliseconds of a prefill under torch.compile: eager, inductor and octavo, interleaved in one process.

    python benchmarks/bench_backend.py --dtype bf16 --batch 2 --length 64 256

One graph with dynamic sizes serves all shapes. `compile` is the first call: tracing, the passes, their proofs or, for
inductor, its kernels. What octavo runs here is torch's own products and attention between the rewritten ops.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.console import Console

from octavo.compiler import api
from octavo.compiler.backend import octavo_backend
from octavo.compiler.backend_report import backend_report
from octavo.compiler.models import load_model
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, titled

BACKENDS: dict[str, Any] = {"eager": None, "inductor": "inductor", "octavo": octavo_backend}


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with progress_bars() as bars:
        model: Any = api.with_dtype(load_model(options.model, bars("load")).model, options.dtype)
        report = bars("compile")
        runs, compile_s = {}, {}
        for index, name in enumerate(options.backends):
            report(name, index, len(options.backends))
            runs[name] = compiled(model, BACKENDS[name])
            compile_s[name] = seconds(runs[name], ids(2, 7))
        report = bars("rounds")
        rows = []
        for length in options.length:
            given, times = ids(options.batch, length), {name: [] for name in runs}  # type: ignore[var-annotated]
            for index in range(options.rounds):
                report(f"{length} tokens", index, options.rounds)
                for name, run in runs.items():
                    times[name].append(seconds(run, given))
            rows.append((length, {name: median(values) for name, values in times.items()}))
    show(rows, compile_s, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="as `octavo compile` takes it (default: demo)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument("--batch", type=int, default=2, help="sequences at once, 2 or more (default: 2)")
    parser.add_argument(
        "--length", type=int, nargs="+", default=[64, 256], help="prompt tokens (default: 64 256)"
    )
    parser.add_argument(
        "--rounds", type=int, default=7, help="measurements of each, interleaved (default: 7)"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all cores")
    parser.add_argument("--backends", nargs="+", choices=list(BACKENDS), default=list(BACKENDS))
    return parser.parse_args()


def compiled(model: Any, backend: Any) -> Callable[..., Any]:
    run: Callable[..., Any] = (
        model if backend is None else torch.compile(model, backend=backend, dynamic=True)
    )
    return run


def ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 1000, (batch, length), generator=torch.Generator().manual_seed(length))


def seconds(run: Callable[..., Any], given: torch.Tensor) -> float:
    with torch.no_grad():
        start = time.perf_counter()
        run(input_ids=given)
        return time.perf_counter() - start


def show(
    rows: list[tuple[int, dict[str, float]]], compile_s: dict[str, float], options: argparse.Namespace
) -> None:
    table = plain_table("tokens", *compile_s)
    for length, times in rows:
        table.add_row(str(length), *(f"{s * 1e3:.1f}" for s in times.values()))
    table.add_row("compile, s", *(f"{s:.1f}" for s in compile_s.values()))
    title = f"prefill, ms: {options.model} {options.dtype}, batch {options.batch}, {options.threads} threads"
    console = Console(highlight=False)
    console.print(titled(title, table))
    if "octavo" in compile_s:
        console.print(str(backend_report()).splitlines()[1])


if __name__ == "__main__":
    main()
