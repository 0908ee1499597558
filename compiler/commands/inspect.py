"""`octavo inspect`: what an artifact holds, read without torch."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import OptionError
from octavo.compiler.expression import evaluate
from octavo.compiler.precision_plot import draw_precision
from octavo.compiler.precision_table import precision_tables
from octavo.compiler.program import Program
from octavo.compiler.report import Report, plain_table, size_text, titled
from octavo.runtime.model_runner import num_bytes, page_bytes

IN_OTHER_PARTS = ("files", "checksum", "model", "options", "provenance")
OWN_TABLES = ("carving", "quantization")  # of the provenance
UNSEEN = ("config", "calibration", "plan", "outer_scales", "sources")  # of what is told of quantisation


def show_artifact(path: Path, as_json: bool, plot: Path | None = None) -> None:
    """Opening checks every file against its hash, so whatever is shown here was verified.

    plot  where to draw the formats of a quantised artifact
    """
    artifact = Artifact.open(path)
    facts = artifact_facts(artifact)
    precision = Report.of(artifact).data.get("precision")
    if plot is not None:
        if precision is None:
            raise OptionError("--plot: expected a quantised artifact, got one in the model's dtype")
        draw_precision(
            plot, precision, f"{artifact.manifest['model']['name']} for {artifact.manifest['target']}"
        )
    if as_json:
        files = artifact.manifest["files"]
        print(
            json.dumps(
                {
                    **facts,
                    **({"precision": precision} if precision else {}),
                    "weight_types": artifact.types(),
                    "files": files,
                },
                indent=1,
            )
        )
        return
    console = Console(highlight=False)
    for title, pairs in facts.items():
        console.print(_pairs(title, pairs))
        console.print()
    for table in precision_tables(precision) if precision else ():
        console.print(table)
        console.print()
    console.print(_files(artifact))


def artifact_facts(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """What `inspect` shows but the files, sizes in bytes. page: a KV page in all layers; context_token: its part."""
    program, model, manifest = artifact.program, artifact.model, artifact.manifest
    full = {
        "T": model.max_batch_tokens, "R": 1, "L": 1, "P": -(-model.max_model_len // program.page_size),
        "N": model.max_batch_tokens * program.mesh.dp,
    }  # fmt: skip
    plan = Report.of(artifact).data["memory"]
    return {
        "artifact": {
            "path": str(artifact.path),
            **{name: value for name, value in manifest.items() if name not in IN_OTHER_PARTS},
            **{name: value for name, value in manifest["provenance"].items() if name not in OWN_TABLES},
        },
        **_carving(manifest["provenance"].get("carving")),
        **_quantization(manifest["provenance"].get("quantization")),
        **_types(artifact.types()),
        "model": dict(manifest["model"]),
        "options": {
            name: value for name, value in manifest["options"].items() if not isinstance(value, dict)
        },
        "program": {
            "launches": len(program.steps),
            "kernels": len({step.kernel for step in program.steps}),
            "buffers": len(program.buffers),
            "page_size": program.page_size,
        },
        **_ranks(artifact),
        "memory": {
            "weights": sum(weight.array.nbytes for weight in artifact.weights.values()),
            **({"weights_of_a_rank": _held(program)} if program.mesh.world > 1 else {}),
            "page": page_bytes(program),
            "context_token": page_bytes(program) // program.page_size,
            "workspace": str(program.workspace),
            "workspace_at_most": evaluate(program.workspace, {**full, "num_pages": full["P"] + 1}),
            "token": plan["peak"],
            **({"step": plan["fixed"]} if plan["fixed"] else {}),
            "token_without_reuse": plan["naive"],
        },
    }


def _ranks(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """How the program is spread: the mesh, what is cut, where experts lie, and how often each collective runs."""
    program, options = artifact.program, artifact.manifest["options"]
    if program.mesh.world == 1:
        return {}
    steps = Counter(f"{step.kernel} over {step.axis}" for step in program.collectives)
    local = {buffer.name: buffer.shape for buffer in program.of_kind("weight")}
    experts = Counter(
        (len(artifact.weights[layer.weights[0]].array), local[layer.weights[0]][0])
        for layer in program.experts
    )
    spread = ", ".join(
        f"{count} layer{'s' * (count > 1)} of {total}, room for {own} on a rank"
        for (total, own), count in experts.items()
    )
    wire = (options.get("parallel") or {}).get("wire")
    return {
        "ranks": {
            "mesh": str(program.mesh),
            "processes": program.mesh.world,
            **({"experts": spread} if spread else {}),
            **({"wire": wire} if program.mesh.dp > 1 and wire else {}),
            "weights_cut": f"{len(program.shards)} of {len(local)}; every rank has the others whole",
            **dict(sorted(steps.items())),
        }
    }


def _held(program: Program) -> int:
    """Bytes of weights on every rank, places for copies of experts included."""
    return sum(num_bytes(buffer, {}) for buffer in program.of_kind("weight"))


def _carving(provenance: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """How FFNs were cut into experts."""
    return {} if provenance is None else {"carving": {**provenance["config"], **provenance["calibration"]}}


def _quantization(provenance: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """How it was quantised; formats have a table of their own."""
    if provenance is None:
        return {}
    facts = {**provenance["config"], **provenance, **(provenance["calibration"] or {})}
    return {"quantization": {k: v for k, v in facts.items() if k not in UNSEEN}}


def _types(types: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """How many weights are codes of each type, their shapes left out."""
    codes = [text.partition(": ")[2] for text in types.values() if text.startswith("codes of ")]
    found = Counter(re.sub(r"\[.*?\]", "", kind) for kind in codes)
    return {"types": dict(sorted(found.items()))} if found else {}


def _pairs(title: str, pairs: Mapping[str, Any]) -> RenderableType:
    table = plain_table("", "", left=("",))
    table.show_header = False
    for name, value in pairs.items():
        is_size = title == "memory" and isinstance(value, int)
        table.add_row(f"{name:<20}", size_text(value) if is_size else str(value))
    return titled(title, table)


def _files(artifact: Artifact) -> RenderableType:
    total = sum(entry.num_bytes for entry in artifact.files.values())
    title = f"{len(artifact.files)} files, {size_text(total)}; all match their sha256"
    table = plain_table("file", "size", "sha256", left=("file",))
    for name, entry in sorted(artifact.files.items()):
        table.add_row(name, size_text(entry.num_bytes), entry.sha256[:12])
    return titled(title, table)
