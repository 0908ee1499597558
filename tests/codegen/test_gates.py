"""Each limit by itself, on records made by hand; test_build_triton.py breaks them with real kernels."""

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest

from octavo.codegen.gates import base_opcodes, required_opcodes, violations
from octavo.codegen.kernel import KernelSpec
from octavo.compiler.target import load_target

B200 = load_target("b200")
LINEAR = KernelSpec(
    "linear", "triton/linear.py.jinja", (), (), features=("tma_load", "tma_store", "mma_16bit")
)
GOOD: dict[str, Any] = {
    "launch": {"num_warps": 8, "tmem_columns": 512, "shared_bytes": 232448, "global_scratch": [0, 1]},
    "evidence": {
        "spill_bytes": 0,
        "registers": 255,
        "census": {"UTCHMMA": 4, "UTMALDG.2D": 2, "UTMASTG.2D": 2, "LDC.64": 9},
        "loops": [{"opcodes": {"LDG.E.128": 4, "LDG.E": 1, "F2FP.BF16.F32.PACK_AB": 8}}],
    },
}


def broken(part: str, **values: Any) -> list[str]:
    record = deepcopy(GOOD)
    record[part].update(values)
    return violations(LINEAR, B200, record)


def test_a_kernel_at_its_limits_may_ship() -> None:
    assert violations(LINEAR, B200, GOOD) == []


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("evidence", {"spill_bytes": 4}, "spilled bytes: at most 0, got 4"),
        ("launch", {"tmem_columns": 576}, "tensor-memory columns: at most 512, got 576"),
        ("launch", {"shared_bytes": 232449}, "shared-memory bytes: at most 232448, got 232449"),
        ("launch", {"num_warps": 16}, "registers of one program: at most 65536, got 130560"),
        ("launch", {"global_scratch": [256, 128]}, "global scratch bytes: at most 0, got 256"),
        (
            "evidence",
            {"census": {"UTCHMMA": 1, "UTMALDG": 1, "UTMASTG": 1, "LDL.64": 2, "STL": 1}},
            "local loads and stores: at most 0, got 3",
        ),
    ],
)
def test_each_limit_has_a_message_with_its_numbers(part: str, values: dict[str, Any], message: str) -> None:
    assert broken(part, **values) == [message]


@pytest.mark.parametrize(
    ("opcodes", "message"),
    [
        ({"F2F.BF16.F32": 8}, "conversions of single values in a loop: at most 0, got 8"),
        ({"F2F": 1}, "conversions of single values in a loop: at most 0, got 1"),
        ({"LDG.E.U8": 2, "LDG.E.U16.CONSTANT": 3}, "loads of 1 or 2 bytes in a loop: at most 0, got 5"),
    ],
)
def test_loops_hold_nothing_slow(opcodes: dict[str, int], message: str) -> None:
    fast = {"opcodes": {"LDG.E.128": 4}}
    assert broken("evidence", loops=[fast, {"opcodes": opcodes}]) == [message]


def test_kernels_for_odd_sizes_may_load_single_elements() -> None:
    record = deepcopy(GOOD)
    record["evidence"]["loops"] = [{"opcodes": {"LDG.E.U16": 8}}]
    assert len(violations(LINEAR, B200, record)) == 1
    assert violations(replace(LINEAR, narrow_loads=True), B200, record) == []


def test_a_body_that_is_a_trap_is_seen() -> None:
    found = broken("evidence", census={"BPT.TRAP": 1, "EXIT": 1})
    assert found[0] == "body: expected stores, got none in 2 instructions (a trap)"


def test_a_promised_feature_that_is_not_there_is_named_with_what_is() -> None:
    assert broken("evidence", census={"HMMA.16816.F32.BF16": 8, "STG.E": 1, "UTMALDG": 1, "UTMASTG": 1}) == [
        "instructions: expected mma_16bit (UTCHMMA), got HMMA, STG, UTMALDG, UTMASTG"
    ]


def test_required_opcodes_depend_on_the_arch() -> None:
    assert required_opcodes(LINEAR, B200)["mma_16bit"] == "UTCHMMA"
    assert required_opcodes(LINEAR, replace(B200, arch=90))["mma_16bit"] == "HGMMA"
    assert required_opcodes(LINEAR, load_target("cpu")) == {}
    assert required_opcodes(replace(LINEAR, features=()), B200) == {}


def test_block_scaled_products_are_told_from_others_by_their_modifiers() -> None:
    scaled = replace(LINEAR, features=("mma_nvfp4",))
    record = deepcopy(GOOD)
    assert "expected mma_nvfp4" in violations(scaled, B200, record)[0]
    record["evidence"]["census"]["UTCOMMA"] = 4
    assert "expected mma_nvfp4" in violations(scaled, B200, record)[0]
    record["evidence"]["census"]["UTCOMMA.4X"] = 4
    assert violations(scaled, B200, record) == []
    b300 = load_target("b300")
    assert "expected mma_nvfp4" in violations(scaled, b300, record)[0]
    record["evidence"]["census"]["UTCOMMA.BLOCK16"] = 4
    assert violations(scaled, b300, record) == []


def test_a_kernel_that_may_begin_early_waits() -> None:
    early = replace(LINEAR, waits=True)
    record = deepcopy(GOOD)
    assert "expected wait_for_grid (ACQBULK)" in violations(early, B200, record)[0]
    record["evidence"]["census"]["ACQBULK"] = 1
    assert violations(early, B200, record) == []


def test_modifiers_do_not_split_counts() -> None:
    assert base_opcodes({"LDG.E.128": 2, "LDG.E": 3, "STG.E": 1}) == {"LDG": 5, "STG": 1}
