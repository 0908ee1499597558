"""Loops, opcodes and pipes of a disassembly, on text in nvdisasm's form."""

import pytest

from octavo.codegen.sass import PIPES, body_facts, pipe_of


def sass(*lines: str) -> str:
    """Labels as they are; other lines become instructions, each at its address."""
    text, address = ['\t.section\t.text.kernel,"ax",@progbits'], 0
    for line in lines:
        if line.startswith(".L"):
            text.append(f"{line}:")
            continue
        text.append(f"        /*{address:04x}*/                   {line} ;")
        address += 16
    return "\n".join(text) + "\n"


FILLER = ("IADD3 R1, PT, PT, R1, 0x1, RZ",) * 8


def loops(*lines: str) -> list[int]:
    return [loop["instructions"] for loop in body_facts(sass(*lines))["loops"]]


def test_census_pipes_and_the_opcodes_of_a_loop() -> None:
    text = sass(
        "LDC R1, c[0x0][0x37c]", ".L_x_1", "@P0 LDG.E.128.CONSTANT R4, desc[UR4][R2.64]",
        "@!UP0 UTMALDG.2D [UR8], [UR6]",
        "HMMA.16816.F32.BF16 R4, R8, R12, R4", "F2F.BF16.F32 R0, R0", "F2FP.BF16.F32.PACK_AB R0, R1, R0",
        "MUFU.EX2 R0, R0", "FFMA R0, R1, R2, R3", "UIADD3 UR4, UR4, 0x1, URZ", "LDTM.x64 R4, tmem[UR4]",
        "LDGDEPBAR", "@P1 BRA `(.L_x_1)", "STG.E.128 desc[UR4][R2.64], R4", "EXIT",
    )  # fmt: skip
    facts = body_facts(text)
    assert facts["census"]["LDG.E.128.CONSTANT"] == 1 and sum(facts["census"].values()) == 14
    assert sum(facts["pipes"].values()) == 14 and facts["pipes"]["lsu"] == 3
    (loop,) = facts["loops"]
    assert loop["instructions"] == 11
    assert loop["pipes"] == {
        "control": 2, "cvt": 2, "fma": 1, "lsu": 1, "mma": 1, "mufu": 1, "tmem": 1, "uniform": 2,
    }  # fmt: skip
    assert loop["opcodes"] == {
        "F2F.BF16.F32": 1, "HMMA.16816.F32.BF16": 1, "LDG.E.128.CONSTANT": 1, "LDTM.x64": 1, "MUFU.EX2": 1,
        "UTMALDG.2D": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "branch", ["@P0 BRA `(.L_x_1)", "@!P0 BRA `(.L_x_1)", "BRA.U !UP0, `(.L_x_1)", "BRA.U UP1, `(.L_x_1)"]
)
def test_every_conditional_branch_backwards_ends_a_loop(branch: str) -> None:
    assert loops(".L_x_1", *FILLER, branch) == [9]


def test_what_is_no_loop() -> None:
    assert loops(".L_x_1", *FILLER, "BRA `(.L_x_1)") == []  # back from a wait out of line, or the end's trap
    assert loops("@P0 BRA `(.L_x_1)", *FILLER, ".L_x_1", "EXIT") == []  # forwards
    wait = (".L_x_2", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2", "@!P0 BRA `(.L_x_2)")
    assert loops(*wait) == []
    assert loops(".L_x_1", *FILLER, *wait, "@P1 BRA `(.L_x_1)") == [11]  # a wait makes its loop no outer one


def test_only_innermost_loops_count() -> None:
    inner = (".L_x_2", *FILLER, "@P0 BRA `(.L_x_2)")
    assert loops(".L_x_1", *FILLER, *inner, *FILLER, "@P1 BRA `(.L_x_1)") == [9]
    assert loops(
        ".L_x_1", *inner, ".L_x_3", *FILLER, FILLER[0], "BRA.U UP0, `(.L_x_3)", "@P1 BRA `(.L_x_1)"
    ) == [9, 10]


def test_two_branches_to_one_head_are_one_loop_of_the_shorter() -> None:
    assert loops(".L_x_1", *FILLER, "@P0 BRA `(.L_x_1)", *FILLER, "@P1 BRA `(.L_x_1)") == [9]


def test_pipes_do_not_overlap() -> None:
    opcodes = [opcode for listed in PIPES.values() for opcode in listed]
    assert len(opcodes) == len(set(opcodes))
    assert [pipe_of(name) for name in ("IADD3", "UIADD3", "UTCHMMA.2CTA", "USEL", "SHF.R")] == [
        "alu", "uniform", "mma", "uniform", "alu",
    ]  # fmt: skip
