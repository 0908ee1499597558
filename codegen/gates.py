"""Limits that a built GPU kernel must keep: a compile that succeeds is not yet a kernel that runs."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.target import Target

# What a spec may promise -> opcodes of which the machine code must hold one, as patterns, from that arch on.
# Consumer Blackwell (sm_120) has no tensor memory: its tensor core is that of a warp.
_BLACKWELL = (100, 103)
FEATURES: dict[str, dict[tuple[int, ...], str]] = {
    "tma_load": {(90, 100, 103, 120): r"UTMALDG"},
    "tma_store": {(90, 100, 103, 120): r"UTMASTG"},
    "mma_16bit": {(90,): r"HGMMA", _BLACKWELL: r"UTCHMMA", (120,): r"HMMA"},
    "mma_fp8": {(90,): r"QGMMA", _BLACKWELL: r"UTCQMMA", (120,): r"QMMA"},
    # a scale for 16 elements: four in 64, or by the name that the disassembler has on sm_103
    "mma_nvfp4": {(100,): r"UTCOMMA\S*\.4X", (103,): r"UTCOMMA\S*\.BLOCK16", (120,): r"OMMA\S*\.4X"},
    "scales_by_copy": {_BLACKWELL: r"UTCCP"},
    "fp4_convert": {(100, 103, 120): r"F2FP\S*E2M1"},
    "fp8_convert": {(90, 100, 103, 120): r"F2FP\S*E4M3"},
    "wait_for_grid": {(90, 100, 103, 120): r"ACQBULK"},
}
# What a loop must not hold: conversions of one value at a time cost eight instructions each.
_SLOW_CONVERSION = r"F2F(\.|$)"
# Loads of a byte or two by each thread: eight to sixteen where one of 16 bytes would do.
_NARROW_LOAD = r"LDG\S*\.[US](8|16)(\.|$)"
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
        *(
            (f"{what} in a loop", in_loops(evidence["loops"], pattern), 0)
            for what, pattern in slow_in_loops(spec)
        ),
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
    missing = [
        f"{name} ({pattern})"
        for name, pattern in required_opcodes(spec, target).items()
        if not any(re.match(pattern, opcode) for opcode in evidence["census"])
    ]
    if missing:
        found.append(f"instructions: expected {', '.join(missing)}, got {', '.join(sorted(opcodes))}")
    return found


def slow_in_loops(spec: KernelSpec) -> list[tuple[str, str]]:
    """(what, pattern of opcodes) that a kernel's loops may not hold. Kernels for odd sizes say `narrow_loads`."""
    narrow = [] if spec.narrow_loads else [("loads of 1 or 2 bytes", _NARROW_LOAD)]
    return [("conversions of single values", _SLOW_CONVERSION), *narrow]


def in_loops(loops: Iterable[Mapping[str, Any]], pattern: str) -> int:
    """Instructions of all innermost loops whose opcode fits the pattern."""
    counts = (
        count for loop in loops for opcode, count in loop["opcodes"].items() if re.match(pattern, opcode)
    )
    return sum(counts)


def required_opcodes(spec: KernelSpec, target: Target) -> dict[str, str]:
    """Pattern of the opcode of every feature that the spec promises and the target's arch has; a wait if it waits."""
    return {
        name: pattern
        for name in (*spec.features, *["wait_for_grid"] * spec.waits)
        for archs, pattern in FEATURES[name].items()
        if target.arch in archs
    }


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
