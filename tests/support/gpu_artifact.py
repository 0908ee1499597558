"""An artifact for b200 that is made by hand: two kernels without code, with the metadata that a build leaves."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.compiler.artifact import Artifact
from octavo.compiler.program import STEP_INPUTS, Buffer, Program, Step

LAYERS = 3
FEW = "linear_few_rows__bf16_n4096_k4096_m16__aaaaaaaaaa"
MANY = "linear__bf16_n4096_k4096_m128__bbbbbbbbbb"
ADD = "add__fp32__cccccccccc"


def record(**work: Any) -> dict[str, Any]:
    """Metadata of a small kernel of one warp group with a loop of products."""
    loop = {"instructions": 80, "pipes": {"alu": 72, "mma": 8}, "opcodes": {"HMMA": 8, "UTMALDG.2D": 2}}
    work = {
        "bytes": "T * 16384 + 33554432", "flops": "T * 33554432", "iterations": "4096", "tiles": "", "when": "",
        "grid": ["128", "1", "1"], "num_warps": 4, "num_stages": 6, "rate": "bf16", "turn_bytes": 12288,
        "turn_flops": 0, **work,
    }  # fmt: skip
    return {
        "launch": {"num_warps": 4, "shared_bytes": 61480, "tmem_columns": 0},
        "evidence": {
            "registers": 29, "spill_bytes": 0, "census": {"HMMA": 8, "UTMALDG.2D": 2, "STG.E": 2}, "compile_s": 0.5,
            "pipes": {"alu": 300, "mma": 8, "lsu": 4}, "loops": [loop],
        },
        "choice": {"numbers": "BLOCK_N=32", "refused": [], "losers": [{"name": "x"}], "dropped": []},
        "work": work, "works": [work],
    }  # fmt: skip


def records() -> dict[str, dict[str, Any]]:
    """add is launched for T rows and for L: one kernel, two works."""
    add = record(bytes="T * 12", flops="T", iterations="", grid=["T", "1", "1"], num_stages=1, turn_bytes=0)
    add["works"].append({**add["work"], "bytes": "L * 12", "flops": "L", "grid": ["L", "1", "1"]})
    many = {"when": "T > 16", "tiles": "(T + 127) // 128 * 32", "iterations": "(T + 127) // 128 * 2048"}
    return {FEW: record(when="T <= 16"), MANY: record(**many), ADD: add}


def write_gpu_artifact(
    path: Path, changed: Mapping[str, Any] | None = None, more: Mapping[str, bytes] | None = None
) -> Path:
    """The artifact at `path`. changed: kernel name -> its metadata, in place of what records() has; more: files."""
    kernels = {**records(), **(changed or {})}
    weight = Step(FEW, ("x", "logits"), ("128", "1", "1"), "T <= 16")
    many = Step(MANY, ("x", "logits"), ("128", "1", "1"), "T > 16")
    adds = Step(ADD, ("x",), ("T", "1", "1")), Step(ADD, ("logits",), ("L", "1", "1"))
    steps = (*(weight, many, adds[0]) * LAYERS, adds[1])
    buffers = (
        Buffer("input_ids", "input", *STEP_INPUTS["input_ids"]),
        Buffer("x", "workspace", "fp32", ("T", 8), 0),
        Buffer("logits", "output", "fp32", ("L", 8)),
    )
    rows = [{"name": name, "op": name.partition("__")[0], "when": "", "registers": 29} for name in kernels]
    report = {
        "passes": [],
        "kernels": rows,
        "selections": [],
        "memory": {"peak": 64, "naive": 64, "fixed": 0},
    }
    files = {f"kernels/{name}.json": json.dumps(kept).encode() for name, kept in kernels.items()}
    model = {
        "name": "by-hand", "vocab_size": 8, "num_layers": LAYERS, "max_model_len": 8192, "max_batch_tokens": 2048,
        "eos_token_ids": [], "bos_token_id": None,
    }  # fmt: skip
    manifest = {
        "octavo_version": "0", "target": "b200", "options": {}, "model": model, "provenance": {},
    }  # fmt: skip
    return Artifact.write(
        path,
        manifest=manifest,
        program=Program(buffers, steps, "64 * T", 64),
        weights={},
        files={**files, **(more or {}), "report.json": json.dumps(report).encode()},
    )
