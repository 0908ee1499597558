"""Tables fit 80 columns and show what the data holds."""

from typing import Any

import pytest

from octavo.compiler.report import (
    Report,
    as_text,
    kernel_table,
    pass_table,
    seconds_line,
    short_names,
    size_text,
)


def a_pass(**changes: Any) -> dict[str, Any]:
    row = {
        "pass": "fold_position_tables", "matched": 732, "rejected": 0, "near_misses": 0, "nodes_before": 2053,
        "nodes_after": 1672, "ms": 12345.6, "proven_sites": 24, "worst_error": 2.4e-3, "error_bound": 3.2e-2,
        "reasons": [],
    }  # fmt: skip
    return {**row, **changes}


def a_kernel(name: str = "linear__bf16_n960_k576_m128__8c25003fbb", **changes: Any) -> dict[str, Any]:
    row = {
        "name": name, "op": "linear", "when": "T > 64", "registers": 255, "spill_bytes": 16,
        "shared_bytes": 147556, "tmem_columns": 256, "num_warps": 8, "instructions": 12696,
        "key_opcodes": "UTCHMMA 4, LDTM 2",
        "refused": 0, "compile_s": 0.4,
    }  # fmt: skip
    return {**row, **changes}


def widest(text: str) -> int:
    return max(len(line) for line in text.splitlines())


def test_pass_table() -> None:
    rows = [
        a_pass(),
        a_pass(
            **{
                "pass": "fuse_rope",
                "proven_sites": 0,
                "notes": {"folded": 3, "lost": 0},
                "reasons": ["node a: odd head", *"bcd"],
            }
        ),
    ]
    text = as_text(pass_table(rows))
    assert widest(text) <= 80
    lines = text.splitlines()
    assert "2053 nodes" in lines[0]
    assert lines[3].split() == [
        "fold_position_tables",
        "732",
        "0",
        "0",
        "1672",
        "12346",
        "24",
        "2.4e-03",
        "3.2e-02",
    ]
    assert lines[4].split()[-3:] == ["-", "-", "-"]
    assert lines[5:] == ["fuse_rope: folded 3", "fuse_rope: node a: odd head", "fuse_rope: b", "fuse_rope: c"]
    assert as_text(pass_table([])).startswith("passes (0 nodes")


def test_gpu_kernels() -> None:
    long = "paged_attention_prefill__bf16_h9_kv3_d64_p64__61abdf69ee"
    text = as_text(kernel_table([a_kernel(), a_kernel(long, when="", key_opcodes="")]))
    assert widest(text) <= 80
    lines = text.splitlines()
    assert lines[1].split() == ["kernel", "regs", "spill", "smem", "tmem", "warps", "instr"]
    assert lines[3].split() == ["linear__bf16_n960_k576_m128", "255", "16", "147556", "256", "8", "12696"]
    assert lines[4] == "  if T > 64; UTCHMMA 4, LDTM 2"
    assert lines[5].startswith(long.removesuffix("__61abdf69ee") + " ")
    assert len(lines) == 6


def test_host_kernels() -> None:
    row = {
        "name": "linear__fp32_n49152_k576__dbeb8d9a46",
        "op": "linear",
        "bytes": "L * 198912",
        "flops": "L * 7",
    }
    lines = as_text(kernel_table([row])).splitlines()
    assert lines[0] == "1 kernels"
    assert lines[3].split("  ")[0].strip().startswith("linear__fp32_n49152_k576 ")
    assert "L * 198912" in lines[3] and lines[3].endswith("L * 7")


def test_report_is_both_tables() -> None:
    text = str(Report({"passes": [a_pass()], "kernels": [a_kernel()]}))
    assert text.index("passes (") < text.index("\n\n") < text.index("1 kernels")


def test_short_names_stay_different() -> None:
    rows = [{"name": name} for name in ("gather__a__1", "gather__a__2", "rope__b__3", "plain")]
    assert list(short_names(rows).values()) == ["gather__a__1", "gather__a__2", "rope__b", "plain"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (2**41, "2048.0 GiB")],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text


def test_seconds() -> None:
    assert seconds_line({"capture": 1.04, "passes": 2.0}) == "capture 1.0 s, passes 2.0 s (in all 3.0 s)"
