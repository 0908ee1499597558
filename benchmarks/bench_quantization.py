"""What each way of quantising costs in quality: perplexity, KL divergence from the BF16 model, top-1 agreement.

    python benchmarks/bench_quantization.py                      # all ways, all of the text: hours
    python benchmarks/bench_quantization.py --tokens 20480 --ways nvfp4-search auto-5.4 --out quality

Every compiled artifact reads the same windows of benchmarks/text, one window after another, and its logits are compared
with those of the bf16 artifact for every next token. Writes OUT.json and OUT.png beside the table. No token of the text
is seen by calibration.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from octavo.compiler import api
from octavo.compiler.compiled import Compiled
from octavo.compiler.models import LoadedModel, load_model
from octavo.compiler.options import QuantConfig
from octavo.compiler.progress import progress_bars
from octavo.compiler.quality import Distribution
from octavo.compiler.report import plain_table, titled
from octavo.runtime.batch import Batch
from octavo.runtime.model_runner import ModelRunner

TEXT = Path(__file__).parent / "text/python_reference.txt"
REFERENCE = "bf16"
AUTO_BITS = (4.5, 5.0, 5.4, 6.0)
WAYS: Mapping[str, QuantConfig | None] = {
    REFERENCE: None,
    "fp8": QuantConfig("fp8"),
    "nvfp4-nearest": QuantConfig("nvfp4", weights="nearest"),
    "nvfp4-search": QuantConfig("nvfp4"),
    "nvfp4-gptq": QuantConfig("nvfp4", weights="gptq"),
    "nvfp4-gptq-by-token": QuantConfig("nvfp4", weights="gptq", activations="by_token"),
    **{f"auto-{bits:g}": QuantConfig("auto", weights="gptq", bits=bits) for bits in AUTO_BITS},
    "auto-5.4-weight-only": QuantConfig("auto_weight_only", weights="gptq", bits=5.4),
    "weight-only-search": QuantConfig("nvfp4_weight_only"),
    "weight-only-gptq": QuantConfig("nvfp4_weight_only", weights="gptq"),
    "kv-fp8": QuantConfig("bf16", kv="fp8"),
    "kv-nvfp4": QuantConfig("bf16", kv="nvfp4"),
}


@dataclass
class Sums:
    """Of one way, a value for each window: mean negative log-likelihood, mean KL (nats a token), top-1 agreement."""

    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    agreement: list[float] = field(default_factory=list)


def main() -> None:
    options = parse()
    names = list(dict.fromkeys([REFERENCE, *(options.ways or WAYS)]))
    with progress_bars() as bars:
        loaded = load_model(options.model, bars("load"))
    windows = windows_of(loaded, options.tokens, options.window)
    with tempfile.TemporaryDirectory() as folder:
        compiled = {name: compile_one(loaded, name, Path(folder)) for name in names}
        sums = evaluate(compiled, windows)
        rows = [row_of(name, compiled[name], sums) for name in names]
    show(rows, len(windows) * options.window)
    Path(f"{options.out}.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows).savefig(f"{options.out}.png", dpi=150)
    print(f"{options.out}.json {options.out}.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="as `octavo compile` takes it (default: demo)")
    parser.add_argument("--tokens", type=int, help="of the text, at most (default: all of it)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a sequence (default: 512)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, help="default: all")
    parser.add_argument("--out", default="quantization", help="stem of the files (default: quantization)")
    return parser.parse_args()


def windows_of(loaded: LoadedModel, tokens: int | None, length: int) -> list[NDArray[np.int64]]:
    """Whole windows of the text, one after another."""
    tokenizer: Any = loaded.tokenizer
    ids = np.array(tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"], np.int64)[:tokens]
    return [ids[start : start + length] for start in range(0, len(ids) - length + 1, length)]


def compile_one(loaded: LoadedModel, name: str, folder: Path) -> Compiled:
    """The artifact of one way, weights and activations otherwise in bf16."""
    options: dict[str, Any] = {} if WAYS[name] is None else {"quantize": WAYS[name]}
    return api.compile(
        loaded.model, dtype="bf16", tokenizer=loaded.tokenizer, output=folder / name, verify="off", **options
    )


def evaluate(compiled: Mapping[str, Compiled], windows: list[NDArray[np.int64]]) -> dict[str, Sums]:
    """Window by window, all ways beside each other: an interrupted run has seen equal text."""
    runners = {name: one.runner(num_pages=64) for name, one in compiled.items()}
    sums = {name: Sums() for name in compiled}
    with progress_bars() as bars:
        report = bars("windows")
        for index, window in enumerate(windows):
            report(f"{index} of {len(windows)}", index, len(windows))
            first = logits_of(runners[REFERENCE], window)
            reference = Distribution(first)
            for name, runner in runners.items():
                own = first if name == REFERENCE else logits_of(runner, window)
                add(sums[name], own, reference, torch.from_numpy(window))
    return sums


def logits_of(runner: ModelRunner, window: NDArray[np.int64]) -> Tensor:
    """(tokens, vocab) fp32 of the next token after each of the window's."""
    return torch.from_numpy(runner.run(batch_of(window, runner.page_size)).copy())


