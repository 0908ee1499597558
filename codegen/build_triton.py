"""KernelSpec -> cubin, launch record and evidence, without a GPU. Knows no op; rows choose the numbers."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from octavo.codegen.choose import Form, choose
from octavo.codegen.evidence import work_of
from octavo.codegen.gates import refusal, violations
from octavo.codegen.kernel import Arg, Kernel, KernelSpec, Param
from octavo.codegen.render import render
from octavo.codegen.sass import body_facts
from octavo.compiler.errors import CodegenError, ToolchainError
from octavo.compiler.host import cache_directory
from octavo.compiler.target import Target

Progress = Callable[[str, int, int], None]

RECORD_VERSION = 3
NUM_WORKERS = 2
TIMEOUT_S = 300.0
_SCALAR_TYPES = ("i32", "i64", "fp32")
# Triton's names of element types, where they are others than ours.
_TRITON_TYPES = {"fp8": "fp8e4nv"}


def build_kernels(
    specs: Sequence[KernelSpec],
    target: Target,
    progress: Progress | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Kernel]:
    """One built kernel for each spec, in order; specs of the same name are built once.

    Where a spec has candidates, all its forms are built. The kernel's spec is what was built in the end: the chosen
    form, or the fallback of it that keeps the limits.
    progress is called with (kernel name, kernels done, kernels in all), from the calling thread.
    Raises CodegenError for a kernel that does not compile or breaks a limit in every one of its forms, and
    ToolchainError without Triton.
    """
    built = {}
    for name, result in each_kernel(specs, target, progress, timeout_s):
        if isinstance(result, CodegenError):
            raise result
        built[name] = result
    # sizes and conditions of a launch are those of each spec of the name
    return [replace(built[spec.name], spec=built[spec.name].called_as(spec)) for spec in specs]


def each_kernel(
    specs: Sequence[KernelSpec],
    target: Target,
    progress: Progress | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[str, Kernel | CodegenError]]:
    """Name and kernel of each distinct spec, in order, as they are built; an error in place of a kernel that fails."""
    forms = {spec.name: spec.forms for spec in specs}
    workers: SimpleQueue[_Worker] = SimpleQueue()
    owned = [_Worker(timeout_s) for _ in range(min(NUM_WORKERS, sum(map(len, forms.values()))))]
    for worker in owned:
        workers.put(worker)
    try:
        with ThreadPoolExecutor(max_workers=max(len(owned), 1)) as pool:
            jobs = {
                name: [pool.submit(_build, i, form, target, workers) for i, form in enumerate(of_kernel)]
                for name, of_kernel in forms.items()
            }
            try:
                for done, (name, of_kernel) in enumerate(jobs.items(), start=1):
                    yield name, _chosen(name, [job.result() for job in of_kernel], target)
                    if progress is not None:
                        progress(name, done, len(jobs))
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
    finally:
        for worker in owned:
            worker.stop()


def _chosen(name: str, forms: list[Form], target: Target) -> Kernel | CodegenError:
    best = choose(forms, target)
    if best is None:
        attempts = [(one["choice"], one["reasons"]) for form in forms for one in form.refused]
        return CodegenError(refusal(name, target, attempts))
    return best


def _build(index: int, spec: KernelSpec, target: Target, workers: "SimpleQueue[_Worker]") -> Form:
    """The first choice of a form's numbers that compiles and keeps the limits, and why others were refused."""
    refused: list[dict[str, Any]] = []
    for place, choice in enumerate(spec.choices):
        source = render(choice)
        try:
            record, cubin = _compile_cached(choice, source, target, workers)
        except CodegenError as error:
            refused.append({"choice": _numbers(choice), "reasons": [str(error)]})
            continue
        reasons = violations(choice, target, record)
        if reasons:
            refused.append({"choice": _numbers(choice), "reasons": reasons})
            continue
        facts = {
            **record,
            "choice": {"numbers": _numbers(choice), "refused": refused},
            "work": work_of(choice, record["evidence"]["census"]),
        }
        kernel = Kernel(choice, source, cubin, facts, form=index, choice=place)
        return Form(spec, _numbers(choice), kernel, refused)
    return Form(spec, _numbers(spec), None, refused)


def _numbers(spec: KernelSpec) -> str:
    values = " ".join(f"{name}={value}" for name, value in spec.params)
    return f"{values} num_warps={spec.num_warps} num_stages={spec.num_stages}"


