"""Greedy answers with drafts of every kind, token by token beside plain decoding: how many were compared and differ.

    python benchmarks/check_speculated_tokens.py --tokens 10000 --dtypes fp32 bf16

A small model of a chosen architecture with random weights; four unequal prompts at once. bf16 is compiled with
deterministic=True. Proposers: n-grams, suffixes as chains and as trees, another model, the model itself in NVFP4 and
without a layer, EAGLE and Medusa heads with random weights, and drafts that are wrong on purpose.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.compiler import api
from octavo.compiler.artifact import Artifact
from octavo.compiler.calibration_data import Calibration
from octavo.compiler.drafts.eagle import EagleHead
from octavo.compiler.drafts.layer_skip import without_layers
from octavo.compiler.drafts.medusa import MedusaHeads
from octavo.compiler.options import QuantConfig
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import plain_table, titled
from octavo.runtime.engine import Engine
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.speculative.options import Speculate

VOCAB, PROMPT_LENGTHS, ANSWER = 256, (3, 17, 40, 1), 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, default=10_000, help="of each proposer and dtype (default: 10000)"
    )
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--length", type=int, default=4, help="drafted tokens of a round (default: 4)")
    options = parser.parse_args()
    table = plain_table("dtype", "proposer", "tokens", "differ", "tokens a round", left=("dtype", "proposer"))
    num_differing = 0
    with tempfile.TemporaryDirectory() as folder, progress_bars() as bars:
        for dtype in options.dtypes:
            target, methods = build(Path(folder) / dtype, dtype, options.length)
            wanted: dict[int, list[tuple[int, ...]]] = {}
            for name, method in methods:
                compared, differing, emitted = compare(
                    target, method, options.tokens, wanted, bars(f"{dtype} {name}")
                )
                num_differing += differing
                table.add_row(dtype, name, str(compared), str(differing), f"{emitted:.2f}")
    Console(highlight=False).print(titled("greedy answers of four unequal prompts at once", table))
    sys.exit(num_differing > 0)


def model(seed: int) -> Any:
    """A small Llama with weights large enough that tokens are not near ties."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.08, eos_token_id=None,
    )  # fmt: skip
    made = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        made.lm_head.weight.mul_(4.0)
    return made


def build(folder: Path, dtype: str, length: int) -> tuple[Artifact, list[tuple[str, Speculate]]]:
    """The target and what drafts for it."""
    target = model(0)
    common: dict[str, Any] = {"dtype": dtype, "verify": "off", "deterministic": True}
    text: Calibration = [torch.randint(0, VOCAB, (256,)).tolist()]
    made = {
        "model": api.compile(model(1), output=folder / "model", **common),
        "nvfp4": api.compile(
            target, output=folder / "nvfp4", quantize=QuantConfig(), calibration=text, **common
        ),
        "layers": api.compile(without_layers(target, [2]), output=folder / "layers", **common),
        "eagle": api.compile(EagleHead.for_target(target, None), output=folder / "eagle", **common),
        "medusa": api.compile(MedusaHeads.for_target(target, 4, None), output=folder / "medusa", **common),
    }
    plain = api.compile(target, output=folder / "target", features=(-1,), trees=True, **common)
    paths = {name: one.path for name, one in made.items()}
    methods = [
        ("ngram", Speculate("ngram", length=length)),
        ("suffix tree", Speculate("suffix", length=2 * length)),
        ("suffix, as it pays", Speculate("suffix")),
        ("another model", Speculate("draft", paths["model"], length)),
        ("itself in NVFP4", Speculate("self", paths["nvfp4"], length)),
        ("itself without a layer", Speculate("self", paths["layers"], length)),
        ("EAGLE head", Speculate("draft", paths["eagle"], length)),
        ("Medusa heads", Speculate("draft", paths["medusa"], length)),
    ]
    return plain.artifact, methods


def compare(
    target: Artifact, method: Speculate, num_tokens: int, wanted: dict[int, list[tuple[int, ...]]], progress: Any
) -> tuple[int, int, float]:  # fmt: skip
    """Tokens that were compared, that differ, and tokens a round. wanted: plain answers by batch, once known.

    One thread: two would wait for each other where other work runs beside them.
    """
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True)
    drafted = Engine.from_artifact(
        target, speculate=method, use_tokenizer=False, num_pages=200, num_threads=1
    )
    plain = Engine.from_artifact(target, use_tokenizer=False, num_pages=200, num_threads=1)
    compared = differing = 0
    for batch, prompts in enumerate(batches()):
        progress("tokens", compared, num_tokens)
        if compared >= num_tokens:
            break
        if batch not in wanted:
            wanted[batch] = [answer.token_ids for answer in plain.generate(prompts, params)]
        for own, other in zip(drafted.generate(prompts, params), wanted[batch], strict=True):
            compared += len(other)
            differing += sum(a != b for a, b in zip(own.token_ids, other, strict=True))
    assert drafted.speculator is not None
    return compared, differing, drafted.speculator.figures.mean_emitted


def batches() -> Iterator[list[list[int]]]:
    generator = np.random.default_rng(0)
    while True:
        yield [generator.integers(0, VOCAB, length).tolist() for length in PROMPT_LENGTHS]


if __name__ == "__main__":
    main()
