"""The artifact: what `compile` hands to the runtime. Checked files in a directory; no pickle.

Hashes find damage, not forgery: an artifact runs code, so open only what you would run.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.compiler.checked_files import (
    MANIFEST,
    FileEntry,
    check_file,
    check_listing,
    check_path,
    damaged,
    entry_of,
    map_checked,
    read_checked,
    read_regular,
    walk,
)
from octavo.compiler.errors import ArtifactError
from octavo.compiler.host import usable_cores
from octavo.compiler.program import Dim, Program, Shard
from octavo.compiler.program_json import program_from_json, program_to_json
from octavo.compiler.weights import MappedWeight, Weight, map_weights, write_weights

FORMAT_VERSION = 1
PROGRAM, WEIGHTS = "program.json", "weights.safetensors"
TYPES = "types.json"  # of a quantised artifact: weight -> which part of which value it holds
STEP_TIMES = "step_times.json"  # seconds of a step by its tokens, which speculation weighs
MAX_MANIFEST_BYTES = 64 * 2**20
MAX_FILES = 100_000

_GIVEN = {"octavo_version", "target", "options", "model", "provenance"}
_ADDED = {"format_version", "files", "checksum"}
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class ModelInfo:
    """What serving needs to know of the model. Lengths in tokens.

    max_model_len     longest sequence (prompt and answer)
    max_batch_tokens  most tokens of one step
    """

    name: str
    vocab_size: int
    num_layers: int
    max_model_len: int
    max_batch_tokens: int
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None


@dataclass(frozen=True)
class Artifact:
    """An opened artifact: every file was checked, weights are mapped.

    manifest  format_version, octavo_version, target, options, model, provenance, files
    weights   by name; arrays are read-only views of the file
    files     every file but the manifest, by its path inside the artifact
    """

    path: Path
    manifest: Mapping[str, Any]
    model: ModelInfo
    program: Program
    weights: Mapping[str, MappedWeight]
    files: Mapping[str, FileEntry]

    @staticmethod
    def write(
        path: Path | str,
        *,
        manifest: Mapping[str, Any],
        program: Program,
        weights: Mapping[str, Weight],
        files: Mapping[str, bytes],
    ) -> Path:
        """Write an artifact directory whole or not at all; returns its path. Equal inputs give equal bytes.

        manifest  octavo_version, target, options, model (the fields of ModelInfo), provenance: JSON values
        files     further files, path with / -> content
        An artifact already at `path` is replaced; anything else there is left alone (ArtifactError).
        """
        final = Path(os.path.realpath(path))
        _check_given(final, manifest, program, weights, files)
        check_replaceable(final)
        building = final.with_name(f".{final.name}.{secrets.token_hex(6)}.part")
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            building.mkdir()
            _write_files(building, manifest, program, weights, files)
            _put_in_place(building, final)
        except OSError as error:
            raise ArtifactError(
                f"{final}: expected to write an artifact, got {error}; nothing was changed"
            ) from error
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return final

    @classmethod
    def open(cls, path: Path | str) -> "Artifact":
        """Check an artifact and map it; ArtifactError names the file, what was expected and what came."""
        root = Path(os.path.realpath(path))
        if not root.is_dir():
            got = "a file" if root.exists() else "nothing there"
            raise ArtifactError(
                f"{path}: expected an artifact directory, got {got}; `octavo compile` writes one"
            )
        manifest, entries = _read_manifest(root)
        check_listing(root, entries)
        others = [name for name in entries if name != WEIGHTS]
        with ThreadPoolExecutor(usable_cores()) as pool:  # hashlib lets other threads run
            mapped = pool.submit(map_checked, root, WEIGHTS, entries[WEIGHTS])
            for done in [pool.submit(check_file, root, name, entries[name]) for name in others]:
                done.result()
            weights = map_weights(root / WEIGHTS, mapped.result())
        text = read_checked(root, PROGRAM, entries[PROGRAM]).decode("utf-8", errors="replace")
        program = program_from_json(text, str(root / PROGRAM))
        shapes = {name: (weight.dtype, weight.shape) for name, weight in weights.items()}
        _check_weights(str(root / WEIGHTS), program, shapes)
        return cls(
            root, manifest, _model_info(str(root / MANIFEST), manifest["model"]), program, weights, entries
        )

    def types(self) -> dict[str, str]:
        """What weights hold of quantised values, by name: `codes of model.norm: nvfp4[576, 1536] octavo-v1 ...`."""
        return dict(json.loads(self.read(TYPES))) if TYPES in self.files else {}

    def read(self, name: str) -> bytes:
        """The bytes of a file of the artifact, checked again as they are read."""
        if name not in self.files:
            raise ArtifactError(f"{self.path}: expected a file '{name}', got none; compile it again")
        return read_checked(self.path, name, self.files[name])


def _check_given(
    final: Path,
    manifest: Mapping[str, Any],
    program: Program,
    weights: Mapping[str, Weight],
    files: Mapping[str, bytes],
) -> None:
    if set(manifest) != _GIVEN:
        raise damaged(final / MANIFEST, f"the keys {', '.join(sorted(_GIVEN))}", ", ".join(sorted(manifest)))
    _model_info(str(final / MANIFEST), manifest["model"])
    _check_weights(
        str(final / WEIGHTS), program, {name: (w.dtype, tuple(w.shape)) for name, w in weights.items()}
    )
    for name in files:
        check_path(final, name)
        if name in (MANIFEST, PROGRAM, WEIGHTS):
            raise damaged(final / name, "a file that the artifact does not write itself", name)


def check_replaceable(path: Path | str) -> None:
    """ArtifactError unless `path` is an artifact that holds nothing else, an empty directory, or nothing."""
    final = Path(os.path.realpath(path))
    if not os.path.lexists(final) or (final.is_dir() and not any(final.iterdir())):
        return
    advice = "nothing was changed; choose another path or remove it yourself"
    try:
        _, entries = _read_manifest(final)
    except ArtifactError as error:
        raise ArtifactError(
            f"{final}: expected no file, or an artifact to replace; {advice} ({error})"
        ) from None
    if foreign := sorted(set(walk(final)) - set(entries) - {MANIFEST}):
        raise ArtifactError(f"{final}: expected only the artifact's own files, got '{foreign[0]}'; {advice}")


def _write_files(
    folder: Path,
    manifest: Mapping[str, Any],
    program: Program,
    weights: Mapping[str, Weight],
    files: Mapping[str, bytes],
) -> None:
    with (folder / WEIGHTS).open("wb") as handle:
        write_weights(handle, weights)
    for name, content in {**files, PROGRAM: program_to_json(program).encode()}.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    program_from_json(
        (folder / PROGRAM).read_text(), str(folder / PROGRAM)
    )  # never write what cannot be opened
    entries = {name: entry_of(folder / name) for name in sorted(walk(folder))}
    listing = {name: {"bytes": entry.num_bytes, "sha256": entry.sha256} for name, entry in entries.items()}
    (folder / MANIFEST).write_text(
        _manifest_text({**manifest, "format_version": FORMAT_VERSION, "files": listing}), encoding="utf-8"
    )


def _put_in_place(building: Path, final: Path) -> None:
    if not os.path.lexists(final):
        building.rename(final)
        return
    old = final.with_name(f".{final.name}.{secrets.token_hex(6)}.old")
    final.rename(old)
    try:
        building.rename(final)
    except BaseException:
        old.rename(final)
        raise
    shutil.rmtree(old)


def _manifest_text(manifest: Mapping[str, Any]) -> str:
    """Canonical text, with a checksum over the canonical text without it."""
    fields = {name: value for name, value in manifest.items() if name != "checksum"}
    checksum = hashlib.sha256(_canonical(fields).encode()).hexdigest()
    return _canonical({**fields, "checksum": checksum})


def _canonical(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def _read_manifest(root: Path) -> tuple[dict[str, Any], dict[str, FileEntry]]:
    path = root / MANIFEST
    raw = read_regular(root, MANIFEST, MAX_MANIFEST_BYTES)
    try:
        manifest = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise damaged(path, "JSON", error) from None
    if not isinstance(manifest, dict) or type(manifest.get("format_version")) is not int:
        raise damaged(path, "an Octavo manifest with a format_version", str(manifest)[:80])
    version = manifest["format_version"]
    if version != FORMAT_VERSION:
        advice = "install a newer octavo" if version > FORMAT_VERSION else "compile the model again"
        raise ArtifactError(
            f"{path}: expected format_version {FORMAT_VERSION}, got {version} "
            f"(written by octavo {manifest.get('octavo_version', 'of unknown version')}); {advice}"
        )
    if set(manifest) != _GIVEN | _ADDED:
        raise damaged(path, f"the keys {', '.join(sorted(_GIVEN | _ADDED))}", ", ".join(sorted(manifest)))
    if raw != _manifest_text(manifest).encode():
        raise damaged(path, "text that matches its own checksum", "an edited or damaged manifest")
    return manifest, _entries(root, manifest["files"])


def _entries(root: Path, listing: Any) -> dict[str, FileEntry]:
    if not isinstance(listing, dict) or not {PROGRAM, WEIGHTS} <= set(listing) or len(listing) > MAX_FILES:
        raise damaged(
            root / MANIFEST, f"at most {MAX_FILES} files with {PROGRAM} and {WEIGHTS}", str(listing)[:80]
        )
    entries = {}
    for name, entry in listing.items():
        check_path(root, name)
        match entry:
            case {"bytes": int(num_bytes), "sha256": str(digest)} if num_bytes >= 0 and _DIGEST.fullmatch(
                digest
            ):
                entries[name] = FileEntry(num_bytes, digest)
            case _:
                raise damaged(root / MANIFEST, f"bytes and sha256 of '{name}'", str(entry)[:80])
    return entries


def _check_weights(where: str, program: Program, given: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    """The program's weight buffers and the tensors are the same names, dtypes and shapes, pieces inside of them."""
    wanted = {buffer.name: (buffer.dtype, buffer.shape) for buffer in program.of_kind("weight")}
    for name, shard in program.shards.items():
        if name in wanted and name in given:
            wanted[name] = _whole(where, name, shard, wanted[name], given[name])
    for name in sorted(set(wanted) | set(given)):
        if wanted.get(name) != given.get(name):
            expected, got = wanted.get(name, "no such tensor"), given.get(name, "none")
            raise ArtifactError(
                f"{where}: tensor '{name}': expected {expected}, got {got}; compile the model again"
            )