def _compile_cached(
    spec: KernelSpec, source: str, target: Target, workers: "SimpleQueue[_Worker]"
) -> tuple[dict[str, Any], bytes]:
    """Record and cubin from the cache, or from a worker. Entries appear whole, by renaming a folder."""
    request = _request(spec, target)
    key = hashlib.sha256(json.dumps([RECORD_VERSION, triton_version(), source, request]).encode()).hexdigest()
    root = cache_directory() / "triton"
    entry = root / key[:32]
    found = _read(entry)
    if found is not None:
        return found
    root.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=root, prefix=".build-"))
    try:
        (folder / "kernel.py").write_text(source)
        worker = workers.get()
        try:
            record = worker.compile({**request, "folder": str(folder)})
        finally:
            workers.put(worker)
        cubin = (folder / "kernel.cubin").read_bytes()
        record["evidence"].update(body_facts((folder / "kernel.sass").read_text()))
        record["launch"].update(_identity(spec, source, cubin, record))
        (folder / "record.json").write_text(json.dumps(record, indent=1))
        shutil.rmtree(folder / "triton", ignore_errors=True)
        (folder / "kernel.sass").unlink()  # long, and made anew from the cubin at any time
        shutil.rmtree(entry, ignore_errors=True)  # only a damaged one can be there
        try:
            folder.rename(entry)
        except OSError:  # another process was faster
            pass
        return record, cubin
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(entry: Path) -> tuple[dict[str, Any], bytes] | None:
    """A cache entry, or None if it is absent or damaged."""
    try:
        record = json.loads((entry / "record.json").read_text())
        cubin = (entry / "kernel.cubin").read_bytes()
        is_whole = record["launch"]["cubin_sha256"] == hashlib.sha256(cubin).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (record, cubin) if is_whole else None


def _request(spec: KernelSpec, target: Target) -> dict[str, Any]:
    """What the worker needs besides the text; with the text and Triton's version it decides the binary."""
    if target.arch is None:
        raise CodegenError(f"build: {target.name} names no arch, {spec.name} cannot be compiled for it")
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": True}
    if spec.waits:
        options["launch_pdl"] = True
    return {
        "function": spec.name,
        "types": [_type(arg) for arg in spec.args],
        "divisible": [
            i for i, arg in enumerate(spec.args) if arg.kind != "descriptor" and arg.is_divisible_by_16
        ],
        "constexprs": constexprs(spec),
        "options": options,
        "arch": target.arch,
    }


def constexprs(spec: KernelSpec) -> dict[str, Param]:
    """The compile-time numbers of a kernel: its parameters with upper-case names."""
    return {name: value for name, value in spec.params if name.isupper()}


def _type(arg: Arg) -> str:
    dtype = _TRITON_TYPES.get(arg.dtype, arg.dtype)
    match arg.kind:
        case "pointer":
            return f"*{dtype}"
        case "scalar" if arg.dtype in _SCALAR_TYPES:
            return dtype
        case "descriptor" if arg.block:
            return f"tensordesc<{dtype}{list(arg.block)}>"
    raise CodegenError(f"build: expected a pointer, a scalar or a descriptor with a block, got {arg}")


def _identity(spec: KernelSpec, source: str, cubin: bytes, record: dict[str, Any]) -> dict[str, Any]:
    """What ties a launch record to its binary, and what the launcher must guarantee about the arguments."""
    for parameter, arg in zip(record["launch"]["parameters"], spec.args, strict=True):
        if arg.kind == "descriptor":
            parameter.update(shape=list(arg.shape), block=list(arg.block))
        else:
            parameter.update(divisible_by_16=arg.is_divisible_by_16)
    return {
        "arch": record["evidence"]["ptx_target"],
        "constexprs": constexprs(spec),
        "grid": list(spec.grid),
        "source_sha256": hashlib.sha256(source.encode()).hexdigest(),
        "cubin_sha256": hashlib.sha256(cubin).hexdigest(),
    }


def triton_version() -> str:
    """Version of the installed Triton, without importing it. Raises ToolchainError if there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        raise ToolchainError(
            "triton: expected an installed package, found none; pip install 'triton>=3.6'"
        ) from None


class _Worker:
    """A triton_worker process, started when first needed and again after it died."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.process: subprocess.Popen[str] | None = None
        self.errors = tempfile.TemporaryFile("w+", errors="replace")

    def compile(self, request: dict[str, Any]) -> dict[str, Any]:
        """The worker's answer. Raises CodegenError, not naming the kernel, if it fails, aborts or is late."""
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        is_late = threading.Event()

        def end() -> None:
            is_late.set()
            process.kill()

        timer = threading.Timer(self.timeout_s, end)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            if "error" in answer:
                raise CodegenError(f"does not compile: {answer['error']}")
            return answer
        code = self.stop()
        if is_late.is_set():
            raise CodegenError(f"did not compile within {self.timeout_s:g} s")
        raise CodegenError(f"the compiler ended with code {code}: {self._last_words()}")

    def _start(self) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("triton_worker.py")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
        self.errors.seek(0)
        self.errors.truncate()
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-P",
                str(script),
            ],  # -P: this folder's select.py would hide the standard library's
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )
        return self.process

    def stop(self) -> int:
        """End the process, if there is one; its exit code."""
        process, self.process = self.process, None
        if process is None:
            return 0
        assert process.stdin is not None and process.stdout is not None
        process.kill()
        process.stdin.close()
        process.stdout.close()
        return process.wait()

    def _last_words(self) -> str:
        """The line that says most of what the process printed before it died."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        telling = [line for line in lines if "ssert" in line or "rror" in line]
        return (telling or lines or ["no message"])[-1][:500]
