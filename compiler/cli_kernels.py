"""The commands of `octavo` about GPU kernels: what was built, what can be built, what a device makes of it."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.compiler.cli_app import ArtifactPath, Json, Trace, exit_codes, starting


def kernels(
    artifact: ArtifactPath,
    as_json: Json = False,
    at: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", help="Times of a step of these sizes; may be given again."),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw every kernel under its roofs: .svg or .png.")
    ] = None,
    traceback: Trace = False,
) -> None:
    """Show the kernels of ARTIFACT: registers, memory, instructions, time.

    Example: octavo kernels smol-b200.octavo --at T=1,S=8192 --plot roofline.svg

    GPUs: registers a thread, spilled bytes, bytes of shared memory, columns of tensor memory, warps, and how many
    programs fit on a multiprocessor; then the time of steps, kernel by kernel, by a static model of the machine
    code. It ranks kernels well and says how near they come to what bandwidth and tensor core allow; it is no
    measurement. SIZES: T tokens, R requests (1), S context tokens of all requests (T), L logit rows (R).
    --json has the whole census, all loops and all points. CPU: bytes and FLOPs of a step.
    """
    with exit_codes(traceback), starting():
        from octavo.compiler.commands.kernels import show_kernels
    with exit_codes(traceback):
        show_kernels(artifact, as_json, at or (), plot)
