"""The command of `octavo` that converts a checkpoint into a quantised one."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from octavo.compiler.cli_app import Trace, exit_codes, starting
from octavo.compiler.cli_precision import Keep


class Layouts(StrEnum):
    modelopt = "modelopt"
    compressed_tensors = "compressed-tensors"


class Methods(StrEnum):
    nearest = "nearest"
    search = "search"


def quantize(
    source: Annotated[
        Path, typer.Argument(metavar="SRC", help="A Hugging Face directory in bf16, fp16 or fp32.")
    ],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="The directory to write; not there yet.")
    ],
    layout: Annotated[
        Layouts, typer.Option("--format", help="The names and configuration that an engine expects.")
    ] = Layouts.modelopt,
    weights: Annotated[
        Methods,
        typer.Option(help="nearest: scales that carry the largest element; search: scales of least error."),
    ] = Methods.search,
    keep: Keep = None,
    traceback: Trace = False,
) -> None:
    """Quantise the weights of SRC to NVFP4; print DST.

    Example: octavo quantize models/llama-70b models/llama-70b-nvfp4 --format compressed-tensors

    Example: octavo quantize llama llama-nvfp4 --keep 'model.layers.0.*' --keep '*.o_proj'

    Tensors are read, quantised and written one after another, so a model larger than memory is converted too.
    Products that read one input (q, k, v; gate, up) share one outer scale. Logits, embeddings, routers, norms and
    draft heads stay as they are, and so do inputs: DST has NVFP4 weights and 16-bit activations. Engines that
    read either layout load it. DST appears when it is complete.
    """
    with exit_codes(traceback), starting(show=True):
        from octavo.compiler.commands.quantize import run
    with exit_codes(traceback):
        run(source, destination, layout.value, weights.value, keep or ())
