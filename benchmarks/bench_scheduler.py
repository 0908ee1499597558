"""What the runtime itself costs a step, without a model: the runner returns logits that never change.

    python benchmarks/bench_scheduler.py --running 1 8 64 256

Every step decodes one token of each running request. scheduler: schedule, moves of pages and commit; batch: the
arrays of a step; sample: choosing greedy tokens out of rows of 49,152 logits; show: tokens to their readers.
Times are of this thread on its core, so that a busy machine does not count.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from octavo.compiler.artifact import ModelInfo
from octavo.compiler.report import plain_table, titled
from octavo.runtime.batch import Batch
from octavo.runtime.engine import Engine
from octavo.runtime.page_moves import Move
from octavo.runtime.sampling_params import SamplingParams

PARTS = ("schedule", "moves", "commit", "scheduler", "batch", "sample", "show", "step")
TARGET_US = 200.0  # of "scheduler" at 64 running
TARGET_RUNNING = 64


class ConstantRunner:
    """Pages without memory, and one row of logits for every wanted row. Its own time is not counted."""

    num_host_pages = 0
    page_windows: tuple[int | None, ...] = (None,)
    page_bytes = 1
    features: NDArray[np.generic] | None = None

    def __init__(self, num_pages: int, page_size: int, vocab_size: int, most_rows: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        row = np.random.default_rng(0).standard_normal(vocab_size).astype(np.float32)
        self._logits = np.tile(row, (most_rows, 1))

    def move_pages(self, moves: Sequence[Move]) -> None: ...

    def run(self, batch: Batch) -> NDArray[np.float32]:
        return self._logits[: len(batch.logit_rows)]


class Marks:
    """When the calls of a step begin and end."""

    def __init__(self, engine: Engine) -> None:
        self._times: dict[str, tuple[float, float]] = {}
        scheduler: Any = engine.scheduler
        memory: Any = engine.memory
        runner: Any = engine.runner
        for owner, name in (
            (scheduler, "schedule"), (memory, "run_moves"), (runner, "run"), (scheduler, "commit"),
        ):  # fmt: skip
            setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            began = time.thread_time()
            result = call(*arguments)
            self._times[name] = began, time.thread_time()
            return result

        return timed

    def parts(self, began: float, ended: float) -> dict[str, float]:
        """Microseconds of each part of a step."""
        schedule, moves, run, commit = (self._times[n] for n in ("schedule", "run_moves", "run", "commit"))
        spent = {
            "schedule": schedule[1] - schedule[0],
            "moves": moves[1] - moves[0],
            "commit": commit[1] - commit[0],
            "batch": run[0] - moves[1],
            "sample": commit[0] - run[1],
            "show": ended - commit[1],
            "step": ended - began - (run[1] - run[0]),
        }
        spent["scheduler"] = spent["schedule"] + spent["moves"] + spent["commit"]
        return {name: 1e6 * seconds for name, seconds in spent.items()}


def measure(running: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """Each step's parts, once all requests decode."""
    num_tokens = options.warmup + options.steps + 1
    length = options.prompt + options.page_size + num_tokens
    num_pages = 1 + running * -(-length // options.page_size)
    runner = ConstantRunner(num_pages, options.page_size, options.vocab, running)
    model = ModelInfo(
        "constant", options.vocab, num_layers=1, max_model_len=length,
        max_batch_tokens=max(2048, running * length), eos_token_ids=(),
    )  # fmt: skip
    engine = Engine(runner, model, max_requests=running, seed=0)
    random = np.random.default_rng(0)
    for index in range(running):  # of unequal lengths, so that they do not all need a page in the same step
        prompt = random.integers(0, options.vocab, options.prompt + index % options.page_size).tolist()
        engine.add_request(prompt, SamplingParams(num_tokens))
    marks = Marks(engine)
    results = []
    for step in range(options.warmup + options.steps):
        began = time.thread_time()
        tokens = engine.step()
        ended = time.thread_time()
        assert len(tokens) == running, "a request does not decode"
        if step >= options.warmup:
            results.append(marks.parts(began, ended))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 8, 64, 256], help="requests at once")
    parser.add_argument("--steps", type=int, default=200, help="measured steps (default: 200)")
    parser.add_argument("--warmup", type=int, default=20, help="steps before them (default: 20)")
    parser.add_argument("--prompt", type=int, default=200, help="prompt tokens of each (default: 200)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens of a page (default: 16)")
    parser.add_argument("--vocab", type=int, default=49152, help="logits of a row (default: 49152)")
    options = parser.parse_args()
    results = {running: measure(running, options) for running in options.running}
    table = plain_table("running", *PARTS)
    for running, steps in results.items():
        table.add_row(str(running), *(f"{median(step[part] for step in steps):.0f}" for part in PARTS))
    title = f"microseconds of a step, medians of {options.steps} steps"
    console = Console(highlight=False, width=100)
    console.print(titled(title, table))
    for running, steps in results.items():
        own = [step["scheduler"] for step in steps]
        tenths = quantiles(own, n=10)
        target = f"; wanted: under {TARGET_US:.0f}" if running == TARGET_RUNNING else ""
        console.print(
            f"scheduler at {running} running: median {median(own):.0f} us, 80 % of steps within "
            f"{tenths[0]:.0f} to {tenths[-1]:.0f}{target}"
        )


if __name__ == "__main__":
    main()
