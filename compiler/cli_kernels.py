"""The commands of `octavo` about GPU kernels: what was built, what can be built, what a device makes of it."""

from octavo.compiler.cli_app import ArtifactPath, Json, Trace, exit_codes, starting


def kernels(artifact: ArtifactPath, as_json: Json = False, traceback: Trace = False) -> None:
    """Show the kernels of ARTIFACT: registers, memory, instructions.

    Example: octavo kernels smol-b200.octavo

    GPUs: registers a thread, spilled bytes, bytes of shared memory, columns of tensor memory, warps,
    instructions; below each kernel, when it runs and how many of the instructions that matter it holds.
    --json has the whole census. CPU: bytes and FLOPs of a step, in T tokens, L logit rows, S attended pairs.
    """
    with exit_codes(traceback), starting():
        from octavo.compiler.commands.inspect import show_kernels
    with exit_codes(traceback):
        show_kernels(artifact, as_json)
