"""Program + kernels -> one C++ translation unit -> shared library, for the cpp family."""

import re
from collections.abc import Iterable
from pathlib import Path

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.render import render, render_template
from octavo.compiler.host import build_shared_library
from octavo.compiler.program import DIMS, Buffer, Program, Step
from octavo.compiler.version import VERSION


def program_source(program: Program, specs: Iterable[KernelSpec]) -> str:
    """The text of a program: every distinct kernel once, then `octavo_step`, which calls those of a segment in order.

    specs   at least those that the program's steps name, in any order, repeats allowed
    """
    known = {spec.name: spec for spec in specs}
    used = {step.kernel: known[step.kernel] for step in program.steps if not step.axis}
    symbols = _symbols(program.buffers)
    given = [buffer for buffer in program.buffers if buffer.kind != "workspace"]
    return render_template(
        "cpp/program.cpp.jinja",
        version=VERSION,
        dims=DIMS,
        kernels=[render(spec) for spec in used.values()],
        buffers=[_describe(buffer, symbols) for buffer in given],
        segments=[_calls(steps, program.buffers, symbols) for steps in program.segments],
        workspace=program.workspace,
    )


def build_program(
    program: Program, specs: Iterable[KernelSpec], features: str, cache_dir: Path | None = None
) -> Path:
    """The shared library of a program for one of compiler.host.LEVELS; built once per text and compiler."""
    return build_shared_library(program_source(program, specs), features, cache_dir)


def _calls(
    steps: Iterable[Step], buffers: Iterable[Buffer], symbols: dict[str, str]
) -> list[dict[str, object]]:
    """Each step of a segment with the workspace buffers that it is the first to name."""
    seen: set[str] = set()
    by_name = {buffer.name: buffer for buffer in buffers}
    calls: list[dict[str, object]] = []
    for step in steps:
        new = [by_name[a] for a in step.args if isinstance(a, str) and a in by_name and a not in seen]
        new = [buffer for buffer in dict.fromkeys(new) if buffer.kind == "workspace"]
        seen.update(buffer.name for buffer in new)
        args = [symbols.get(arg, _in_cpp(arg)) if isinstance(arg, str) else arg for arg in step.args]
        described = [_describe(buffer, symbols) for buffer in new]
        calls.append(
            {"kernel": step.kernel, "args": args, "new_buffers": described, "when": _in_cpp(step.when)}
        )
    return calls


def _describe(buffer: Buffer, symbols: dict[str, str]) -> dict[str, object]:
    shape = ", ".join(map(str, buffer.shape))
    return {
        "symbol": symbols[buffer.name],
        "dtype": buffer.dtype,
        "offset": _in_cpp(str(buffer.offset)),
        "note": f"{buffer.kind} {buffer.name} ({shape})",
    }


def _in_cpp(expression: str) -> str:
    """An expression or condition on sizes, which are never negative, as C++ spells it."""
    return expression.replace("//", "/")


def _symbols(buffers: Iterable[Buffer]) -> dict[str, str]:
    """A C++ name for each buffer, close to its own and different from all others."""
    symbols: dict[str, str] = {}
    taken: set[str] = set(DIMS)
    for buffer in buffers:
        stem = re.sub(r"\W", "_", f"{buffer.kind[0]}_{buffer.name}")
        number = 0
        while (symbol := f"{stem}_{number}" if number else stem) in taken:
            number += 1
        taken.add(symbol)
        symbols[buffer.name] = symbol
    return symbols
