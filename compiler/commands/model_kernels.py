"""`octavo kernels --model`: the kernels of a model of published sizes, built without it, and the time that takes."""

import json
import time

from rich.console import Console

from octavo.codegen.build_triton import build_kernels
from octavo.codegen.evidence import evidence_row
from octavo.codegen.kernel import Kernel
from octavo.codegen.model_shapes import PRECISIONS, SHAPES, kernel_set
from octavo.compiler.errors import OptionError
from octavo.compiler.progress import progress_bars
from octavo.compiler.report import kernel_table
from octavo.compiler.target import load_target


def build_model(name: str, precision: str, target_name: str, as_json: bool) -> None:
    """Build the set, once as the cache is and once from it, and print both times and the kernels."""
    if name not in SHAPES:
        raise OptionError(f"--model: expected one of {', '.join(SHAPES)}, got {name!r}")
    if precision not in PRECISIONS:
        raise OptionError(f"--precision: expected one of {', '.join(PRECISIONS)}, got {precision!r}")
    target = load_target(target_name)
    if target.family != "triton":
        raise OptionError(f"--target: expected a GPU, got {target_name}")
    started = time.perf_counter()
    specs = kernel_set(SHAPES[name], precision, target, target.page_size)
    with progress_bars() as bars:
        kernels = build_kernels(specs, target, bars("kernels"))
    built = time.perf_counter()
    build_kernels(kernel_set(SHAPES[name], precision, target, target.page_size), target)
    again = time.perf_counter()
    seconds = {"first_s": built - started, "again_s": again - built, "compile_s": compile_seconds(kernels)}
    rows = [evidence_row(kernel) for kernel in kernels]
    if as_json:
        print(
            json.dumps(
                {"model": name, "precision": precision, "target": target_name, **seconds, "kernels": rows}
            )
        )
        return
    Console(highlight=False).print(kernel_table(rows))
    print(
        f"{name} in {precision} for {target_name}: {len(kernels)} kernels in {seconds['first_s']:.1f} s, "
        f"from the cache in {seconds['again_s']:.2f} s (Triton took {seconds['compile_s']:.1f} s for those kept)"
    )


def compile_seconds(kernels: list[Kernel]) -> float:
    """What the compiles of the kernels took when they were made, one after the other."""
    return float(sum(kernel.metadata["evidence"]["compile_s"] for kernel in kernels))
