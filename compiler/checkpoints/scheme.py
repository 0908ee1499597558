"""What the configuration of a checkpoint says of each module: which format its weight and its inputs have."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from octavo.compiler.checkpoints.stored import Layout, place
from octavo.compiler.errors import CheckpointError
from octavo.compiler.options import PageFormat
from octavo.compiler.precision import Format

# What the tensors of a module are: codes of four bits with block scales, codes of eight bits, or plain values.
Kind = Literal["nvfp4", "fp8", "plain"]
KIND_OF: dict[Format, Kind] = {"nvfp4": "nvfp4", "nvfp4_weight_only": "nvfp4", "fp8": "fp8", "bf16": "plain"}
# How closely a target names a module.
NO_MATCH, BY_CLASS, BY_PATTERN, BY_NAME = range(4)


@dataclass(frozen=True)
class Group:
    """Modules of one format. targets: names, patterns ("re:..." or globs) or classes of modules ("Linear").

    static_inputs  one scale for all rows, which the files hold; else each row has its own, or inputs stay
    by_row         fp8: outer scales of the weight's rows, else one
    """

    targets: tuple[str, ...]
    format: Format
    static_inputs: bool
    by_row: bool = False


@dataclass(frozen=True)
class Scheme:
    """ignore: names and patterns of modules that stay plain. pages: of keys and values."""

    layout: Layout
    groups: tuple[Group, ...]
    ignore: tuple[str, ...] = ()
    pages: PageFormat = "bf16"

    def group_of(self, module: str, kind: Kind) -> Group | None:
        """The group of a module whose tensors are of this kind; None of a plain one.

        Where several groups name a module equally closely, its tensors decide. Raises CheckpointError where they and
        the configuration contradict each other.
        """
        closeness = [
            max(map(lambda t: match(module, t), group.targets), default=NO_MATCH) for group in self.groups
        ]
        best = max(closeness, default=NO_MATCH)
        named = [
            group for group, close in zip(self.groups, closeness, strict=True) if close == best != NO_MATCH
        ]
        is_ignored = any(match(module, target) > BY_CLASS for target in self.ignore)
        if kind == "plain":
            if named and best > BY_CLASS and not is_ignored:
                raise _contradiction(module, named, "plain values")
            return None
        if is_ignored or not named:
            raise CheckpointError(
                f"{place(module)}: its tensors are quantised ({kind}), and the configuration leaves it out"
            )
        fitting = [group for group in named if KIND_OF[group.format] == kind]
        if not fitting:
            raise _contradiction(module, named, kind)
        if len({(group.format, group.static_inputs) for group in fitting}) > 1:
            raise _contradiction(module, fitting, f"{kind}, which fits each of them")
        return fitting[0]


def _contradiction(module: str, groups: Sequence[Group], found: str) -> CheckpointError:
    said = " and ".join(sorted({group.format for group in groups}))
    return CheckpointError(
        f"{place(module)}: the configuration says {said}, its tensors are {found}; the configuration and the files are "
        "not of one checkpoint"
    )


def match(module: str, target: str) -> int:
    """How closely a target names a module."""
    if target == module:
        return BY_NAME
    if target.startswith("re:"):
        return BY_PATTERN if re.match(target.removeprefix("re:"), module) else NO_MATCH
    if "*" in target:
        return BY_PATTERN if fnmatch.fnmatchcase(module, target) else NO_MATCH
    # Names of classes have no dots. Only Linear modules are quantised, whatever class stands there.
    return BY_CLASS if target == "Linear" else NO_MATCH
