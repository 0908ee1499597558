"""Tokens a second with and without drafts, on three kinds of text, interleaved in one run on the same cores.

    python benchmarks/bench_speculation.py --work /tmp/speculation
    python benchmarks/bench_speculation.py --work /tmp/speculation --methods suffix draft=eagle.octavo --length 4

Target: SmolLM2-135M-Instruct in bf16 (or --target), compiled into --work if it is not there, and its step times are
measured; "self" is the same model in NVFP4, logits too. Each run has an engine of its own, so nothing is known from
earlier answers. Time is that behind the first token. Greedy unless --temperature says otherwise: outputs are compared
token by token with those without drafts, and the number that differs is printed.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from octavo.compiler import api
from octavo.compiler.artifact import STEP_TIMES
from octavo.compiler.compiled import Compiled, load
from octavo.compiler.measure_steps import add_step_times, measure_steps
from octavo.compiler.models import load_model
from octavo.compiler.options import QuantConfig
from octavo.compiler.progress import Report, progress_bars
from octavo.compiler.report import plain_table, titled
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.figures import Figures
from octavo.runtime.speculative.options import Speculate, speculate_of

FUNCTIONS = '''def add(a, b):
    """Add two numbers."""
    return a + b


def subtract(a, b):
    """Subtract b from a."""
    return a - b


def multiply(a, b):
    """Multiply two numbers."""
    return a * b
'''
LETTER = """Dear Ms. Miller,

thank you for your letter of 3 May. We are glad that the garden chairs arrived in time and that you like them.
The missing screws are on their way and should reach you by Friday. If anything else is missing, call us at any time.

