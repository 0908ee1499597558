"""Check a model of full size on the meta device: seconds of capture, passes and proofs, and the peak of memory.

python benchmarks/bench_full_size.py                       DeepSeek-V3: 61 layers, 256 experts, 671 billion weights
python benchmarks/bench_full_size.py --model-type llama --set num_hidden_layers=80 hidden_size=8192
"""

import argparse
import json
import os
import resource
import time

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import octavo


def main() -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-type", default="deepseek_v3", help="of transformers (default: deepseek_v3)")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="NAME=JSON", help="changes to its configuration"
    )
    parser.add_argument(
        "--max-model-len", type=int, default=4096, help="rows of position tables (default: 4096)"
    )
    options = parser.parse_args()
    changes = {name: json.loads(value) for name, _, value in (item.partition("=") for item in options.set)}
    config = CONFIG_MAPPING[options.model_type](**changes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    began = time.perf_counter()
    report = octavo.check(model, max_model_len=options.max_model_len)
    spent = time.perf_counter() - began
    console = Console(highlight=False)
    console.print(report.pass_table())
    weights = sum(p.numel() for p in model.parameters())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in report.data["seconds"].items())
    print(
        f"{options.model_type}: {report.data['num_layers']} layers, {weights / 1e9:.1f} billion weights, checked in "
        f"{spent:.1f} s ({parts}, of these proofs {report.data['proof_s']:.1f} s); peak memory {peak:.2f} GiB, "
        f"{os.cpu_count()} cores"
    )


if __name__ == "__main__":
    main()
