"""Where every intermediate of a step lives: one workspace, reused as soon as a value has had its last reader.

A value takes c * T bytes: sizes in L count as T, as L <= T. So two values that must not overlap for one T
never do, and the plan is made once, over the coefficients c. Logits are an output, not workspace.
"""

import operator
from dataclasses import dataclass

import sympy
import torch
from torch import fx

import octavo.compiler.ops  # noqa: F401  (registers the ops that IN_PLACE names)
from octavo.compiler.dims import as_expression, dim_names, dtype_name, is_view, leaves_graph
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.program import ITEM_BYTES

ALIGNMENT = 64
# result: arguments that it may overwrite, best first; kernels read element i of them before they write it.
IN_PLACE = {
    torch.ops.octavo.add.default: {0: (0, 1)},
    # The residual first: it then stays in one place through all layers, and fragments nothing.
    torch.ops.octavo.add_rms_norm.default: {1: (1, 0)},
}


@dataclass(frozen=True)
class Placement:
    """Memory of one value: workspace bytes [offset * T, (offset + width) * T); both multiples of 64."""

    name: str
    offset: int
    width: int


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of workspace per token: as planned, and if every value had memory of its own."""

    peak: int
    naive: int
    values: int
    in_place: int


@dataclass(eq=False)
class _Value:
    """A piece of memory to place. first, last: indices of the nodes that write it and that read it last."""

    name: str
    width: int
    first: int
    last: int
    offset: int = 0
    shares: "_Value | None" = None

    @property
    def memory(self) -> "_Value":
        """The value whose memory this one takes over, or itself."""
        return self.shares.memory if self.shares else self

    def overlaps(self, other: "_Value") -> bool:
        return self.first <= other.last and other.first <= self.last


def plan_memory(graph: fx.Graph) -> MemoryReport:
    """Give every intermediate a place, as meta["buffer"]: a Placement, or a tuple of them.

    A view and an item of a tuple carry the Placement of what they show. Nodes whose value is an input, a
    weight or the output have none. Raises IllegalGraphError for a value whose size is not a fixed multiple
    of T or L.
    """
    owned = _lifetimes(graph)
    values = list({id(value): value for results in owned.values() for value in results}.values())
    num_in_place = _reuse_in_place(graph, owned)
    peak = _place([value for value in values if not value.shares])
    for node, results in owned.items():
        placements = tuple(Placement(v.name, v.memory.offset, v.width) for v in results)
        node.meta["buffer"] = placements if isinstance(node.meta["val"], tuple | list) else placements[0]
    return MemoryReport(peak, sum(value.width for value in values), len(values), num_in_place)


def _lifetimes(graph: fx.Graph) -> dict[fx.Node, tuple[_Value, ...]]:
    """What each node's own results are, and from where to where they live."""
    rows = {symbol for symbol, name in dim_names(graph).items() if name in ("T", "L")}
    owned: dict[fx.Node, tuple[_Value, ...]] = {}
    for index, node in enumerate(graph.nodes):
        for source in node.all_input_nodes:
            for value in owned.get(source, ()):
                value.last = index
        if node.op != "call_function" or node.meta.get("val") is None or leaves_graph(node):
            continue
        source = node.args[0]
        if is_view(node):
            assert isinstance(source, fx.Node)
            if source in owned:
                owned[node] = owned[source]
        elif node.target is operator.getitem:
            assert isinstance(source, fx.Node) and isinstance(node.args[1], int)
            owned[node] = (owned[source][node.args[1]],)
        else:
            owned[node] = _results(node, index, rows)
    return owned


def _results(node: fx.Node, index: int, rows: set[sympy.Symbol]) -> tuple[_Value, ...]:
    value = node.meta["val"]
    if not isinstance(value, tuple | list):
        return (_Value(node.name, _width(node, value, rows), index, index),)
    return tuple(_Value(f"{node.name}.{i}", _width(node, v, rows), index, index) for i, v in enumerate(value))


def _width(node: fx.Node, value: torch.Tensor, rows: set[sympy.Symbol]) -> int:
    """Bytes per token, rounded up to ALIGNMENT."""
    count = sympy.Mul(*(as_expression(size) for size in value.shape))
    for symbol in count.free_symbols & rows:
        per_row = count / symbol
        if per_row.is_Integer:
            return -(-int(per_row) * ITEM_BYTES[dtype_name(value)] // ALIGNMENT) * ALIGNMENT
    raise IllegalGraphError(
        f"plan_memory: a value must hold a fixed number of elements per token, got shape "
        f"{tuple(value.shape)} (node {node.name})"
    )


def _reuse_in_place(graph: fx.Graph, owned: dict[fx.Node, tuple[_Value, ...]]) -> int:
    """Let results take over arguments that nobody reads later; returns how many do."""
    num_reused = 0
    for index, node in enumerate(graph.nodes):
        for result, arguments in IN_PLACE.get(node.target, {}).items():
            if node not in owned:
                continue
            value = owned[node][result]
            for position in arguments:
                source = node.args[position]
                memory = owned[source][0].memory if isinstance(source, fx.Node) and source in owned else None
                if memory and memory.last == index and memory.width == value.width:
                    value.shares = memory
                    memory.last = value.last
                    num_reused += 1
                    break
    return num_reused


def _place(values: list[_Value]) -> int:
    """Give offsets, widest first, each into the tightest gap that is free all its life; returns the peak.

    Pisarchyk and Lee 2020, greedy by size. Never worse than one after another: a value starts no later than
    where those placed before it end.
    """
    placed: list[_Value] = []
    for value in sorted(values, key=lambda v: (-v.width, v.first)):
        best_gap, best_offset, end = None, 0, 0
        for other in sorted((o for o in placed if o.overlaps(value)), key=lambda o: o.offset):
            gap = other.offset - end
            if gap >= value.width and (best_gap is None or gap < best_gap):
                best_gap, best_offset = gap, end
            end = max(end, other.offset + other.width)
        value.offset = end if best_gap is None else best_offset
        placed.append(value)
    return max((value.offset + value.width for value in placed), default=0)
