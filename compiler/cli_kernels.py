"""The commands of `octavo` about GPU kernels: what was built, what can be built, what a device makes of it."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.compiler.cli_app import FAILED, ArtifactPath, Json, Trace, exit_codes, starting


def kernels(
    artifact: Annotated[
        Path | None, typer.Argument(metavar="[ARTIFACT]", help="A directory that `compile` wrote.")
    ] = None,
    as_json: Json = False,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="Times of a step of these sizes; may be given again."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw every kernel under its roofs: .svg or .png.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Build every corner of every template; exit 1 if one fails.")
    ] = False,
    only: Annotated[str, typer.Option(metavar="WORD", help="--check: corners with this in the name.")] = "",
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Build llama-3-8b, deepseek-v3 or gpt-oss-20b's.")
    ] = None,
    precision: Annotated[str, typer.Option(help="--model: bf16, fp8 or nvfp4.")] = "bf16",
    target: Annotated[
        list[str] | None,
        typer.Option(help="--check, --model: a GPU; --check takes several and has all archs without."),
    ] = None,
    traceback: Trace = False,
) -> None:
    """Show the kernels of ARTIFACT, or build those of a model or all.

    Example: octavo kernels smol-b200.octavo --at T=1,S=8192 --plot roofline.svg

    Example: octavo kernels --check --only nvfp4 --target b200

    Example: octavo kernels --model llama-3-8b --precision nvfp4 --target b200

    ARTIFACT for a GPU: registers a thread, spilled bytes, bytes of shared memory, columns of tensor memory, warps,
    and how many programs fit on a multiprocessor; then the time of steps, kernel by kernel, by a static model of
    the machine code. It ranks kernels well and says how near they come to what bandwidth and tensor core allow; it
    is no measurement. SIZES: T tokens, R requests (1), S context tokens of all requests (T), L logit rows (R).
    --json has the whole census, all loops and all points. ARTIFACT for a CPU: bytes and FLOPs of a step.
    """
    ways = [artifact is not None, check, model is not None]
    if sum(ways) != 1:
        raise typer.BadParameter("expected one of ARTIFACT, --check and --model NAME", param_hint="ARTIFACT")
    if artifact is not None:
        with exit_codes(traceback), starting():
            from octavo.compiler.commands.kernels import show_kernels
        with exit_codes(traceback):
            show_kernels(artifact, as_json, at or (), plot)
    elif model is not None:
        with exit_codes(traceback), starting():
            from octavo.compiler.commands.model_kernels import build_model
        with exit_codes(traceback):
            build_model(model, precision, (target or ["b200"])[0], as_json)
    else:
        with exit_codes(traceback), starting():
            from octavo.compiler.commands.check_kernels import check as check_kernels
        with exit_codes(traceback):
            if not check_kernels(target or (), only, as_json):
                raise typer.Exit(FAILED)


def tune(artifact: ArtifactPath, as_json: Json = False, traceback: Trace = False) -> None:
    """Measure on this machine: forms of kernels on a GPU, times of steps on a processor.

    Example: octavo tune smol-b200.octavo

    Example: octavo tune smol-cpu.octavo && octavo run smol-cpu.octavo PROMPT --speculate suffix

    On a processor, steps of 1 to 32 tokens are timed and the times written into ARTIFACT: speculation then knows from
    its first step on how many drafted tokens pay. For a GPU a build predicts them.

    A build makes several forms of some kernels and chooses by a static model. On a machine with the GPU that ARTIFACT
    is for, each is timed at steps where it is launched, from a cold L2 cache. The artifact is written anew with the
    fastest forms, the times, and the device's name, clocks and driver. Neither torch nor Triton is needed.
    """
    with exit_codes(traceback), starting():
        from octavo.compiler.commands.tune import run
    with exit_codes(traceback):
        run(artifact, as_json)
