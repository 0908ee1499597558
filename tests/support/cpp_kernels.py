"""Kernels of the cpp family as callables: all that a test module needs, built in one translation unit."""

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, fx

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.render import render, render_template
from octavo.codegen.select import select
from octavo.compiler.expression import evaluate
from octavo.compiler.host import LEVELS, build_shared_library, can_run
from octavo.compiler.program import DIMS
from octavo.compiler.target import load_target

# Torch and the kernels each have a pool of threads that spin for a while after their work; two pools on few
# cores slow each other down a hundredfold.
torch.set_num_threads(1)

# The levels whose code runs here; the others are compiled only.
RUNNABLE = tuple(level for level in LEVELS if can_run(level))


def cpp_spec(node: fx.Node) -> KernelSpec:
    return select(node, load_target("cpu")).spec


class KernelLibrary:
    """Built kernels, callable by spec. text: further C++ after the kernels."""

    def __init__(self, specs: Iterable[KernelSpec], features: str, text: str = "") -> None:
        self.specs = list({spec.name: spec for spec in specs}.values())
        kernels = [render(spec) for spec in self.specs] + [_entry(spec) for spec in self.specs] + [text]
        source = render_template(
            "cpp/program.cpp.jinja",
            version="test",
            dims=DIMS,
            kernels=kernels,
            buffers=(),
            segments=((),),
            workspace="0",
        )
        self.library = ctypes.CDLL(str(build_shared_library(source, features)))

    def __call__(
        self, spec: KernelSpec, tensors: Sequence[Tensor], sizes: Sequence[int], num_threads: int = 2
    ) -> int:
        """The kernel's return code. tensors: its pointers in order; sizes: its scalars in order."""
        pointers = [arg for arg in spec.args if arg.kind == "pointer"]
        assert len(tensors) == len(pointers) and len(sizes) == len(spec.args) - len(pointers)
        addresses = (ctypes.c_void_p * len(tensors))(*(tensor.data_ptr() for tensor in tensors))
        scalars = (ctypes.c_int64 * len(sizes))(*sizes)
        return int(getattr(self.library, f"test_{spec.name}")(addresses, scalars, num_threads))

    def assert_idle_without_tokens(self) -> None:
        """Every kernel returns 0 in a step of no token, and writes nowhere: as on a rank that has nothing to do."""
        dims = {**dict.fromkeys(DIMS, 0), "num_pages": 3}
        memory, one = torch.full((1 << 16,), 0xFF, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
        for spec in self.specs:
            pointers = [arg.name for arg in spec.args if arg.kind == "pointer"]
            sizes = [evaluate(str(arg.value), dims) for arg in spec.args if arg.kind == "scalar"]
            tensors = [one if name == "cu_seqlens_q" else memory for name in pointers]
            assert self(spec, tensors, sizes) == 0, spec.name
            assert bool((memory == 0xFF).all()), f"{spec.name} wrote something"


def _entry(spec: KernelSpec) -> str:
    """An exported function that calls one kernel: pointers and sizes from an array each."""
    values: list[str] = []
    for arg in spec.args:
        index = sum(value.startswith("(" if arg.kind == "pointer" else "s") for value in values)
        values.append(f"({arg.dtype}*)pointers[{index}]" if arg.kind == "pointer" else f"scalars[{index}]")
    head = (
        f'extern "C" int test_{spec.name}(void* const* pointers, const int64_t* scalars, int32_t num_threads)'
    )
    return f"{head} {{ return {spec.name}({', '.join(values)}, num_threads); }}\n"


def guarded(value: Tensor) -> Tensor:
    """The same values in memory that NaN surrounds, so that a read outside shows in the result."""
    margin = 64
    memory = torch.full((value.numel() + 2 * margin,), float("nan"), dtype=value.dtype)
    memory[margin:-margin] = value.flatten()
    return memory[margin:-margin].view(value.shape)


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of one rounding to the nearest."""
    return 2.0**-8 if dtype == torch.bfloat16 else 2.0**-24