Kind regards,
Tom Baker, customer service
"""
TABLE = """name,city,age
Anna,Berlin,34
Bob,London,29
Carla,Madrid,41
David,Oslo,38
Elena,Rome,27
"""
TEXTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "Explain why the sky is blue in simple words.",
        "What should I pack for a week of hiking in the mountains?",
        "Tell me a short story about a fox who learns to share.",
        "How does a bicycle stay upright while it moves?",
    ),
    "code": (
        "Write a Python function that returns the n-th Fibonacci number, with a docstring and an example.",
        "Write a Python class for a stack with push, pop and peek, and show how it is used.",
        "Write a SQL query that counts the orders of each customer in 2023, and explain it.",
        "Write a JavaScript function that removes duplicates from an array.",
    ),
    "edit": (
        f"Repeat this file exactly, but rename subtract to minus:\n\n{FUNCTIONS}",
        f"Repeat this letter exactly, but replace Friday by Monday:\n\n{LETTER}",
        f"Repeat this table exactly, but write Paris instead of London:\n\n{TABLE}",
        f"Add a line with a divide function to this file and repeat all of it:\n\n{FUNCTIONS}",
    ),
}


@dataclass
class Runs:
    """Of one method and kind of text. ratios: plain seconds over own, of each prompt and round."""

    ratios: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    figures: list[Figures] = field(default_factory=list)
    seconds: float = 0.0
    differing: int = 0


def main() -> None:
    options = parse()
    target, draft = artifacts(options)
    methods: list[tuple[str, Speculate | None]] = [("plain", None)]
    for text in options.methods:
        chosen = f"self={draft}" if text == "self" else text
        how, _, path = text.partition("=")
        methods.append((f"{how}={Path(path).stem}" if path else how, speculate_of(chosen, options.length)))
    params = SamplingParams(max_tokens=options.tokens, temperature=options.temperature, seed=1)
    with progress_bars() as bars:
        found = measure(target, methods, params, options.rounds, options.kinds, bars("prompts"))
    show(found, [name for name, _ in methods], options)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="where artifacts are kept between runs")
    parser.add_argument("--target", type=Path, help="an artifact with a chat template in place of SmolLM2's")
    parser.add_argument(
        "--methods", nargs="+", default=["ngram", "suffix", "self"], help="as --speculate takes them"
    )
    parser.add_argument("--kinds", nargs="+", default=list(TEXTS), choices=list(TEXTS))
    parser.add_argument(
        "--length", type=int, help="drafted tokens of a round; default: as the policy chooses"
    )
    parser.add_argument("--tokens", type=int, default=192, help="most tokens of an answer (default: 192)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    return parser.parse_args()


def artifacts(options: argparse.Namespace) -> tuple[Compiled, Path]:
    """The target with its step times, and the same model in NVFP4."""
    path, draft = options.target or options.work / "target.octavo", options.work / "nvfp4.octavo"
    wanted = [path] * (not path.exists()) + [draft] * ("self" in options.methods and not draft.exists())
    if wanted:
        with progress_bars() as bars:
            loaded = load_model("demo", bars("load"))
        given = {"tokenizer": loaded.tokenizer, "dtype": "bf16", "verify": "off"}
        if path in wanted:
            api.compile(loaded.model, output=path, features=(-1,), **given)
        if draft in wanted:
            config = QuantConfig(include=("lm_head",))
            api.compile(loaded.model, output=draft, quantize=config, **given)
    target = load(path)
    if STEP_TIMES not in target.artifact.files:
        with progress_bars() as bars:
            add_step_times(target.artifact, measure_steps(target.artifact, bars("step times")))
        target = load(path)
    return target, draft


def measure(
    target: Compiled, methods: Sequence[tuple[str, Speculate | None]], params: SamplingParams, rounds: int,
    kinds: Sequence[str], progress: Report,
) -> dict[str, dict[str, Runs]]:  # fmt: skip
    """By kind of text and method. The methods follow each other on every prompt."""
    found = {kind: {name: Runs() for name, _ in methods} for kind in kinds}
    turns = [(kind, text) for _ in range(rounds) for kind in kinds for text in TEXTS[kind]]
    for turn, (kind, text) in enumerate(turns):
        progress(kind, turn, len(turns))
        prompt = target.chat_prompt([{"role": "user", "content": text}])
        plain_s, wanted = 0.0, []
        for name, speculate in methods:
            seconds, tokens, figures = answer(target, speculate, prompt, params)
            if speculate is None:
                plain_s, wanted = seconds, tokens
            add(found[kind][name], plain_s, seconds, len(tokens), figures)
            found[kind][name].differing += tokens != wanted
    return found


def answer(
    target: Compiled, speculate: Speculate | None, prompt: list[int], params: SamplingParams
) -> tuple[float, list[int], Figures | None]:
    """Seconds behind the first token, the tokens, and what speculation did."""
    engine = target.engine(num_pages=256, speculate=speculate, prefix_caching=False)
    tokens, began = [], 0.0
    for token in engine.stream([prompt], params):
        began = began or time.perf_counter()
        if token.token_id is not None:
            tokens.append(token.token_id)
    seconds = time.perf_counter() - began
    return seconds, tokens, None if engine.speculator is None else engine.speculator.figures


def add(runs: Runs, plain_s: float, seconds: float, num_tokens: int, figures: Figures | None) -> None:
    runs.ratios.append(plain_s / seconds)
    runs.rates.append((num_tokens - 1) / seconds)
    runs.seconds += seconds
    if figures is not None:
        runs.figures.append(figures)


def show(found: dict[str, dict[str, Runs]], names: Sequence[str], options: argparse.Namespace) -> None:
    console = Console(highlight=False, width=160)
    table = plain_table(
        "text", "method", "tokens/s", "times plain", "spread", "tokens a round", "accepted by depth", "draft", "target",
        "verify", "no drafts", "differ", left=("text", "method", "accepted by depth"),
    )  # fmt: skip
    for kind, by_method in found.items():
        for name in names:
            table.add_row(kind, *row(name, by_method[name]))
    length = options.length or "as the policy chooses"
    console.print(
        titled(
            f"at most {options.tokens} tokens an answer, drafts: {length}; medians of {options.rounds} rounds",
            table,
        )
    )


def row(name: str, runs: Runs) -> list[str]:
    ratios = runs.ratios
    first = [
        name, f"{statistics.median(runs.rates):.1f}", f"{statistics.median(ratios):.2f}",
        f"{min(ratios):.2f}-{max(ratios):.2f}",
    ]  # fmt: skip
    if not runs.figures:
        return [*first, "", "", "", "", "", "", ""]
    total = Figures()
    for one in runs.figures:
        total.add(one)
    plain_s = sum(each.seconds for each in total.plain.values())
    split = [total.draft_s, total.target_s, total.verify_s, plain_s]
    by_depth = " ".join(f"{share:.2f}" for share in total.acceptance[:6])
    shares = [f"{part / runs.seconds:.0%}" for part in split]
    return [*first, f"{total.mean_emitted:.2f}", by_depth, *shares, str(runs.differing)]


if __name__ == "__main__":
    main()
