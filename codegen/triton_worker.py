"""Child process that compiles Triton sources to cubins, a JSON request per line; an abort here ends no build.

Started by build_triton as a script. It imports Triton and nothing of ours, so that no import path is needed.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import triton.knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(str(triton.__file__)).parent / "backends" / "nvidia" / "bin"
# cuTensorMapEncodeTiled numbers these data types in another order than Triton's device code
TENSOR_MAP_DTYPE = {8: 10, 9: 8, 10: 9}


def compile_kernel(request: dict[str, Any]) -> dict[str, Any]:
    """Compile request["source"] and leave kernel.cubin, kernel.ptx and kernel.sass in request["folder"].

    Returns the launch record and what ptxas tells of the binary.
    """
    folder = Path(request["folder"])
    function = _load(folder / "kernel.py", request["function"])
    count = len(request["types"])
    names = function.arg_names
    signature = dict(zip(names, request["types"] + ["constexpr"] * (len(names) - count), strict=True))
    attributes = {(index,): [["tt.divisibility", 16]] for index in request["divisible"]}
    source = ASTSource(fn=function, signature=signature, constexprs=request["constexprs"], attrs=attributes)
    log = io.StringIO()
    started = time.perf_counter()
    with contextlib.redirect_stdout(log):
        kernel = triton.compile(
            source, target=GPUTarget("cuda", request["arch"], 32), options=request["options"]
        )
    seconds = time.perf_counter() - started
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    (folder / "kernel.ptx").write_text(kernel.asm["ptx"])
    (folder / "kernel.sass").write_text(_run("nvdisasm", "-c", str(cubin)))
    return {
        "launch": _launch_record(kernel.metadata, names[:count], request["types"]),
        "evidence": _evidence(kernel.metadata, kernel.asm["ptx"], log.getvalue(), seconds),
    }


def _load(path: Path, function: str) -> Any:
    specification = importlib.util.spec_from_file_location(function, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return getattr(module, function)


def _launch_record(metadata: Any, names: list[str], types: list[str]) -> dict[str, Any]:
    """All that a launcher needs besides the cubin; num_warps includes those that warp specialisation adds."""
    parameters: list[dict[str, Any]] = []
    descriptors = iter(metadata.tensordesc_meta or ())
    for name, kind in zip(names, types, strict=True):
        if kind.startswith("tensordesc"):
            parameters.append(
                {"name": name, "kind": "descriptor", "type": kind, **_tensor_map(next(descriptors))}
            )
        elif kind.startswith("*"):
            parameters.append({"name": name, "kind": "pointer", "type": kind})
        else:
            parameters.append({"name": name, "kind": "scalar", "type": kind})
    return {
        "function": metadata.name,
        "num_warps": metadata.num_warps,
        "num_ctas": metadata.num_ctas,
        "shared_bytes": metadata.shared,
        "tmem_columns": getattr(metadata, "tmem_size", 0) or 0,
        "launch_pdl": bool(metadata.launch_pdl),
        "cooperative": bool(metadata.launch_cooperative_grid),
        "global_scratch": [metadata.global_scratch_size or 0, metadata.global_scratch_align or 1],
        "profile_scratch": [metadata.profile_scratch_size or 0, metadata.profile_scratch_align or 1],
        "parameters": parameters,
    }


def _tensor_map(meta: dict[str, Any]) -> dict[str, Any]:
    """What cuTensorMapEncodeTiled takes; the box may be smaller than the kernel's block."""
    return {
        "swizzle": meta["swizzle"],
        "element_bytes": meta["elem_size"],
        "dtype": TENSOR_MAP_DTYPE.get(meta["elem_type"], meta["elem_type"]),
        "box": list(meta["block_size"]),
        "fp4_padded": bool(meta["fp4_padded"]),
    }


def _evidence(metadata: Any, ptx: str, log: str, seconds: float) -> dict[str, Any]:
    """Figures of the shipped binary, from the ptxas run that made it: a second run may allocate otherwise."""
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log)
    registers = re.search(r"Used (\d+) registers", log)
    if spills is None or registers is None:
        raise RuntimeError(f"expected ptxas to report registers and spills, got {log.strip()[:200]!r}")
    ptx_target = re.search(r"^\.target (\S+)", ptx, re.MULTILINE)
    ptx_version = re.search(r"^\.version (\S+)", ptx, re.MULTILINE)
    return {
        "registers": int(registers[1]),
        "stack_bytes": int(spills[1]),
        "spill_bytes": int(spills[2]) + int(spills[3]),
        "ptx_target": ptx_target[1].rstrip(",") if ptx_target else "",
        "ptx_version": ptx_version[1] if ptx_version else "",
        "ptxas": _tool_version("ptxas-blackwell" if metadata.target.arch >= 100 else "ptxas"),
        "triton": triton.__version__,
        "compile_s": round(seconds, 3),
    }


def _tool_version(name: str) -> str:
    text = _run(name, "--version")
    found = re.search(r"V(\d+\.\d+\.\d+)", text)
    return found[1] if found else text.strip()


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([str(TOOLS / tool), *arguments], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Answer requests until the input ends. The answers' channel is kept from whatever prints to stdout."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    triton.knobs.compilation.always_compile = True
    triton.knobs.compilation.disable_line_info = True  # else the path of the source is part of the cubin
    triton.knobs.nvidia.dump_ptxas_log = True
    for line in sys.stdin:
        request = json.loads(line)
        triton.knobs.cache.dir = request["folder"] + "/triton"
        try:
            answer = compile_kernel(request)
        except (
            Exception
        ) as error:  # whatever a compile raises is the answer, and the next request may be fine
            answer = {"error": f"{type(error).__name__}: {error}".strip()[:2000]}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
