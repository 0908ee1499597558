"""What the disassembly of a cubin tells: how often each opcode occurs, and what the innermost loops hold.

A loop ends in a conditional branch backwards. Unconditional ones lead back from waits that the assembler moved out
of line, and a loop of a few instructions is such a wait in its place.
"""

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

LABEL = re.compile(r"^(\.L_x_\d+):")
INSTRUCTION = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_]*(?:\.[A-Za-z0-9_]+)*)([^;]*)"
)
TARGET = re.compile(r"\((\.L_x_\d+)\)")
SHORTEST_LOOP = 8

# The pipe that executes an opcode; others are `alu`, or `uniform` where the name begins with U.
PIPES: dict[str, tuple[str, ...]] = {
    "mufu": ("MUFU",),
    "fma": (
        "FFMA", "FMUL", "FADD", "IMAD", "FFMA2", "FMUL2", "FADD2", "HFMA2", "HMUL2", "HADD2", "HMNMX2",
    ),
    "cvt": ("F2FP", "F2F", "I2F", "F2I", "I2FP"),
    "lsu": (
        "LDS", "STS", "LDG", "STG", "LDGSTS", "LDSM", "STSM", "SHFL", "LDL", "STL", "ATOMG", "RED", "REDG", "LDC",
        "ATOMS", "SYNCS",
    ),
    "mma": ("HMMA", "QMMA", "IMMA", "OMMA", "HGMMA", "QGMMA", "IGMMA", "UTCHMMA", "UTCQMMA", "UTCOMMA"),
    "tmem": ("LDTM", "STTM"),
    "control": (
        "BRA", "EXIT", "NOP", "BAR", "WARPSYNC", "BSSY", "BSYNC", "DEPBAR", "LDGDEPBAR", "ELECT", "NANOSLEEP", "CCTL",
        "ERRBAR", "MEMBAR", "FENCE", "CALL", "RET",
    ),
}  # fmt: skip
_PIPE_OF = {opcode: pipe for pipe, opcodes in PIPES.items() for opcode in opcodes}
# Opcodes of a loop that are recorded by name: tensor core and its memory, TMA, loads and stores, and what is slow.
TELLING = re.compile(
    r"(UTC[A-Z]*MMA|UTCCP|[HQIO]MMA|[HQI]GMMA|UTMA(LDG|STG|REDG)|LDTM|STTM|LDGSTS|LDG|STG|LDL|STL|SHFL|MUFU|F2F)(\.|$)"
    r"|F2FP\S*E2M1"
)


@dataclass(frozen=True)
class Instruction:
    """opcode with modifiers; target: the label that a conditional branch goes to, else empty."""

    opcode: str
    target: str


def body_facts(disassembly: str) -> dict[str, Any]:
    """census: opcode -> count; pipes: pipe -> count, of the whole body; loops: those of each innermost loop."""
    instructions, labels = _read(disassembly)
    return {
        "census": dict(sorted(Counter(one.opcode for one in instructions).items())),
        "pipes": _pipes(instructions),
        "loops": [_loop(instructions[first : last + 1]) for first, last in _innermost(instructions, labels)],
    }


def pipe_of(opcode: str) -> str:
    base = opcode.split(".", 1)[0]
    return _PIPE_OF.get(base) or ("uniform" if base.startswith("U") else "alu")


def _read(disassembly: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions in order, and the number of the instruction behind each label."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in disassembly.splitlines():
        label = LABEL.match(line)
        if label is not None:
            labels[label[1]] = len(instructions)
            continue
        found = INSTRUCTION.search(line)
        if found is not None:
            instructions.append(_instruction(*found.groups()))
    return instructions, labels


def _instruction(predicate: str | None, opcode: str, operands: str) -> Instruction:
    is_conditional = predicate is not None or "UP" in operands.split("`", 1)[0]
    target = TARGET.search(operands) if opcode.split(".", 1)[0] == "BRA" and is_conditional else None
    return Instruction(opcode, target[1] if target is not None else "")


def _innermost(instructions: list[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """First and last instruction of every loop that holds no other loop, waits not counted."""
    spans = {
        (labels[one.target], last)
        for last, one in enumerate(instructions)
        if one.target in labels and last - labels[one.target] >= SHORTEST_LOOP
    }
    return sorted(
        span
        for span in spans
        if not any(other != span and span[0] <= other[0] and other[1] <= span[1] for other in spans)
    )


def _loop(instructions: list[Instruction]) -> dict[str, Any]:
    telling = Counter(one.opcode for one in instructions if TELLING.match(one.opcode))
    return {
        "instructions": len(instructions),
        "pipes": _pipes(instructions),
        "opcodes": dict(sorted(telling.items())),
    }


def _pipes(instructions: list[Instruction]) -> dict[str, int]:
    return dict(sorted(Counter(pipe_of(one.opcode) for one in instructions).items()))
