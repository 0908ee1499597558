"""What it costs to leave experts out: perplexity of a carved model against the fraction of its FFNs that computes.

    python benchmarks/bench_carve.py                              # 8, 16 and 32 experts: an hour on two cores
    python benchmarks/bench_carve.py --quick                      # 8 experts, four fractions, 2,048 tokens: minutes
    python benchmarks/bench_carve.py --experts 8 --fractions 0.5 1 --tokens 4096 --out carve

The model is lowered once, in fp32. For every count of experts and fraction its graph is carved with calibration text
that comes with Octavo, and reads the same windows of benchmarks/text, no token of which calibration saw. Where all
experts are active, results must be the dense ones but for the order of sums: the worst difference is printed beside its
bound. Writes OUT.json and OUT.png beside the table.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler import api
from octavo.compiler.calibration_data import calibration_sequences
from octavo.compiler.capture import capture
from octavo.compiler.carve_model import carve_model
from octavo.compiler.errors import PassError
from octavo.compiler.expert_placement import balancedness
from octavo.compiler.graph_model import copy_graph
from octavo.compiler.models import load_model
from octavo.compiler.options import CarveConfig, CompileOptions
from octavo.compiler.pipeline import lower, settings_of
from octavo.compiler.progress import Bars, progress_bars
from octavo.compiler.quality import Distribution, perplexity
from octavo.compiler.replay import Replay
from octavo.compiler.report import plain_table, titled
from octavo.compiler.target import load_target
from octavo.compiler.whole_model import BOUND

TEXT = Path(__file__).parent / "text/python_reference.txt"
SHARED_PART = 0.25
Windows = Sequence[Sequence[int]]


@dataclass(frozen=True)
class Given:
    """The lowered model, what it is calibrated with and what it reads."""

    graph_module: GraphModule
    calibration: Windows
    windows: Windows
    page_size: int


def main() -> None:
    options = parse()
    configs = configs_of(options.experts, options.fractions)
    with progress_bars() as bars:
        given = load(options, bars)
        dense = [Distribution(one) for one in logits_of(given.graph_module, given, bars)]
        rows = [row_of("dense", 1.0, dense, [one.logs for one in dense], given.windows)]
        show_row(rows[0])
        for config in configs:
            rows.append(measure(config, given, dense, bars))
            show_row(rows[-1])
    show(rows, len(given.windows) * options.window)
    Path(f"{options.out}.json").write_text(json.dumps(rows, indent=1) + "\n")
    plot(rows).savefig(f"{options.out}.png", dpi=150)
    print(f"{options.out}.json {options.out}.png")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="as `octavo compile` takes it (default: demo)")
    parser.add_argument("--experts", type=int, nargs="+", help="default: 8 16 32")
    parser.add_argument(
        "--fractions", type=float, nargs="+", help="active parts (default: .375 .5 .625 .75 .875 1)"
    )
    parser.add_argument("--tokens", type=int, help="of the text, at most (default: 4096)")
    parser.add_argument("--window", type=int, default=512, help="tokens of a sequence (default: 512)")
    parser.add_argument("--quick", action="store_true", help="8 experts; .5 .625 .75 1; 2048 tokens")
    parser.add_argument("--out", default="carve", help="stem of the files (default: carve)")
    options = parser.parse_args()
    options.experts = options.experts or ([8] if options.quick else [8, 16, 32])
    options.fractions = options.fractions or (
        [0.5, 0.625, 0.75, 1] if options.quick else [0.375, 0.5, 0.625, 0.75, 0.875, 1]
    )
    options.tokens = options.tokens or (2048 if options.quick else 4096)
    return options


def configs_of(experts: Sequence[int], fractions: Sequence[float]) -> list[CarveConfig]:
    """A quarter of the experts is shared; the rest of the fraction is routed, at least one expert."""
    found = []
    for count in experts:
        shared = max(round(count * SHARED_PART), 1)
        wanted = (min(max(round(count * fraction) - shared, 1), count - shared) for fraction in fractions)
        found += [CarveConfig(count, shared, top_k) for top_k in dict.fromkeys(wanted)]
    return found


def load(options: argparse.Namespace, bars: Bars) -> Given:
    loaded = load_model(options.model, bars("load"))
    tokenizer: Any = loaded.tokenizer
    bars("lower")("capture and passes", 0, 1)
    chosen = CompileOptions(dtype="fp32", verify="off")
    captured = capture(api.with_dtype(loaded.model, "fp32"))
    settings = settings_of(captured, chosen, load_target("cpu").page_size)
    graph_module = lower(captured, chosen, settings).graph_module
    sequences = calibration_sequences(None, tokenizer, settings.max_model_len, "carve") or []
    ids = tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"][: options.tokens]
    starts = range(0, len(ids) - options.window + 1, options.window)
    return Given(graph_module, sequences, [ids[s : s + options.window] for s in starts], settings.page_size)


def logits_of(graph_module: GraphModule, given: Given, bars: Bars) -> list[Tensor]:
    """(tokens, vocabulary) fp32 of each window."""
    report = bars("windows")
    found = []
    for index, window in enumerate(given.windows):
        report(f"{index} of {len(given.windows)}", index, len(given.windows))
        found.append(Replay(graph_module, [window], given.page_size).reference())
    return found


def measure(config: CarveConfig, given: Given, dense: Sequence[Distribution], bars: Bars) -> dict[str, Any]:
    began = time.perf_counter()
    graph_module = copy_graph(given.graph_module)
    reports, told = carve_model(graph_module, config, given.calibration, given.page_size, bars)
    carve_s = time.perf_counter() - began
    logits = logits_of(graph_module, given, bars)
    shared, width = told["layers"][0]["widths"]
    active = (shared + config.top_k * width) / (shared + config.num_routed * width)
    row = row_of(
        f"{config.num_shared} + {config.top_k} of {config.num_routed}", active, dense, logits, given.windows
    )
    row |= {
        "experts": config.num_experts,
        "carve_s": carve_s,
        "proof": [reports[0].proof.worst, reports[0].proof.bound],
    }
    for name in ("loads", "balanced"):
        row[name] = float(np.mean([balancedness(layer[name]) for layer in told["layers"]]))
    if config.is_whole:
        row["worst_difference"] = worst_difference(dense, logits)
        if row["worst_difference"] > BOUND["fp32"]:
            raise PassError(
                f"all experts are active, and log-probabilities differ by {row['worst_difference']:.1e} of the largest"
            )
    return row


def row_of(
    name: str, active: float, dense: Sequence[Distribution], logits: Sequence[Tensor], windows: Windows
) -> dict[str, Any]:
    """kl_error: standard error over windows."""
    found = [one.compare(own) for one, own in zip(dense, logits, strict=True)]
    losses = [
        math.log(perplexity(own.log_softmax(-1), [window]))
        for own, window in zip(logits, windows, strict=True)
    ]
    kl = np.array([one.kl for one in found])
    return {
        "experts": 0, "name": name, "active": active, "perplexity": math.exp(float(np.mean(losses))),
        "kl": float(kl.mean()), "kl_error": float(kl.std(ddof=1) / math.sqrt(len(kl))) if len(kl) > 1 else 0.0,
        "top1": float(np.mean([one.top1 for one in found])),
    }  # fmt: skip


def worst_difference(dense: Sequence[Distribution], logits: Sequence[Tensor]) -> float:
    """Of log-probabilities, relative to the largest of a window."""
    pairs = ((one.logs, own.log_softmax(-1)) for one, own in zip(dense, logits, strict=True))
    return max(float((own - logs).abs().max() / logs.abs().max()) for logs, own in pairs)


def show_row(row: dict[str, Any]) -> None:
    print(
        f"{row['experts'] or 'no'} experts, {row['name']}: {row['active']:.1%} active, perplexity "
        f"{row['perplexity']:.2f}, carved in {row.get('carve_s', 0):.0f} s",
        flush=True,
    )


def show(rows: Sequence[dict[str, Any]], tokens: int) -> None:
    table = plain_table(
        "experts",
        "active",
        "of FFN",
        "perplexity",
        "KL (nats)",
        "top-1",
        "balance",
        "moved",
        left=("active",),
    )
    for row in rows:
        balance = [f"{row[name]:.2f}" if name in row else "-" for name in ("loads", "balanced")]
        table.add_row(
            str(row["experts"] or "-"), row["name"], f"{row['active']:.1%}", f"{row['perplexity']:.2f}",
            f"{row['kl']:.4f} ± {row['kl_error']:.4f}", f"{row['top1']:.1%}", *balance,
        )  # fmt: skip
    console = Console(width=120)
    console.print(titled(f"carved FFNs over {tokens} tokens of {TEXT.name}", table))
    console.print(
        "balance: mean load of experts over the largest, of calibration tokens; moved: with the moved bias"
    )
    for row in rows:
        if "worst_difference" in row:
            worst = f"{row['worst_difference']:.1e}, bound {BOUND['fp32']:.0e}"
            console.print(
                f"{row['experts']} experts, all active: worst difference of log-probabilities {worst}"
            )


def plot(rows: Sequence[dict[str, Any]]) -> Figure:
    """Perplexity and KL against the active fraction, a line for each count of experts."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for count in dict.fromkeys(row["experts"] for row in rows if row["experts"]):
        points = sorted((row for row in rows if row["experts"] == count), key=lambda row: row["active"])
        fractions = [100 * row["active"] for row in points]
        left.plot(fractions, [row["perplexity"] for row in points], "o-", label=f"{count} experts")
        missing = [row for row in points if row["kl"] > 1e-6]
        right.errorbar(
            [100 * row["active"] for row in missing], [row["kl"] for row in missing],
            [2 * row["kl_error"] for row in missing], fmt="o-", capsize=3, label=f"{count} experts",
        )  # fmt: skip
    left.axhline(rows[0]["perplexity"], color="0.4", linestyle="--", label="dense")
    left.set(xlabel="active neurons of FFNs (%)", ylabel="perplexity", yscale="log")
    right.set(xlabel="active neurons of FFNs (%)", ylabel="mean KL from dense (nats a token)", yscale="log")
    for axes in (left, right):
        axes.grid(True, which="both", color="0.9")
        axes.legend()
    return figure


if __name__ == "__main__":
    main()
