"""The three nouns of code generation: KernelSpec (what), source (text), Kernel (built)."""

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

Param = int | float | str | bool


@dataclass(frozen=True)
class Arg:
    """One run-time argument of a kernel, in call order.

    kind   "pointer" (dtype is the element's) or "scalar" (dtype is the value's)
    dtype  "fp32", "bf16", "i32", "i64"
    """

    name: str
    kind: str
    dtype: str
    is_divisible_by_16: bool = True


@dataclass(frozen=True)
class KernelSpec:
    """What to generate: a template, everything its text depends on, and how it is called.

    grid, bytes, flops are expressions in the step's dims (T tokens, R requests, L logit rows, S context tokens).
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

    @property
    def key(self) -> str:
        """Hash of all that the built kernel depends on, short enough for a file name."""
        text = json.dumps([self.template, self.params, [vars(a) for a in self.args], self.num_warps, self.num_stages])
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def name(self) -> str:
        """Readable and unique: `rms_norm__bf16_h576__3fa9c01b2d`."""
        stem = self.template.rsplit("/", 1)[-1].split(".", 1)[0]
        return "__".join(part for part in (stem, self.label, self.key) if part)


@dataclass(frozen=True)
class Kernel:
    """A built kernel: its spec, the text that was compiled, the binary and what is known of it.

    metadata holds the launch record and the static evidence of a GPU kernel (registers, spills, shared memory,
    tensor-memory columns, instruction census); it is empty for host code, which is built as one program.
    """

    spec: KernelSpec
    source: str
    binary: bytes | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
