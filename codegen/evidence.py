"""What is known of a GPU kernel without running it, as one line of a table (`octavo kernels`)."""

from octavo.codegen.gates import base_opcodes
from octavo.codegen.kernel import Kernel

# In the order in which a table shows them: tensor core, its memory, TMA, copies, then what may be slow.
KEY_OPCODES = (
    "UTCHMMA", "UTCQMMA", "UTCOMMA", "HGMMA", "HMMA", "LDTM", "STTM", "UTMALDG", "UTMASTG", "LDGSTS",
    "LDG", "STG", "LDS", "STS", "MUFU", "SHFL", "LDL", "STL",
)  # fmt: skip

Cell = str | int | float


def evidence_row(kernel: Kernel) -> dict[str, Cell]:
    """Registers per thread, bytes, columns, warps and counts of a kernel that build_kernels made.

    key_opcodes  counts in the machine code, not in a run: "UTCHMMA 4, UTMALDG 2"
    refused      forms that were tried before and broke a limit
    """
    launch, evidence = kernel.metadata["launch"], kernel.metadata["evidence"]
    return {
        "name": kernel.spec.name,
        "op": kernel.spec.op,
        "when": kernel.spec.when,
        "registers": evidence["registers"],
        "spill_bytes": evidence["spill_bytes"],
        "shared_bytes": launch["shared_bytes"],
        "tmem_columns": launch["tmem_columns"],
        "num_warps": launch["num_warps"],
        "instructions": sum(evidence["census"].values()),
        "key_opcodes": key_opcodes(evidence["census"]),
        "refused": len(kernel.metadata["choice"]["refused"]),
        "compile_s": evidence["compile_s"],
    }


def key_opcodes(census: dict[str, int]) -> str:
    """The counts of KEY_OPCODES that occur, modifiers ignored."""
    counts = base_opcodes(census)
    return ", ".join(f"{opcode} {counts[opcode]}" for opcode in KEY_OPCODES if opcode in counts)