def _whole(
    where: str, name: str, shard: Shard, piece: tuple[str, tuple[Dim, ...]], given: tuple[str, tuple[int, ...]]
) -> tuple[str, tuple[Dim, ...]]:  # fmt: skip
    """Dtype and shape of the tensor that ranks hold pieces of: as given along their axis."""
    dtype, shape = piece
    length = given[1][shard.dim] if len(given[1]) == len(shape) else 0
    last = max((stop for own in shard.pieces for _, stop in own), default=0)
    if last > length:
        raise ArtifactError(
            f"{where}: tensor '{name}': expected {last} or more elements on axis {shard.dim}, got {length}; "
            "compile the model again"
        )
    return dtype, (*shape[: shard.dim], length, *shape[shard.dim + 1 :])


def _model_info(where: str, model: Any) -> ModelInfo:
    match model:
        case {
            "name": str(name),
            "vocab_size": int(vocab_size),
            "num_layers": int(num_layers),
            "max_model_len": int(max_model_len),
            "max_batch_tokens": int(max_batch_tokens),
            "eos_token_ids": list(eos) | tuple(eos),
            "bos_token_id": int() | None as bos,
        }:
            info = ModelInfo(name, vocab_size, num_layers, max_model_len, max_batch_tokens, tuple(eos), bos)
        case _:
            raise ArtifactError(
                f"{where}: model: expected {', '.join(ModelInfo.__annotations__)}, got {model}"
            )
    sizes = {"vocab_size": vocab_size, "max_model_len": max_model_len, "max_batch_tokens": max_batch_tokens}
    for field, value in sizes.items():
        if not 1 <= value < 2**31:
            raise ArtifactError(f"{where}: model: expected {field} of 1 to 2**31 - 1, got {value}")
    for token_id in info.eos_token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise ArtifactError(f"{where}: model: expected eos_token_ids below {vocab_size}, got {token_id}")
    return info
