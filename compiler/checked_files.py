"""Files of an artifact: regular files inside its directory, with the size and sha256 they must have."""

import hashlib
import mmap
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from octavo.compiler.errors import ArtifactError

MANIFEST = "manifest.json"
MAX_FILE_BYTES = 4 * 2**30

_PART = r"(?!\.{1,2}(/|$))[A-Za-z0-9_.+=@-]{1,200}"
_PATH = re.compile(rf"{_PART}(/{_PART}){{0,7}}")


@dataclass(frozen=True)
class FileEntry:
    """Size and hash that a file must have."""

    num_bytes: int
    sha256: str


def check_path(root: Path, name: str) -> None:
    if not _PATH.fullmatch(name):
        raise damaged(
            root / MANIFEST, "a relative path of plain names that stays inside the artifact", f"'{name}'"
        )


def check_listing(root: Path, entries: Mapping[str, FileEntry]) -> None:
    present = set(walk(root))
    for name in sorted(set(entries) - present):
        raise damaged(root / name, f"a file of {entries[name].num_bytes} bytes", "no such file")
    for name in sorted(present - set(entries) - {MANIFEST}):
        raise damaged(root / name, f"only files that {MANIFEST} lists", "a foreign file")


def walk(root: Path) -> Iterator[str]:
    """Every file below root as a path with /; anything but regular files and directories is refused."""
    for folder, directories, names in os.walk(root):
        for name in (*directories, *names):
            path = Path(folder) / name
            mode = path.lstat().st_mode
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                kind = "a symbolic link" if stat.S_ISLNK(mode) else "a special file"
                raise damaged(path, "a regular file", kind)
        yield from ((Path(folder) / name).relative_to(root).as_posix() for name in names)


def _open_regular(root: Path, name: str) -> int:
    try:
        handle = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise damaged(root / name, "a readable file", error.strerror) from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise damaged(root / name, "a regular file", "a special file")
    return handle


def read_regular(root: Path, name: str, limit: int) -> bytes:
    with os.fdopen(_open_regular(root, name), "rb") as handle:
        content = handle.read(limit + 1)
    if len(content) > limit:
        raise damaged(root / name, f"at most {limit} bytes", "more")
    return content


def read_checked(root: Path, name: str, entry: FileEntry) -> bytes:
    content = read_regular(root, name, MAX_FILE_BYTES)
    _check_entry(root / name, entry, FileEntry(len(content), hashlib.sha256(content).hexdigest()))
    return content


def check_file(root: Path, name: str, entry: FileEntry) -> None:
    with os.fdopen(_open_regular(root, name), "rb") as handle:
        _check_size(root / name, entry, os.fstat(handle.fileno()).st_size)
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    _check_entry(root / name, entry, FileEntry(entry.num_bytes, digest))


def map_checked(root: Path, name: str, entry: FileEntry) -> mmap.mmap:
    """Map first, hash the mapping: what was checked is what is used, even if the path is swapped later."""
    with os.fdopen(_open_regular(root, name), "rb") as handle:
        _check_size(root / name, entry, os.fstat(handle.fileno()).st_size)
        if entry.num_bytes == 0:
            raise damaged(root / name, "a safetensors file", "0 bytes")
        mapped = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    _check_entry(root / name, entry, FileEntry(len(mapped), hashlib.sha256(mapped).hexdigest()))
    return mapped


def entry_of(path: Path) -> FileEntry:
    with path.open("rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    return FileEntry(path.stat().st_size, digest)


def _check_size(path: Path, entry: FileEntry, num_bytes: int) -> None:
    if num_bytes != entry.num_bytes:
        raise damaged(path, f"{entry.num_bytes} bytes", f"{num_bytes}")


def _check_entry(path: Path, entry: FileEntry, got: FileEntry) -> None:
    _check_size(path, entry, got.num_bytes)
    if got.sha256 != entry.sha256:
        raise damaged(path, f"sha256 {entry.sha256}", got.sha256)


def damaged(path: Path, expected: str, got: object) -> ArtifactError:
    return ArtifactError(
        f"{path}: expected {expected}, got {got}; the artifact is damaged, compile or copy it again"
    )
