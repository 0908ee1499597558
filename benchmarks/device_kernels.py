"""Child of device_check: builds and runs corners on the GPU, one after another, a line of JSON for each.

A kernel that is wrong can end the process or hang it, so the parent reads the lines, ends what hangs, and goes on
behind it with another child (--first).
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.device_inputs import (
    Point,
    arguments_of,
    is_output,
    launches_at,
    needed_bytes,
    points,
    tensors_of,
    unknown_sizes,
)
from benchmarks.device_references import SCALED_MM, TOLERANCE, Reference, reference_of, worst_error
from octavo.codegen.build_triton import build_kernels
from octavo.codegen.catalogue import CORNERS
from octavo.codegen.corner import Corner
from octavo.codegen.kernel import Kernel as Built
from octavo.compiler.expression import evaluate
from octavo.compiler.target import Target, load_target
from octavo.runtime.cuda_driver import CudaDriver
from octavo.runtime.cuda_launch import Kernel, Sizes, parse_record

REPEATS, WARM_UP = 15, 3
DEFAULT_STREAM = 0  # torch's too, so that all work is in one order
MATRIX = 8192
COPIED_BYTES = 2**30
MEMORY_SHARE = 0.6

Result = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--first", type=int, default=0, help="index of the first corner")
    parser.add_argument("--only", default="", help="corners whose name holds this")
    options = parser.parse_args()
    target = load_target(options.target)
    bench = Bench(target)
    if options.first == 0:
        say({"rates": bench.rates})
    for index, corner in enumerate(chosen(options.only)):
        if index < options.first or corner.refuse(target) is not None:
            continue
        say({"begin": index, "corner": corner.name})
        for result in bench.run(corner):
            say({"index": index, "corner": corner.name, **result})
    say({"done": True})


def chosen(word: str) -> list[Corner]:
    return [corner for corner in CORNERS if word in corner.name]


def say(line: Result) -> None:
    print(json.dumps(line), flush=True)


class Bench:
    """The device, its rates as measured, and how a corner is run on it."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.device = torch.device("cuda")
        self.driver = CudaDriver()
        self.flushed = torch.empty(4 * self.driver.device.l2_bytes, dtype=torch.uint8, device=self.device)
        self.compiled: set[str] = set()
        self.rates = self.measure_rates()

    def measure_rates(self) -> dict[str, float]:
        """Bytes a second of a copy, and FLOP/s of large products by torch."""
        source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        rates = {"copy": 2 * COPIED_BYTES / self.seconds(lambda: target.copy_(source))[0]}
        flops = 2 * MATRIX**3
        a, b = (torch.randn(MATRIX, MATRIX, device=self.device).bfloat16() for _ in range(2))
        rates["bf16"] = flops / self.seconds(lambda: a @ b.T)[0]
        one = torch.ones((), device=self.device)
        c, d = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        rates["fp8"] = flops / self.seconds(lambda: SCALED_MM(c, d.T, one, one, out_dtype=torch.bfloat16))[0]
        return rates

    def seconds(self, work: Callable[[], object]) -> tuple[float, float]:
        """(median, spread) of a piece of work with a cold L2; spread: from the 1st to the 9th tenth over the median."""
        for _ in range(WARM_UP):
            work()
        pairs = []
        for _ in range(REPEATS):
            self.flushed.zero_()
            pairs.append([torch.cuda.Event(enable_timing=True) for _ in range(2)])
            pairs[-1][0].record()
            work()
            pairs[-1][1].record()
        torch.cuda.synchronize()
        times = [start.elapsed_time(end) / 1e3 for start, end in pairs]
        tenths = statistics.quantiles(times, n=10)
        middle = statistics.median(times)
        return middle, (tenths[-1] - tenths[0]) / middle

    def run(self, corner: Corner) -> Iterator[Result]:
        """A result for each point; a failure is one too, unless it ends the process."""
        try:
            spec = corner.make(self.target)
            kernels = build_kernels(spec.launches, self.target)
            built = dict(zip([launch.name for launch in spec.launches], kernels, strict=True))
        except Exception as error:  # the next corner may be fine
            yield {"ok": False, "note": f"build: {type(error).__name__}: {error}"[:500]}
            return
        for point in points(spec):
            began = time.perf_counter()
            try:
                result = self.run_point(spec, built, point)
            except Exception as error:
                result = {"ok": False, "note": f"{type(error).__name__}: {error}"[:500]}
            yield {"point": point.label, **result, "wall_s": round(time.perf_counter() - began, 2)}
            if not result["ok"]:
                torch.cuda.synchronize()  # after a fault nothing works in this process: end it here
            torch.cuda.empty_cache()

    def run_point(self, spec: Any, built: Mapping[str, Built], point: Point) -> Result:
        dims = point.dims
        if why := unknown_sizes(spec, dims):
            return {"ok": True, "left_out": why}
        launches = [built[launch.name].spec for launch in launches_at(spec, dims)]
        needed, (free, _) = needed_bytes(spec, dims), self.driver.memory()
        if needed > MEMORY_SHARE * free:
            return {"ok": True, "left_out": f"its tensors need {needed / 1e9:.0f} GB"}
        held = tensors_of(spec, dims, self.device, poison_outputs=True)
        reference = reference_of(spec, launches, held, dims)
        if reference is None:
            held = {n: torch.zeros_like(t) if _is_result(launches, n) else t for n, t in held.items()}
        work = self.bind(launches, built, held, dims)
        torch.cuda.synchronize()
        work()
        torch.cuda.synchronize()
        result = check(reference, launches, held)
        median, spread = self.seconds(work)
        result |= {"us": median * 1e6, "spread": spread, **self.floor(launches, dims, median)}
        if reference is not None and reference.torch_own is not None:
            result |= self.torch_time(spec.op, reference)
        return result

    def bind(
        self,
        launches: list[Any],
        built: Mapping[str, Built],
        held: Mapping[str, Tensor],
        dims: Mapping[str, int],
    ) -> Callable[[], None]:
        """The launches, ready to be repeated, through the launcher that serves artifacts."""
        sizes = Sizes(dims)
        by_spec = {b.spec.name: b for b in built.values()}
        prepared = []
        for launch in launches:
            kernel = by_spec[launch.name]
            assert kernel.binary is not None
            record = parse_record(kernel.metadata["launch"], launch.name)
            loaded = Kernel(self.driver, record, kernel.binary, launch.name)
            prepared.append(loaded.prepare(arguments_of(launch, held, dims), sizes))

        def work() -> None:
            for one in prepared:
                if one is not None:
                    self.driver.launch(one, DEFAULT_STREAM)

        return work

    def floor(self, launches: list[Any], dims: Mapping[str, int], seconds: float) -> Result:
        """The time that bytes and products need at the measured rates, and the part of it that was reached."""
        bytes_s = sum(evaluate(launch.bytes, dims) for launch in launches) / self.rates["copy"]
        is_fp8 = any("mma_fp8" in launch.features for launch in launches)
        flops = sum(evaluate(launch.flops, dims) for launch in launches)
        floor = max(bytes_s, flops / self.rates["fp8" if is_fp8 else "bf16"])
        is_fp4 = any("mma_nvfp4" in launch.features for launch in launches)
        if is_fp4:  # the tensor core's own rate is four times that of bf16
            floor = max(bytes_s, flops / (4 * self.rates["bf16"]))
        return {"floor_us": floor * 1e6, "of_floor": floor / seconds}

    def torch_time(self, op: str, reference: Reference) -> Result:
        assert reference.torch_own is not None
        own, how = reference.torch_own, reference.how
        if how == "torch.compile":
            if op in self.compiled:  # compiling takes seconds; the first stands for all
                how = "eager"
            else:
                self.compiled.add(op)
                own = torch.compile(own)
        try:
            return {"torch_us": self.seconds(own)[0] * 1e6, "torch_how": how}
        except Exception as error:
            return {"torch_how": f"{how}: {type(error).__name__}"}


def _is_result(launches: list[Any], name: str) -> bool:
    return any(is_output(arg) for launch in launches for arg in launch.args if arg.name == name)


def check(reference: Reference | None, launches: list[Any], held: Mapping[str, Tensor]) -> Result:
    """Compare with the reference; without one, ask that every result is finite."""
    if reference is None:
        names = [name for name in held if _is_result(launches, name) and held[name].dtype.is_floating_point]
        bad = [name for name in names if not bool(held[name].float().isfinite().all())]
        return {"ok": not bad, "checked": "finite", "note": f"not finite: {', '.join(bad)}" if bad else ""}
    errors = {name: worst_error(held[name], expected) for name, expected in reference.expected.items()}
    worst = max(errors.values())
    return {"ok": worst <= TOLERANCE, "checked": "reference", "error": worst}


if __name__ == "__main__":
    main()
