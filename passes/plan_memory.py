"""Where every intermediate of a step lives: one workspace, reused as soon as a value has had its last reader.

A value takes c * T bytes: sizes in L count as T, as L <= T. So two values that must not overlap for one T never do,
and the plan is made once, over the coefficients c. Logits are an output, not workspace.
"""

import operator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from octavo.compiler.dims import ITEM_BYTES, as_expression, dim_names, dtype_name
from octavo.compiler.errors import IllegalGraphError

ALIGNMENT = 64
VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
# Arguments that a result may overwrite: the op reads element i of them before it writes element i of the result.
IN_PLACE = {
    torch.ops.octavo.add.default: {0: (0, 1)},
    torch.ops.octavo.add_rms_norm.default: {1: (0, 1)},
}


@dataclass(frozen=True)
class Placement:
    """Memory of one value: bytes [offset * T, (offset + width) * T) of the workspace; both multiples of 64."""

    name: str
    offset: int
    width: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of workspace per token: as planned, and if every value had memory of its own."""

    peak: int
    naive: int
    values: int
    reused_in_place: int


@dataclass
class _Value:
    """A piece of memory to place. first, last: indices of the nodes that write it and read it last, both included."""

    name: str
    width: int
    first: int
    last: int
    offset: int = -1


def plan_memory(graph: fx.Graph) -> MemoryReport:
    """Give every intermediate a place, as meta["buffer"]: a Placement, or a tuple of them for several results.

    A view and an item of a tuple carry the Placement of what they show. Nodes whose value is an input, a weight or
    the output have no meta["buffer"]. Raises IllegalGraphError for a value whose size is not a multiple of T or L.
    """
    values, owners = _lifetimes(graph)
    reused = _reuse_in_place(graph, owners)
    distinct = list({id(value): value for results in owners.values() for value in results}.values())
    peak = _place(distinct)
    for node, results in owners.items():
        placements = tuple(Placement(value.name, value.offset, value.width) for value in results)
        is_tuple = isinstance(node.meta["val"], tuple | list)
        node.meta["buffer"] = placements if is_tuple else placements[0]
    return MemoryReport(peak, sum(values), len(values), reused)
