"""Limits that a built GPU kernel must keep: a compile that succeeds is not yet a kernel that runs."""

from collections.abc import Iterable, Mapping
from typing import Any

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.target import Target

# Opcodes without which a kernel is not what its row promises, on targets with tensor memory (sm_100, sm_103).
_TENSOR_CORE = "UTCHMMA"
_REQUIRED = {
    "triton/linear.py.jinja": (_TENSOR_CORE, "UTMALDG", "UTMASTG"),
    "triton/linear_few_rows.py.jinja": ("UTMALDG",),
    "triton/paged_attention_prefill.py.jinja": (_TENSOR_CORE,),
}
# The same of kernels whose tiles have so many rows: shorter ones do without.
_TALL = 128
_REQUIRED_IF_TALL = {"triton/moe_linear.py.jinja": (_TENSOR_CORE,)}
_WRITES = ("STG", "UTMASTG", "RED", "ATOMG", "REDG")


def violations(spec: KernelSpec, target: Target, record: Mapping[str, Any]) -> list[str]:
    """What the kernel breaks, each with its numbers; empty for a kernel that may ship.

    record is what triton_worker returned. Triton checks neither tensor memory nor shared memory when it
    compiles, and emits a body that is only a trap when the former does not suffice.
    """
    launch, evidence = record["launch"], record["evidence"]
    opcodes = base_opcodes(evidence["census"])
    threads = launch["num_warps"] * 32
    limits = (
        ("spilled bytes", evidence["spill_bytes"], 0),
        ("local loads and stores", opcodes.get("LDL", 0) + opcodes.get("STL", 0), 0),
        ("tensor-memory columns", launch["tmem_columns"], target.tmem_columns),
        ("shared-memory bytes", launch["shared_bytes"], target.smem_bytes),
        ("registers of one program", evidence["registers"] * threads, target.registers_per_sm),
        ("global scratch bytes", launch["global_scratch"][0], 0),
    )
    found = [
        f"{what}: at most {limit}, got {got}"
        for what, got, limit in limits
        if limit is not None and got > limit
    ]
    if not any(opcode in opcodes for opcode in _WRITES):
        found.append(f"body: expected stores, got none in {sum(opcodes.values())} instructions (a trap)")
    missing = [opcode for opcode in required_opcodes(spec, target) if opcode not in opcodes]
    if missing:
        found.append(f"instructions: expected {', '.join(missing)}, got {', '.join(sorted(opcodes))}")
    return found


def required_opcodes(spec: KernelSpec, target: Target) -> tuple[str, ...]:
    """Opcodes that the machine code must hold; none for fp32 kernels, which have no tensor-core path."""
    params = dict(spec.params)
    if not target.tmem_columns or params.get("dtype") != "bf16":
        return ()
    if params.get("BLOCK_M") == _TALL and spec.template in _REQUIRED_IF_TALL:
        return _REQUIRED_IF_TALL[spec.template]
    return _REQUIRED.get(spec.template, ())


def base_opcodes(census: Mapping[str, int]) -> dict[str, int]:
    """Counts without modifiers: LDG.E.128 and LDG.E are both LDG."""
    counts: dict[str, int] = {}
    for opcode, count in census.items():
        base = opcode.split(".", 1)[0]
        counts[base] = counts.get(base, 0) + count
    return counts


def refusal(name: str, target: Target, attempts: Iterable[tuple[str, Iterable[str]]]) -> str:
    """The message for a kernel of which no choice of numbers may ship."""
    tried = "; ".join(f"{choice}: {', '.join(reasons)}" for choice, reasons in attempts)
    return f"build: no form of {name} builds within the limits of {target.name} ({tried}); change its numbers"
