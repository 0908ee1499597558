"""What all commands of `octavo` share: the app, options, exit codes, and a start that can be interrupted."""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from octavo.compiler.errors import (
    CodegenError,
    ExecutionError,
    IllegalGraphError,
    OctavoError,
    PassError,
    ToolchainError,
)
from octavo.compiler.version import VERSION

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
# What went wrong lies in Octavo's own work, not in what the user gave it.
OWN_FAILURES = (PassError, IllegalGraphError, CodegenError, ExecutionError)

HELP = """
Compile language models and run them.

Results go to standard output, everything else to standard error.

Exit codes: 0 success; 1 a proof, a build or a step failed, or `bisect` found something; 2 wrong usage or bad
input; 130 interrupted.

Start with: octavo compile demo && octavo run demo-cpu.octavo "Why is the sky blue?"
"""

app = typer.Typer(
    name="octavo",
    help=HELP,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic",
        help="On GPUs too, logits depend on no other request, bit for bit; steps of few tokens are slower.",
    ),
]
Trace = Annotated[bool, typer.Option("--traceback", help="Show where in Octavo an error was raised.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON with everything, instead of a table.")]
ArtifactPath = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="A directory that `compile` wrote.")]
MODEL_HELP = (
    "demo (SmolLM2-135M-Instruct), a Hugging Face directory, a .gguf file, or file.py:function that returns an "
    "nn.Module."
)
Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)]


class DTypes(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


class Proofs(StrEnum):
    off = "off"
    sites = "sites"
    full = "full"


Output = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="DIR", help="Default: ./NAME-TARGET.octavo")
]
Machine = Annotated[
    str | None, typer.Option(help="A machine; `octavo targets` lists them; auto: the one here. Default: cpu.")
]
MaxBatchTokens = Annotated[int | None, typer.Option(help="Most tokens of one step. Default: 2048.")]
DTypeOption = Annotated[
    DTypes | None, typer.Option(help="Of weights and activations. Default: the model's on cpu, bf16 on GPUs.")
]
PageSize = Annotated[
    int | None, typer.Option(help="Tokens of a KV page, a power of two. Default: the target's.")
]
Verify = Annotated[
    Proofs, typer.Option(help="sites: prove every rewrite; full: whole-model logits too; off: neither.")
]
Ranks = Annotated[
    str | None,
    typer.Option(
        metavar="SIZES",
        help="Spread over ranks: ep=N,tp=N,dp=N,redundant_experts=N,wire=FORMAT. `octavo check` plans them.",
    ),
]
Dispatcher = Annotated[
    str | None, typer.Option(help="Of several ranks: all_to_all, padded or all_gather. Default: all_to_all.")
]
Stats = Annotated[
    bool,
    typer.Option("--stats", help="Show pages, requests and tokens/s meanwhile, and print them at the end."),
]
SpeculateOption = Annotated[
    str | None,
    typer.Option(
        "--speculate",
        metavar="HOW",
        help="Draft tokens, verify several in a step: ngram, suffix, draft=ARTIFACT or self=ARTIFACT.",
    ),
]
Trees = Annotated[
    bool | None,
    typer.Option(
        "--trees", help="Steps may hold trees of drafts, which `run --speculate suffix` then makes."
    ),
]
DraftLength = Annotated[
    int | None,
    typer.Option(help="Drafted tokens of a round. Default: as many as pay, by times and acceptance so far."),
]
Dump = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="Write the graph after each pass that changed it, and weights."),
]
DumpWeights = Annotated[
    bool, typer.Option("--dump-weights/--no-dump-weights", help="--from needs them beside the graphs.")
]
ResumeFrom = Annotated[
    Path | None,
    typer.Option("--from", metavar="FILE", help="Go on from a graph of a dump, in place of MODEL."),
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest sequence in tokens. Default: the model's.")]


@contextmanager
def exit_codes(traceback: bool) -> Iterator[None]:
    """Errors of Octavo become a line and an exit code, an interrupt 130; bugs keep their traceback."""
    try:
        yield
        sys.stdout.flush()
    except OctavoError as error:
        if traceback:
            raise
        print(f"octavo: {type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(code_of(error)) from None
    except KeyboardInterrupt:
        print("octavo: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # The reader of a pipe went away, as `| head` does. Python must not try to flush into it again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILED) from None


def code_of(error: OctavoError) -> int:
    """A missing compiler is the user's to install, so 2 like any bad input."""
    return FAILED if isinstance(error, OWN_FAILURES) and not isinstance(error, ToolchainError) else USAGE


@contextmanager
def starting(show: bool = False) -> Iterator[None]:
    """Around the import of a command's work. show: with a bar, as torch takes seconds.

    An interrupt ends the process at once: libraries that are half imported fail in ways of their own when an
    exception passes through them, and there is nothing to clean up yet.
    """
    before = signal.signal(signal.SIGINT, _leave)
    try:
        if show:
            from octavo.compiler.progress import progress_bars

            with progress_bars() as bars:
                bars("start")("torch and the compiler", 0, 1)
                yield
        else:
            yield
    finally:
        signal.signal(signal.SIGINT, before)


def _leave(*_: object) -> None:
    clean = "\r\x1b[2K\x1b[?25h" if sys.stderr.isatty() else ""  # the bar goes, the cursor comes back
    os.write(2, f"{clean}octavo: interrupted\n".encode())
    os._exit(INTERRUPTED)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"octavo {VERSION}")
        raise typer.Exit


@app.callback()
def octavo(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    pass


octavo.__doc__ = HELP
