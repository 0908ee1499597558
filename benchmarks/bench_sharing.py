"""Several answers and beams in the engine against the same work as independent requests: pages, tokens and time.

    python benchmarks/bench_sharing.py smol.octavo --prompt 100 --tokens 8 --rounds 3

samples n: one request with n answers, against n requests in one batch without a prefix cache. beams w: one request
with beam_width w, against a client that searches by itself: every step it sends every beam's whole sequence for one
token and its best w alternatives, to an engine without a prefix cache and to one with it. Rounds are interleaved, each
with a prompt of its own; ratios are of rounds.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, titled
from octavo.runtime.batch import Batch
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams

Work = Callable[["Meter", list[int]], list[tuple[int, ...]]]
MOST_EXTRA = 1.15  # forward tokens of w beams against w times those of one answer


ONE_ANSWER = "one answer"


@dataclass(frozen=True)
class Cost:
    """Most pages held at once, tokens through the model, seconds."""

    pages: int
    tokens: int
    seconds: float


class Meter:
    """An engine, and the most pages that its requests held during a step."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._most = 0
        runner: Any = engine.runner
        self._run = runner.run
        runner.run = self._watched

    def _watched(self, batch: Batch) -> NDArray[np.float32]:
        pool = self.engine.memory.pool
        self._most = max(self._most, pool.capacity - pool.num_free)
        logits: NDArray[np.float32] = self._run(batch)
        return logits

    def measure(self, work: Work, prompt: list[int]) -> tuple[Cost, list[tuple[int, ...]]]:
        self._most, tokens = 0, self.engine.stats.computed_tokens
        began = time.perf_counter()
        answers = work(self, prompt)
        seconds = time.perf_counter() - began
        return Cost(self._most, self.engine.stats.computed_tokens - tokens, seconds), answers


@dataclass(frozen=True)
class Pair:
    """Work in the engine, and what it is compared with, on an engine of its own choice.

    is_search  both must find the same; width: of beams that are compared with one answer
    """

    name: str
    other: str
    work: Work
    meter: Meter
    other_work: Work
    is_search: bool = False
    width: int | None = None


def samples(count: int, num_tokens: int) -> Work:
    params = SamplingParams(num_tokens, 1.0, seed=1, n=count, ignore_eos=True)
    return lambda meter, prompt: _answers(meter.engine.generate([prompt], params))


def single(num_tokens: int) -> Work:
    params = SamplingParams(num_tokens, ignore_eos=True)
    return lambda meter, prompt: _answers(meter.engine.generate([prompt], params))


def independent(count: int, num_tokens: int) -> Work:
    params = [SamplingParams(num_tokens, 1.0, seed=seed, ignore_eos=True) for seed in range(count)]
    return lambda meter, prompt: _answers(meter.engine.generate([prompt] * count, params))


def beams(width: int, num_tokens: int) -> Work:
    params = SamplingParams(num_tokens, beam_width=width, ignore_eos=True)
    return lambda meter, prompt: _answers(meter.engine.generate([prompt], params))


def client_beams(width: int, num_tokens: int) -> Work:
    """Beam search outside of the engine. No answer ends early, so the best sum of log-probabilities wins."""
    params = SamplingParams(1, logprobs=width, ignore_eos=True)

    def work(meter: Meter, prompt: list[int]) -> list[tuple[int, ...]]:
        alive: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(num_tokens):
            sent = [[*prompt, *tokens] for _, tokens in alive]
            found = []
            for (total, tokens), answer in zip(alive, meter.engine.generate(sent, params), strict=True):
                reported = answer.answers[0].logprobs
                for token in reported if reported is not None else ():  # one
                    found += [(total + logprob, (*tokens, each)) for each, logprob in token.top_logprobs]
            alive = sorted(found, key=lambda beam: -beam[0])[:width]
        return [alive[0][1]]

    return work


def _answers(completions: Sequence[Any]) -> list[tuple[int, ...]]:
    return [answer.token_ids for completion in completions for answer in completion.answers]