def batch_of(window: NDArray[np.int64], page_size: int) -> Batch:
    """One sequence from its start, logits of every token; page 0 is the null page."""
    count = len(window)
    positions = np.arange(count)
    pages = -(-count // page_size)
    return Batch(
        input_ids=window,
        positions=positions,
        slot_mapping=positions + page_size,
        page_table=np.arange(1, pages + 1, dtype=np.int32)[None],
        seq_lens=np.array([count], np.int32),
        cu_seqlens_q=np.array([0, count], np.int32),
        logit_rows=positions.copy(),
    )


def add(sums: Sums, own: Tensor, reference: Distribution, window: Tensor) -> None:
    """The last token has no next one to be judged by; its distribution counts all the same."""
    quality = reference.compare(own)
    sums.nll.append(float(torch.nn.functional.cross_entropy(own[:-1], window[1:])))
    sums.kl.append(quality.kl)
    sums.agreement.append(quality.top1)


def row_of(name: str, compiled: Compiled, sums: Mapping[str, Sums]) -> dict[str, Any]:
    """The figures of one way. *_error: standard errors over the windows, of paired differences."""
    own, base = sums[name], sums[REFERENCE]
    loss = np.array(own.nll) - np.array(base.nll)
    weights = sum(w.array.nbytes for w in compiled.artifact.weights.values())
    return {
        "way": name,
        "perplexity": math.exp(np.mean(own.nll)),
        "perplexity_ratio": math.exp(loss.mean()),
        "perplexity_ratio_error": math.exp(loss.mean()) * error(loss),
        "kl": float(np.mean(own.kl)),
        "kl_error": error(np.array(own.kl)),
        "top1": float(np.mean(own.agreement)),
        "weights_mb": weights / 1e6,
        "compile_s": sum(compiled.seconds.values()),
    }


def error(values: NDArray[np.float64]) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else 0.0


def show(rows: list[dict[str, Any]], tokens: int) -> None:
    table = plain_table("way", "perplexity", "over bf16", "KL (nats)", "top-1", "weights MB", "compile s")
    for row in rows:
        table.add_row(
            row["way"],
            f"{row['perplexity']:.3f}",
            f"{100 * (row['perplexity_ratio'] - 1):+.2f} % ± {100 * row['perplexity_ratio_error']:.2f}",
            f"{row['kl']:.4f} ± {row['kl_error']:.4f}",
            f"{100 * row['top1']:.2f} %",
            f"{row['weights_mb']:.1f}",
            f"{row['compile_s']:.0f}",
        )
    Console(width=120).print(titled(f"quality over {tokens} tokens of {TEXT.name}", table))


def plot(rows: list[dict[str, Any]]) -> Figure:
    """Size of the weights against KL, a point for each way; perplexity beside it as bars."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    shown = [row for row in rows if row["way"] != REFERENCE]
    for row in shown:
        left.errorbar(row["weights_mb"], row["kl"], 2 * row["kl_error"], fmt="o", capsize=3)
        left.annotate(
            row["way"], (row["weights_mb"], row["kl"]), (6, 3), textcoords="offset points", fontsize=8
        )
    left.set(xlabel="weights (MB)", ylabel="mean KL from bf16 (nats a token)", yscale="log")
    left.grid(True, color="0.9")
    names = [row["way"] for row in shown]
    losses = [100 * (row["perplexity_ratio"] - 1) for row in shown]
    errors = [200 * row["perplexity_ratio_error"] for row in shown]
    right.barh(names, losses, xerr=errors, color="0.6")
    right.invert_yaxis()
    right.set(xlabel="perplexity over bf16 (%)")
    right.grid(True, axis="x", color="0.9")
    for axes in (left, right):
        axes.set_axisbelow(True)
    return figure


if __name__ == "__main__":
    main()
