"""The three nouns of code generation: KernelSpec (what), source (text), Kernel (built)."""

import hashlib
import json
from dataclasses import dataclass, field, replace
from typing import Any

Param = int | float | str | bool


@dataclass(frozen=True)
class Arg:
    """One run-time argument of a kernel, in call order.

    kind   "pointer" (dtype is the element's), "scalar" (dtype is the value's), or "descriptor": a tensor map for
           TMA over a row-major tensor of `shape`, moved in tiles of `block`
    dtype  "fp32", "fp16", "bf16", "fp8" (E4M3), "u8" (two E2M1 codes, the first in the low nibble), "i32", "i64"
    value  scalar only: a number or an expression in the step's dims
    shape  descriptor only: ints or expressions in the step's dims
    """

    name: str
    kind: str
    dtype: str
    is_divisible_by_16: bool = True
    value: Param = ""
    shape: tuple[int | str, ...] = ()
    block: tuple[int, ...] = ()


def pointer(name: str, dtype: str) -> Arg:
    return Arg(name, "pointer", dtype)


@dataclass(frozen=True)
class KernelSpec:
    """What to generate: a template, everything its text depends on, and how it is called.

    params        upper-case names are compile-time numbers of the kernel (tl.constexpr), the others shape its text
    grid, bytes, flops are expressions in the step's dims (T tokens, R requests, L logit rows, S context tokens).
    when          condition in the dims under which the kernel is launched ("T <= 16"); empty means always. The
                  number of tokens is unknown when a node is selected, so a node may get a kernel for each range
    also          the node's further launches, in order, each under its own `when`
    scratch       (name, dtype, shape) of workspace that the node's launches share; args refer to it by name
    alternatives  fallbacks, other numbers for the same work: what the build tries next when a gate refuses this one
    features      what the machine code must show, names of gates.FEATURES: "tma_load", "mma_nvfp4"
    candidates    other tiles, grid and arguments for the same work: the build makes all and keeps the one of which the
                  cost model expects most. op, when, scratch and also are this spec's, whatever theirs are
    narrow_loads  the kernel serves sizes of which it can only load an element at a time
    iterations    turns of the innermost loop of all programs together, an expression in the dims; "" without a loop
    tiles         pieces of work that the programs share out, an expression; "" where each program has one
    waits         the kernel may begin while the one before it ends, as its text waits for that one (gdc_wait) before
                  it touches what kernels write: the launch record says launch_pdl
    """

    op: str
    template: str
    params: tuple[tuple[str, Param], ...]
    args: tuple[Arg, ...]
    grid: tuple[str, str, str] = ("1", "1", "1")
    bytes: str = "0"
    flops: str = "0"
    num_warps: int = 4
    num_stages: int = 1
    label: str = ""
    when: str = ""
    also: tuple["KernelSpec", ...] = ()
    scratch: tuple[tuple[str, str, tuple[int | str, ...]], ...] = ()
    alternatives: tuple["KernelSpec", ...] = ()
    features: tuple[str, ...] = ()
    iterations: str = ""
    tiles: str = ""
    narrow_loads: bool = False
    waits: bool = False
    candidates: tuple["KernelSpec", ...] = ()

    @property
    def forms(self) -> tuple["KernelSpec", ...]:
        """This spec and its candidates, each as it would be launched in this one's place."""
        return (self, *map(self._in_place, self.candidates))

    @property
    def choices(self) -> tuple["KernelSpec", ...]:
        """This form and its fallbacks, likewise."""
        return (self, *map(self._in_place, self.alternatives))

    def _in_place(self, other: "KernelSpec") -> "KernelSpec":
        return replace(other, op=self.op, when=self.when, scratch=self.scratch, also=self.also)

    @property
    def launches(self) -> tuple["KernelSpec", ...]:
        """Every kernel of the node in launch order, this one first."""
        return (self, *self.also)

    @property
    def key(self) -> str:
        """Hash of all that the built kernel depends on, short enough for a file name."""
        args = [{name: value for name, value in vars(arg).items() if name != "value"} for arg in self.args]
        text = json.dumps([self.template, self.params, args, self.num_warps, self.num_stages])
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def name(self) -> str:
        """Readable and unique: `rms_norm__bf16_h576__3fa9c01b2d`."""
        stem = self.template.rsplit("/", 1)[-1].split(".", 1)[0]
        return "__".join(part for part in (stem, self.label, self.key) if part)


@dataclass(frozen=True)
class Kernel:
    """A built kernel: its spec, the text that was compiled, the binary and what is known of it.

    form      which of the spec's forms it is, where the spec was given with candidates
    choice    which of that form's choices it is: the first that keeps the limits
    losers    the other forms that were built, slower by the cost model
    metadata  the launch record and the static evidence of a GPU kernel (registers, spills, shared memory,
              tensor-memory columns, instruction census, loops); empty for host code, which is built as one program
    """

    spec: KernelSpec
    source: str
    binary: bytes | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    form: int = 0
    choice: int = 0
    losers: tuple["Kernel", ...] = ()

    def called_as(self, spec: KernelSpec) -> KernelSpec:
        """What a launch of `spec`, of which this is the kernel, calls: its form and choice that were built."""
        return spec.forms[self.form].choices[self.choice]
