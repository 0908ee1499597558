"""The command of `octavo` that converts a checkpoint into a quantised one."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from octavo.compiler.cli_app import Trace, exit_codes, starting
from octavo.compiler.cli_precision import AUTO, KV, Bits, Calibration, Keep, Methods, Modes, Pages, config_of


class Layouts(StrEnum):
    modelopt = "modelopt"
    compressed_tensors = "compressed-tensors"


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
        typer.Option(
            help="nearest: scales of the largest elements; search: of least error; gptq: errors made up for."
        ),
    ] = Methods.search,
    to: Annotated[
        Modes,
        typer.Option(
            help="nvfp4: inputs of products too; fp8; auto: each layer's format by what it would lose."
        ),
    ] = Modes.nvfp4_weight_only,
    kv: KV = None,
    bits: Bits = None,
    calibration: Calibration = None,
    keep: Keep = None,
    traceback: Trace = False,
) -> None:
    """Quantise SRC to NVFP4 or FP8; print DST.

    Example: octavo quantize models/llama-70b models/llama-70b-nvfp4 --format compressed-tensors

    Example: octavo quantize llama llama-nvfp4 --keep 'model.layers.0.*' --keep '*.o_proj'

    Example: octavo quantize llama llama-w4a4 --to nvfp4 --weights gptq --kv fp8 --calibration chats.txt

    Tensors are read, quantised and written one after another, so a model larger than memory is converted too.
    Products that read one input (q, k, v; gate, up) share one outer scale. Logits, embeddings, routers, norms and
    draft heads stay as they are, and so do inputs: DST has NVFP4 weights and 16-bit activations. Engines that
    read either layout load it. DST appears when it is complete.

    --to nvfp4, fp8 and auto, --weights gptq and --kv compile the model for this machine's CPU, in memory, with
    calibration text; the artifact is proven and then written as a checkpoint, and `octavo compile DST` keeps its bytes.
    """
    if bits is not None and to not in AUTO:
        raise typer.BadParameter("expected --to auto beside it", param_hint="--bits")
    config = config_of(to, kv, weights, bits, calibration, keep, None)
    is_weight_only = to is Modes.nvfp4_weight_only and kv in (None, Pages.bf16)
    if is_weight_only and weights is not Methods.gptq and calibration is not None:
        raise typer.BadParameter(
            "expected --to nvfp4, fp8 or auto, or --weights gptq", param_hint="--calibration"
        )
    with exit_codes(traceback), starting(show=True):
        from octavo.compiler.commands.quantize import run, run_compiled
    with exit_codes(traceback):
        if is_weight_only and weights is not Methods.gptq:
            method: Literal["nearest", "search"] = "nearest" if weights is Methods.nearest else "search"
            run(source, destination, layout.value, method, keep or ())
        else:
            run_compiled(source, destination, layout.value, config, calibration)
