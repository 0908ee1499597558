"""How one op of the dialect is described and made known to torch. Knows no particular op."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

# Sums, exponentials and divisions run in this dtype or a wider one, so that an fp64 run is fp64 throughout.
ACCUMULATE = torch.float32


@dataclass(frozen=True)
class Op:
    """An op of the `octavo::` dialect.

    schema     as torch.library takes it, without the namespace
    reference  eager semantics in plain torch: the definition, the fall-back and the oracle of kernel tests
    fake       shapes and dtypes of the results from those of the arguments
    summary    the equation, one line
    """

    schema: str
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    summary: str

    @property
    def name(self) -> str:
        return self.schema.split("(", 1)[0]


_LIBRARY = torch.library.Library("octavo", "DEF")


def register(op: Op) -> None:
    """Make `torch.ops.octavo.<name>` callable on every device, and traceable with symbolic sizes."""
    _LIBRARY.define(op.schema)
    _LIBRARY.impl(op.name, op.reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"octavo::{op.name}", op.fake, lib=_LIBRARY)


def accumulator(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a reference computes: at least fp32, fp64 for fp64 inputs."""
    return torch.promote_types(x.dtype, ACCUMULATE)
