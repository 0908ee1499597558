"""What is known of a GPU kernel without running it, as one line of a table (`octavo kernels`)."""

import math
from collections.abc import Mapping
from typing import Any

from octavo.codegen.gates import base_opcodes
from octavo.codegen.kernel import Kernel, KernelSpec
from octavo.compiler.program import ITEM_BYTES

# In the order in which a table shows them: tensor core, its memory, TMA, copies, then what may be slow.
KEY_OPCODES = (
    "UTCHMMA", "UTCQMMA", "UTCOMMA", "HGMMA", "QGMMA", "HMMA", "QMMA", "OMMA", "LDTM", "STTM", "UTCCP", "UTMALDG",
    "UTMASTG", "LDGSTS", "LDG", "STG", "LDS", "STS", "MUFU", "SHFL", "F2F", "LDL", "STL",
)  # fmt: skip

Cell = str | int | float | dict[str, Any]


# Tensor-core instructions -> the FLOP rate of the target that they reach, the fastest first.
RATES = {"UTCOMMA": "nvfp4", "OMMA": "nvfp4", "UTCQMMA": "fp8", "QGMMA": "fp8", "QMMA": "fp8", "UTCHMMA": "bf16",
         "HGMMA": "bf16", "HMMA": "bf16"}  # fmt: skip


def work_of(spec: KernelSpec, census: Mapping[str, int]) -> dict[str, Any]:
    """What a kernel has to do, for compiler/cost.py: expressions in the step's sizes, and numbers of one turn."""
    opcodes = base_opcodes(census)
    return {
        **launch_of(spec),
        "num_warps": spec.num_warps,
        "num_stages": spec.num_stages,
        "rate": next((rate for opcode, rate in RATES.items() if opcode in opcodes), "fp32"),
        "turn_bytes": turn_bytes(spec),
        "turn_flops": turn_flops(spec),
    }


def launch_of(spec: KernelSpec) -> dict[str, Any]:
    """The part of a kernel's work that one launch of it may have other than the next."""
    return {
        "bytes": spec.bytes,
        "flops": spec.flops,
        "iterations": spec.iterations,
        "tiles": spec.tiles,
        "grid": list(spec.grid),
        "when": spec.when,
    }


def turn_bytes(spec: KernelSpec) -> int:
    """Bytes of the tiles that TMA loads in a turn of the loop: all tensor maps but those of results; 0 without."""
    loads = (
        arg for arg in spec.args if arg.kind == "descriptor" and not arg.name.startswith(("out", "residual"))
    )
    return sum(math.prod(arg.block) * ITEM_BYTES[arg.dtype] for arg in loads) if spec.iterations else 0


def turn_flops(spec: KernelSpec) -> int:
    """Operations of a tile of a product, rows and columns that are padding included; 0 for other kernels."""
    params = dict(spec.params)
    sizes = [params.get(name, 0) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")]
    return 2 * math.prod(int(size) for size in sizes) if spec.iterations else 0


def evidence_row(kernel: Kernel) -> dict[str, Cell]:
    """Registers per thread, bytes, columns, warps and counts of a kernel that build_kernels made.

    key_opcodes  counts in the machine code, not in a run: "UTCHMMA 4, UTMALDG 2"
    refused      numbers of this form that were tried before and broke a limit
    choice       other forms that were built or refused, and the predicted time of each
    """
    return row_of(kernel.spec.name, kernel.spec.op, kernel.spec.when, kernel.metadata)


def row_of(name: str, op: str, when: str, metadata: Mapping[str, Any]) -> dict[str, Cell]:
    """The row of a kernel of which only name, op, condition and metadata are there."""
    launch, evidence = metadata["launch"], metadata["evidence"]
    return {
        "name": name,
        "op": op,
        "when": when,
        "registers": evidence["registers"],
        "spill_bytes": evidence["spill_bytes"],
        "shared_bytes": launch["shared_bytes"],
        "tmem_columns": launch["tmem_columns"],
        "num_warps": launch["num_warps"],
        "instructions": sum(evidence["census"].values()),
        "key_opcodes": key_opcodes(evidence["census"]),
        "refused": len(metadata["choice"]["refused"]),
        "choice": metadata["choice"],
        "compile_s": evidence["compile_s"],
    }


def key_opcodes(census: dict[str, int]) -> str:
    """The counts of KEY_OPCODES that occur, modifiers ignored."""
    counts = base_opcodes(census)
    return ", ".join(f"{opcode} {counts[opcode]}" for opcode in KEY_OPCODES if opcode in counts)
