"""An artifact written anew in its place, with what a machine's measurements add to it."""

from collections.abc import Mapping
from typing import Any

from octavo.compiler.artifact import PROGRAM, WEIGHTS, Artifact
from octavo.compiler.program import Program
from octavo.compiler.weights import Weight


def files_of(artifact: Artifact) -> dict[str, bytes]:
    """All files but the program and the weights."""
    return {name: artifact.read(name) for name in artifact.files if name not in (PROGRAM, WEIGHTS)}


def write_anew(
    artifact: Artifact,
    files: Mapping[str, bytes],
    provenance: Mapping[str, Any],
    program: Program | None = None,
) -> None:
    """Replace the artifact by one with these files, provenance beside its own, and this program if one is given."""
    manifest = {name: artifact.manifest[name] for name in ("octavo_version", "target", "options", "model")}
    weights = {name: Weight(w.dtype, w.shape, w.array) for name, w in artifact.weights.items()}
    Artifact.write(
        artifact.path,
        manifest={**manifest, "provenance": {**artifact.manifest["provenance"], **provenance}},
        program=artifact.program if program is None else program,
        weights=weights,
        files=files,
    )
