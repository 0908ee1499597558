"""What equal layers cost: compile one small Llama with 2, 8, 32 and 80 layers, by phase.

python benchmarks/bench_layers.py --runs 3

Passes, proofs and kernels see few of many equal layers, so their time should hardly grow. Capture runs the model's
own Python once for every layer; packing writes every layer's weights; verifying runs every layer.
"""

import argparse
import os
import tempfile
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import octavo
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, titled

PHASES = ("capture", "passes", "proofs", "kernels", "pack", "verify")
STEADY = ("passes", "proofs", "kernels")


def model_of(num_layers: int) -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=704, num_hidden_layers=num_layers,
        num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=256,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config).eval()
    return model


def measure(num_layers: int) -> dict[str, float]:
    """Seconds of each phase; the C++ cache is empty."""
    model = model_of(num_layers)
    with tempfile.TemporaryDirectory() as cache:
        os.environ["OCTAVO_CACHE"] = cache
        compiled = octavo.compile(model, progress=False)
    seconds = dict(compiled.seconds)
    seconds["proofs"] = compiled.report().data["proof_s"]
    seconds["passes"] -= seconds["proofs"]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 8, 32, 80], help="default: 2 8 32 80")
    parser.add_argument("--runs", type=int, default=3, help="interleaved (default: 3)")
    options = parser.parse_args()
    measure(2)  # imports and first calls
    results: dict[int, list[dict[str, float]]] = {n: [] for n in options.layers}
    with progress_bars() as bars:
        report = bars("compile")
        for run in range(options.runs):
            for index, layers in enumerate(options.layers):
                report(
                    f"{layers} layers", run * len(options.layers) + index, options.runs * len(options.layers)
                )
                results[layers].append(measure(layers))
    show(results, options.runs)


def show(results: dict[int, list[dict[str, float]]], runs: int) -> None:
    table = plain_table("layers", *PHASES, "passes to kernels", "spread", left=("layers",))
    for layers, rows in results.items():
        steady = [sum(row.get(name, 0.0) for name in STEADY) for row in rows]
        cells: list[Any] = [f"{median(row.get(name, 0.0) for row in rows):.2f}" for name in PHASES]
        table.add_row(str(layers), *cells, f"{median(steady):.2f}", f"{min(steady):.2f}-{max(steady):.2f}")
    first, last = (median(sum(r.get(n, 0.0) for n in STEADY) for r in rows) for rows in (
        results[min(results)], results[max(results)]
    ))  # fmt: skip
    Console(highlight=False).print(titled(f"seconds, medians of {runs} runs, {os.cpu_count()} cores", table))
    print(f"passes to kernels: {max(results)} layers cost {last / first:.2f} times {min(results)} layers")


if __name__ == "__main__":
    main()
