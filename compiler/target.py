"""What a target is: one file of compiler/targets, read as data. Nothing here knows a kernel."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import resources
from typing import Any, Literal

from octavo.compiler.errors import OptionError

Family = Literal["cpp", "triton"]


@dataclass(frozen=True)
class Target:
    """A machine to compile for.

    family     which templates serve it
    page_size  tokens per KV page unless the user chooses
    arch       compute capability times ten (100 is sm_100); None for a CPU
    flops      dense FLOP/s per dtype
    The other figures are None where the target file does not state them.
    """

    name: str
    family: Family
    page_size: int
    arch: int | None = None
    sm_count: int | None = None
    clock_mhz: int | None = None
    hbm_bytes: int | None = None
    hbm_bytes_per_s: float | None = None
    l2_bytes: int | None = None
    smem_bytes: int | None = None
    tmem_columns: int | None = None
    registers_per_sm: int | None = None
    threads_per_sm: int | None = None
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)


def target_names() -> tuple[str, ...]:
    """Names of all targets, sorted: one per file of compiler/targets."""
    folder = resources.files("octavo.compiler") / "targets"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def load_target(name: str) -> Target:
    """The target of that name. Raises OptionError for a name without a file, listing those that exist."""
    known = target_names()
    if name not in known:
        raise OptionError(f"target: expected one of {', '.join(known)}, got {name!r}")
    text = (resources.files("octavo.compiler") / "targets" / f"{name}.toml").read_text()
    return parse_target(tomllib.loads(text), f"targets/{name}.toml")


def parse_target(entries: Mapping[str, Any], where: str) -> Target:
    """A Target from a file's entries. Raises OptionError on an entry that is unknown or missing."""
    unknown = sorted(set(entries) - {f.name for f in fields(Target)})
    missing = sorted({"name", "family", "page_size"} - set(entries))
    if unknown or missing:
        raise OptionError(f"{where}: missing entries {missing}, unknown entries {unknown}")
    if entries["family"] not in ("cpp", "triton"):
        raise OptionError(f"{where}: family must be cpp or triton, got {entries['family']!r}")
    return Target(**entries)
