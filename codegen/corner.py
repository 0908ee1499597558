"""One case of a Triton template that every arch must build, or refuse with a reason. Knows no template."""

from collections.abc import Callable
from dataclasses import dataclass

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.target import Target


def never(target: Target) -> None:
    """The refusal of a corner that every arch serves."""


@dataclass(frozen=True)
class Corner:
    """A spec at sizes where a kernel is used, or at an edge of what it takes.

    name    what the corner is: "W4A4, persistent, 8192 x 8192"
    make    the spec (all its launches are built) for a target
    refuse  why a target is not served, with what serves it instead; None if it is
    """

    name: str
    make: Callable[[Target], KernelSpec]
    refuse: Callable[[Target], str | None] = never
