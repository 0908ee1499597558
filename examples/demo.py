"""What `make demo` runs: compile SmolLM2-135M for the CPU, answer a prompt, compile it for a B200.

    python examples/demo.py --prompt "Why is the sky blue?" --folder demo

Everything that is written goes below the folder: an artifact for each target, and the graph after every pass.
"""

import argparse
import time
from pathlib import Path

from rich.console import Console

import octavo
from octavo.compiler.models import LoadedModel, load_model
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import seconds_line, size_text

PROMPT = "What is the capital of France, and what is it known for?"
console = Console(highlight=False)


def main() -> None:
    options = parse()
    folder: Path = options.folder
    headline(f"loading {'SmolLM2-135M-Instruct' if options.model == 'demo' else options.model}")
    with progress_bars() as bars:
        loaded = load_model(options.model, bars("load"))
    print(f"{parameters(loaded):.1f} million parameters in {bars.seconds['load']:.1f} s")
    for index, target in enumerate(options.targets):
        headline(f"compiling for {target}")
        compiled = octavo.compile(
            loaded.model,
            target,
            dtype="bf16",  # also on CPUs without bf16 arithmetic: half the bytes to read for each token
            tokenizer=loaded.tokenizer,
            output=folder / f"{target}.octavo",
            dump=folder / f"dumps-{target}",
        )
        if index == 0:
            console.print(compiled.report().pass_table())
        if target != "cpu":
            console.print(compiled.report().kernel_table())
        print(f"{seconds_line(compiled.seconds)}")
        if target == "cpu":
            headline("answering")
            answer(compiled, options.prompt, options.max_tokens)
    where(folder, options.targets)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Compile a model for the CPU, answer a prompt, compile for a B200."
    )
    parser.add_argument(
        "--model", default="demo", help="as `octavo compile` takes it (default: SmolLM2-135M-Instruct)"
    )
    parser.add_argument("--prompt", default=PROMPT, help="the user's message")
    parser.add_argument("--max-tokens", type=int, default=80, help="most tokens of the answer (default: 80)")
    parser.add_argument("--targets", nargs="+", default=["cpu", "b200"], help="default: cpu b200")
    parser.add_argument(
        "--folder", type=Path, default=Path("demo"), help="where everything goes (default: demo)"
    )
    return parser.parse_args()


def headline(text: str) -> None:
    console.print(f"\n== {text}", style="bold")


def parameters(loaded: LoadedModel) -> float:
    return sum(parameter.numel() for parameter in loaded.model.parameters()) / 1e6


def answer(compiled: octavo.Compiled, prompt: str, max_tokens: int) -> None:
    """Stream the answer, then say how fast it came."""
    tokens = compiled.chat_prompt([{"role": "user", "content": prompt}])
    print(f"> {prompt}", flush=True)
    began = time.perf_counter()
    times = []
    for token in compiled.stream([tokens], octavo.SamplingParams(max_tokens=max_tokens)):
        print(token.text, end="", flush=True)
        times.append(time.perf_counter())
    rate = f", then {(len(times) - 1) / (times[-1] - times[0]):.1f} tokens/s" if len(times) > 1 else ""
    print(f"\n({len(tokens)} prompt tokens, first token after {times[0] - began:.2f} s{rate})")


def where(folder: Path, targets: list[str]) -> None:
    """What can be looked at now."""
    headline("written")
    for target in targets:
        artifact = folder / f"{target}.octavo"
        size = sum(file.stat().st_size for file in artifact.rglob("*") if file.is_file())
        print(f"{artifact}  {size_text(size)}, `octavo inspect` and `octavo kernels` read it")
        print(f"{folder / f'dumps-{target}'}  the graph after every pass, diffs, summary.txt")
    if "cpu" in targets:
        print(f'\nnext: octavo run {folder / "cpu.octavo"} "Why is the sky blue?"')


if __name__ == "__main__":
    main()
