"""`octavo inspect`: what an artifact holds, read without torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from octavo.compiler.artifact import Artifact
from octavo.compiler.expression import evaluate
from octavo.compiler.report import Report, plain_table, size_text, titled
from octavo.runtime.model_runner import page_bytes

IN_OTHER_PARTS = ("files", "checksum", "model", "options", "provenance")


def show_artifact(path: Path, as_json: bool) -> None:
    """Opening checks every file against its hash, so whatever is shown here was verified."""
    artifact = Artifact.open(path)
    facts = artifact_facts(artifact)
    if as_json:
        print(json.dumps({**facts, "files": artifact.manifest["files"]}, indent=1))
        return
    console = Console(highlight=False)
    for title, pairs in facts.items():
        console.print(_pairs(title, pairs))
        console.print()
    console.print(_files(artifact))


def artifact_facts(artifact: Artifact) -> dict[str, dict[str, Any]]:
    """What `inspect` shows but the files, sizes in bytes. page: a KV page in all layers; context_token: its part."""
    program, model, manifest = artifact.program, artifact.model, artifact.manifest
    full = {"T": model.max_batch_tokens, "R": 1, "L": 1, "P": -(-model.max_model_len // program.page_size)}
    plan = Report.of(artifact).data["memory"]
    return {
        "artifact": {
            "path": str(artifact.path),
            **{name: value for name, value in manifest.items() if name not in IN_OTHER_PARTS},
            **manifest["provenance"],
        },
        "model": dict(manifest["model"]),
        "options": dict(manifest["options"]),
        "program": {
            "launches": len(program.steps),
            "kernels": len({step.kernel for step in program.steps}),
            "buffers": len(program.buffers),
            "page_size": program.page_size,
        },
        "memory": {
            "weights": sum(weight.array.nbytes for weight in artifact.weights.values()),
            "page": page_bytes(program),
            "context_token": page_bytes(program) // program.page_size,
            "workspace": str(program.workspace),
            "workspace_at_most": evaluate(program.workspace, {**full, "num_pages": full["P"] + 1}),
            "token": plan["peak"],
            **({"step": plan["fixed"]} if plan["fixed"] else {}),
            "token_without_reuse": plan["naive"],
        },
    }


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
