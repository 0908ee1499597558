"""Tokens a second of Octavo and of transformers (eager), interleaved in one process on the same cores.

    python benchmarks/bench_decode.py --dtype bf16 --batch 1 4 --rounds 5

Both generate greedily with a KV cache, from the same token ids. prefill: prompt tokens over the time to the
first token; decode: the tokens after it over their time.
"""

import argparse
import inspect
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.console import Console

from octavo.compiler import api
from octavo.compiler.models import load_model
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, titled
from octavo.runtime.sampling_params import SamplingParams

Rates = tuple[float, float]  # prefill, decode: tokens a second
Prompts = list[list[int]]


def main() -> None:
    options = parse()
    torch.set_num_threads(options.threads)
    with progress_bars() as bars:
        loaded = load_model(options.model, bars("load"))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    compiled = api.compile(loaded.model, dtype=options.dtype, verify="off")
    engine = compiled.engine(num_threads=options.threads)
    model: Any = api.with_dtype(loaded.model, options.dtype)
    assert next(model.parameters()).dtype is dtype
    rows = []
    with progress_bars() as bars:
        report = bars("rounds")
        for batch in options.batch:
            prompts = make_prompts(batch, options.prompt, compiled.artifact.model.vocab_size)
            ours, theirs = [], []
            for index in range(options.rounds + 1):
                report(f"batch {batch}", index, options.rounds + 1)
                ours.append(rates(of_octavo, engine, prompts, options.tokens))
                theirs.append(rates(of_eager, model, prompts, options.tokens))
            rows.append((batch, ours[1:], theirs[1:]))  # the first round warms up
    show(rows, options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="as `octavo compile` takes it (default: demo)")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32", help="default: fp32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="sequences at once (default: 1)")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of a sequence (default: 128)")
    parser.add_argument("--tokens", type=int, default=32, help="generated tokens of a sequence (default: 32)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds after a warm-up (default: 5)")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--threads", type=int, default=cores, help=f"of both (default: {cores})")
    return parser.parse_args()


def make_prompts(batch: int, length: int, vocab_size: int) -> Prompts:
    generator = torch.Generator().manual_seed(0)
    ids: Prompts = torch.randint(3, vocab_size, (batch, length), generator=generator).tolist()
    return ids


def rates(run: Callable[..., None], model: Any, prompts: Prompts, num_tokens: int) -> Rates:
    """run generates, and calls its last argument when every sequence has its first token."""
    marks: list[float] = []
    began = time.perf_counter()
    run(model, prompts, num_tokens, lambda: marks.append(time.perf_counter()))
    ended = time.perf_counter()
    batch, length = len(prompts), len(prompts[0])
    return batch * length / (marks[0] - began), batch * (num_tokens - 1) / (ended - marks[0])


def of_octavo(engine: Any, prompts: Prompts, num_tokens: int, first: Callable[[], None]) -> None:
    waiting = set(range(len(prompts)))
    for token in engine.stream(prompts, SamplingParams(max_tokens=num_tokens, ignore_eos=True)):
        if token.index in waiting:
            waiting.remove(token.index)
            if not waiting:
                first()


@torch.no_grad()
def of_eager(model: Any, prompts: Prompts, num_tokens: int, first: Callable[[], None]) -> None:
    cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    result = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    ids = result.logits[:, -1:].argmax(-1)
    first()
    for _ in range(num_tokens - 1):
        result = model(ids, use_cache=True, **{cache: getattr(result, cache)})
        ids = result.logits[:, -1:].argmax(-1)


def show(rows: list[tuple[int, list[Rates], list[Rates]]], options: argparse.Namespace) -> None:
    """Ratios are of rounds, so a machine that slows down for a while slows both."""
    title = (
        f"{options.model} {options.dtype}, {options.prompt} prompt and {options.tokens} generated tokens, "
        f"{options.threads} threads, {options.rounds} rounds"
    )
    table = plain_table("batch", "phase", "octavo", "eager", "ratio", "least", "most", left=("phase",))
    for batch, ours, theirs in rows:
        for index, phase in enumerate(("prefill", "decode")):
            a, b = [rate[index] for rate in ours], [rate[index] for rate in theirs]
            ratios = [x / y for x, y in zip(a, b, strict=True)]
            figures = (f"{median(a):.1f}", f"{median(b):.1f}")
            table.add_row(
                str(batch), phase, *figures, *(f"{x:.2f}" for x in (median(ratios), min(ratios), max(ratios)))
            )
    Console(highlight=False).print(titled(title, table))
    print("tokens/s (median of rounds); ratio of octavo to eager of the same round: median, least, most")


if __name__ == "__main__":
    main()