def compiled_demo(folder: Path) -> Path:
    command = [sys.executable, "-m", "octavo.compiler.cli", "compile", "demo", "--target", "cpu"]
    subprocess.run([*command, "-o", str(folder / "demo")], check=True, stdout=subprocess.DEVNULL)
    return folder / "demo"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("artifact", nargs="?", type=Path, help="default: the demo model is compiled first")
    parser.add_argument("--prompt", type=int, default=100, help="prompt tokens (default: 100)")
    parser.add_argument("--tokens", type=int, default=8, help="generated tokens (default: 8)")
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 8], help="answers, beams (default: 4 8)")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        artifact = options.artifact or compiled_demo(Path(folder))
        plain = Meter(Engine.from_artifact(artifact, prefix_caching=False))
        caching = Meter(Engine.from_artifact(artifact))
    pairs = pairs_of(options, plain, caching)
    random = np.random.default_rng(0)
    num_same = num_compared = 0
    costs: list[list[tuple[Cost, Cost]]] = [[] for _ in pairs]
    with progress_bars() as bars:
        report = bars("rounds")
        for meter in (plain, caching):
            meter.measure(single(2), [5] * options.prompt)  # first calls
        for round_ in range(options.rounds):
            for index, pair in enumerate(pairs):
                report(f"{pair.name}, {pair.other}", round_ * len(pairs) + index, options.rounds * len(pairs))
                prompt = random.integers(3, plain.engine.model.vocab_size, options.prompt).tolist()
                ours, found = plain.measure(pair.work, prompt)
                theirs, expected = pair.meter.measure(pair.other_work, prompt)
                costs[index].append((ours, theirs))
                if pair.is_search:
                    num_same, num_compared = num_same + (found == expected), num_compared + 1
    show(pairs, costs, options)
    print(f"engine and client found the same answer in {num_same} of {num_compared} searches")


def pairs_of(options: argparse.Namespace, plain: Meter, caching: Meter) -> list[Pair]:
    count = options.tokens
    pairs = []
    for width in options.widths:
        search, client = beams(width, count), client_beams(width, count)
        pairs += [
            Pair(
                f"samples {width}", "no prefix cache", samples(width, count), plain, independent(width, count)
            ),
            Pair(f"beams {width}", "no prefix cache", search, plain, client, is_search=True),
            Pair(f"beams {width}", "prefix cache", search, caching, client, is_search=True),
            Pair(f"beams {width}", ONE_ANSWER, search, plain, single(count), width=width),
        ]
    return pairs


def show(
    pairs: Sequence[Pair], costs: Sequence[list[tuple[Cost, Cost]]], options: argparse.Namespace
) -> None:
    title = (
        f"{options.prompt} prompt and {options.tokens} generated tokens, medians of {options.rounds} rounds"
    )
    heads = [head for field in ("pages", "tokens", "seconds") for head in (field, "other's", "ratio")]
    table = plain_table(
        "in the engine", "against", *heads, "least", "most", left=("in the engine", "against")
    )
    below = []
    for pair, rounds in zip(pairs, costs, strict=True):
        cells, ratios = [], [0.0]
        for field, form in (("pages", ".0f"), ("tokens", ".0f"), ("seconds", ".2f")):
            sides = [(getattr(ours, field), getattr(theirs, field)) for ours, theirs in rounds]
            ratios = [theirs / ours for ours, theirs in sides]
            cells += [format(median(side), form) for side in zip(*sides, strict=True)]
            cells.append(f"{median(ratios):.2f}")
        table.add_row(pair.name, pair.other, *cells, f"{min(ratios):.2f}", f"{max(ratios):.2f}")
        if pair.width is not None:
            ours, theirs = (median(cost[side].tokens for cost in rounds) - options.prompt for side in (0, 1))
            below.append(
                f"{pair.name}: {ours / theirs:.2f} times the forward tokens of decoding one answer; "
                f"wanted: at most {pair.width * MOST_EXTRA:.1f}"
            )
    console = Console(highlight=False, width=120)
    console.print(titled(title, table))
    console.print(
        "ratio: the other's cost over the engine's, of the same round: median, and of time least and most"
    )
    for line in below:
        console.print(line)


if __name__ == "__main__":
    main()
