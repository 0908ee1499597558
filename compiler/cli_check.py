"""The command of `octavo` that checks a model by its configuration, without weights, and plans its ranks."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.compiler.cli_app import Json, MaxModelLen, PageSize, Trace, exit_codes, starting
from octavo.compiler.cli_precision import KV, Keep, Quantize, config_of
from octavo.compiler.options import parallel_of


def check(
    config: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="A config.json of Hugging Face, its directory, or a model type (deepseek_v3).",
        ),
    ],
    target: Annotated[str, typer.Option(help="A machine; `octavo targets` lists them.")] = "b200",
    parallel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZES",
            help="Plan the ranks of ep=N,tp=N,dp=N,redundant_experts=N,wire=FORMAT; may be given again.",
        ),
    ] = None,
    quantize: Quantize = None,
    kv: KV = None,
    keep: Keep = None,
    page_size: PageSize = None,
    max_model_len: MaxModelLen = None,
    max_batch_tokens: Annotated[int, typer.Option(help="Most tokens of one step of a rank.")] = 2048,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the plans: .svg or .png.")] = None,
    as_json: Json = False,
    traceback: Trace = False,
) -> None:
    """Check that a model of CONFIG would compile, without its weights, and plan what ranks hold and send.

    Example: octavo check deepseek_v3 --max-model-len 4096

    Example: octavo check deepseek_v3 --quantize nvfp4 --kv fp8 --parallel ep=8,dp=8,wire=nvfp4 --parallel
    ep=72,dp=72,redundant_experts=32,wire=nvfp4 --plot plan.png

    Capture, passes and proofs are those of `octavo compile`. Each --parallel is a column of a table: weights of a rank
    by kind, the workspace of its largest step, bytes of keys and values for each token and how many tokens fit beside
    them, and for every kind of collective how often it runs and what it sends. All are counted in the program that a
    rank would run. Rows sent: tokens choose uniformly among the experts that their router allows.
    """
    precision = config_of(quantize, kv, None, None, None, keep, None)
    with exit_codes(traceback), starting(show=True):
        from octavo.compiler.commands.check import Choices, run
    with exit_codes(traceback):
        parallels = tuple(parallel_of(text) for text in parallel or ())
        choices = Choices(config, target, page_size, max_model_len, max_batch_tokens, precision, parallels)
        run(choices, as_json, plot)
