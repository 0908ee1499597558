"""The command `octavo`: options, help and exit codes. The work of each command is in compiler/commands.

Standard output carries results only, so that it can be piped; tables, bars and errors go to standard error.
Commands import their work when they run: help and `inspect` must not wait for torch.
"""

import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from octavo.compiler import (
    cli_balance,
    cli_check,
    cli_drafts,
    cli_kernels,
    cli_precision,
    cli_quantize,
    cli_train,
)
from octavo.compiler.cli_app import (
    FAILED,
    MODEL_HELP,
    ArtifactPath,
    Deterministic,
    Dispatcher,
    DraftLength,
    DTypeOption,
    Dump,
    DumpWeights,
    Json,
    Machine,
    MaxBatchTokens,
    MaxModelLen,
    Model,
    Output,
    PageSize,
    Proofs,
    Ranks,
    ResumeFrom,
    SpeculateOption,
    Stats,
    Trace,
    Trees,
    Verify,
    exit_codes,
    starting,
)
from octavo.compiler.cli_app import (
    app as app,
)
from octavo.compiler.errors import OptionError
from octavo.compiler.options import parallel_of


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the console script; ends the process with the exit codes above."""
    warnings.showwarning = _show_warning
    app(arguments, prog_name="octavo")


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object, **__: object
) -> None:
    print(f"octavo: warning: {message}", file=sys.stderr)


@app.command()
def compile(
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = None,
    output: Output = None,
    target: Machine = None,
    dtype: DTypeOption = None,
    page_size: PageSize = None,
    max_model_len: MaxModelLen = None,
    max_batch_tokens: MaxBatchTokens = None,
    quantize: cli_precision.Quantize = None,
    kv: cli_precision.KV = None,
    weights: cli_precision.Weights = None,
    bits: cli_precision.Bits = None,
    calibration: cli_precision.Calibration = None,
    keep: cli_precision.Keep = None,
    include: cli_precision.Include = None,
    carve: cli_precision.Carve = None,
    parallel: Ranks = None,
    trees: Trees = None,
    features: cli_drafts.Features = None,
    draft_of: cli_drafts.DraftOf = None,
    skip_layers: cli_drafts.SkipLayers = None,
    verify: Verify = Proofs.full,
    deterministic: Deterministic = None,
    dump: Dump = None,
    dump_weights: DumpWeights = True,
    resume_from: ResumeFrom = None,
    traceback: Trace = False,
) -> None:
    """Compile MODEL into an artifact; print the artifact's path.

    Example: octavo compile demo --dtype bf16 -o smol.octavo --dump dumps

    Example: octavo compile demo --quantize auto --bits 5 --kv fp8 --calibration chats.txt

    Example: octavo compile DIR --parallel ep=4,dp=2; torchrun --nproc-per-node 4 -m octavo run ARTIFACT PROMPT

    Example: octavo compile demo --features -1; octavo compile HEAD_DIR --draft-of demo

    Example: $EDITOR dumps/09_fuse_rms_norm.py; octavo compile --from dumps/09_fuse_rms_norm.py

    --from runs, checks and proves the passes behind the one that the file is named after, on the graph as the file
    has it. Weights, dtype, page size, lengths and quantisation are the dump's. `octavo view` shows a dump.

    What is quantised first reads some thousand tokens of calibration text. Logits, routers, norms and embeddings stay
    as they are, unless --include names their modules. The table of passes tells why others stayed. A directory of
    quantised weights (ModelOpt, compressed-tensors, MXFP4) keeps its codes and scales; it needs no option and no text.

    Tables of passes and kernels and the time of each phase go to standard error. An artifact at the path is replaced;
    anything else there is left alone.
    """
    if (model is None) == (resume_from is None):
        got = "both" if model else "neither"
        raise typer.BadParameter(f"expected MODEL or --from FILE, got {got}", param_hint="MODEL")
    text = None if carve else calibration  # which carving reads too
    config = cli_precision.config_of(quantize, kv, weights, bits, text, keep, include)
    with exit_codes(traceback), starting(show=True):
        from octavo.compiler.commands.compile import Choices, run
    with exit_codes(traceback):
        choices = Choices(
            model=model, output=output, target=target, dtype=None if dtype is None else dtype.value,
            page_size=page_size, max_model_len=max_model_len, max_batch_tokens=max_batch_tokens,
            verify=verify.value, dump=dump, dump_weights=dump_weights, resume_from=resume_from, quantize=config,
            calibration=calibration, deterministic=deterministic, carve=carve, trees=trees, draft_of=draft_of,
            parallel=None if parallel is None else parallel_of(parallel),
            features=None if features is None else features.numbers,
            skip_layers=None if skip_layers is None else skip_layers.numbers,
        )  # fmt: skip
        run(choices)


@app.command()
def run(
    artifact: ArtifactPath,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Default: standard input if piped, else a dialogue."),
    ] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Use the model's chat template, or not. Default: if there is one."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message of the chat.")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A prompt a line, in one batch; a JSON object a line comes out."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the most probable tokens that reach p together.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens of at least p times the best's share.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same tokens.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given again.")] = None,
    n: Annotated[int, typer.Option("--n", help="Answers; they share the prompt's pages.")] = 1,
    beam_width: Annotated[
        int | None, typer.Option(help="Search with so many beams; with a temperature, sample them.")
    ] = None,
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1: tokens that were there become less likely, as in Hugging Face.")
    ] = 1.0,
    json_schema: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer is JSON that this schema accepts.")
    ] = None,
    regex: Annotated[str | None, typer.Option(help="The whole answer matches this expression.")] = None,
    dispatcher: Dispatcher = None,
    speculate: SpeculateOption = None,
    draft_length: DraftLength = None,
    stats: Stats = False,
    traceback: Trace = False,
) -> None:
    """Generate text with ARTIFACT, as it comes.

    Example: octavo run smol.octavo "Why is the sky blue?" --max-tokens 100 --temperature 0.7 --seed 1

    Example: git diff | octavo run smol.octavo --system "Summarize this change." --stats

    Example: octavo run smol.octavo "Is the sky blue?" --regex "yes|no"

    Example: octavo run smol.octavo "Name a color." --n 3 --temperature 1

    Example: octavo run smol.octavo "Fix the typos: ..." --speculate suffix --stats

    Example: octavo run smol.octavo "Tell me a story." --speculate draft=smol-eagle.octavo --stats

    Example: torchrun --nproc-per-node 4 -m octavo run mixtral.octavo --prompts-file prompts.txt

    --speculate changes speed, never what answers are likely: ngram and suffix draft what followed the same tokens
    before; draft= is a smaller model or a trained head, with a vocabulary of the same tokens; self= is the same model
    compiled with fewer bits or layers. Greedy answers, and those with a --seed, are the same tokens with and without.

    An artifact that was compiled for several ranks runs on as many processes; torchrun starts them. Prompts are dealt
    to groups of ranks that serve requests of their own (dp), and rank 0 prints all answers. A rank that is killed or
    stopped ends the others, with an error that names it.

    Without a tokenizer in the artifact, prompts are token ids ("12 7 99") and so is the answer. In a
    dialogue, Ctrl-C ends an answer and Ctrl-D the dialogue.
    """
    with exit_codes(traceback), starting():
        from octavo.compiler.commands.run import Choices, read_structured, run
        from octavo.runtime.sampling_params import SamplingParams
        from octavo.runtime.speculative.options import speculate_of
    with exit_codes(traceback):
        if draft_length is not None and speculate is None:
            raise OptionError(f"draft-length: expected --speculate beside it, got {draft_length} alone")
        drafting = None if speculate is None else speculate_of(speculate, draft_length)
        params = SamplingParams(
            max_tokens, temperature, top_k, top_p, min_p, seed, stop=tuple(stop or ()), n=n, beam_width=beam_width,
            repetition_penalty=repetition_penalty, structured=read_structured(json_schema, regex),
        )  # fmt: skip
        run(Choices(artifact, prompt, prompts_file, chat, system, params, stats, dispatcher, drafting))


@app.command()
def inspect(
    artifact: ArtifactPath,
    as_json: Json = False,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw bits and error of every product by layer: .svg or .png."),
    ] = None,
    traceback: Trace = False,
) -> None:
    """Show what is in ARTIFACT; check every file.

    Example: octavo inspect smol.octavo --json | jq .model

    Example: octavo inspect smol-auto.octavo --plot formats.png

    Of a quantised one: the format of every product, what it loses alone, and how far all together move the logits.
    """
    with exit_codes(traceback), starting():
        from octavo.compiler.commands.inspect import show_artifact
    with exit_codes(traceback):
        show_artifact(artifact, as_json, plot)


app.command()(cli_balance.balance)
app.command()(cli_check.check)
app.command()(cli_kernels.kernels)
app.command()(cli_kernels.tune)
app.command()(cli_quantize.quantize)
app.command()(cli_train.train_draft)


@app.command()
def bisect(
    model: Model,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="Where a reproducer is written.")
    ] = Path("octavo-bisect"),
    dtype: DTypeOption = None,
    page_size: PageSize = None,
    max_model_len: MaxModelLen = None,
    traceback: Trace = False,
) -> None:
    """Find the first pass that changes what MODEL computes.

    Example: octavo bisect my_model.py:build -o found && echo "every pass is right"

    Runs the graph after every pass against the model's own logits, then proves the rewrites of the first pass
    that differs. Exits 1 if there is one, and writes a program to DIR that shows the difference without the
    model.
    """
    with exit_codes(traceback), starting(show=True):
        from octavo.compiler.commands.bisect import run
    with exit_codes(traceback):
        is_clean = run(model, output, None if dtype is None else dtype.value, page_size, max_model_len)
        if not is_clean:
            raise typer.Exit(FAILED)


@app.command()
def view(
    dump: Annotated[Path, typer.Argument(metavar="DIR", help="What `octavo compile --dump DIR` wrote.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Default: DIR/view.html")
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
    traceback: Trace = False,
) -> None:
    """Make one HTML page of the dump in DIR; print its path.

    Example: octavo compile demo --dump dumps && octavo view dumps --open

    The page needs no network. It lists every pass with its rewrites, refusals, proof and time; shows what a pass
    changed, side by side, with the module and the source line that each operation comes from; draws the graph of
    one layer; and searches names, ops, modules and lines. Keys: j and k choose a pass, / searches, n and N go to
    the next match, ? lists the others.
    """
    with exit_codes(traceback), starting():
        from octavo.compiler.commands.view import run
    with exit_codes(traceback):
        run(dump, output, open_it)


@app.command()
def targets(as_json: Json = False, traceback: Trace = False) -> None:
    """List the machines that can be compiled for.

    Example: octavo targets
    """
    with exit_codes(traceback), starting():
        from octavo.compiler.commands.targets import show_targets
    with exit_codes(traceback):
        show_targets(as_json)


if __name__ == "__main__":
    main()
