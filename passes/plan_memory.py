"""Where every intermediate of a step lives: one workspace, reused as soon as a value has had its last reader.

A value takes at most a * T + c * N + b bytes: sizes in L count as T, as L <= T, and block scales in tiles of 128 rows
take what the last tile may leave empty as b. One value lies above another only if all coefficients say so, so the two
overlap for no T and N, and the plan is made once, over the coefficients. Outputs are no workspace.
"""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import sympy
import torch
from torch import fx
from torch.utils._sympy.functions import FloorDiv

import octavo.compiler.ops  # noqa: F401  (registers the ops that IN_PLACE names)
from octavo.compiler.dims import (
    as_expression,
    dim_names,
    dtype_name,
    is_view,
    leaves_graph,
    leaving_items,
    makes_logits,
)
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.legality import COLLECTIVES, op
from octavo.compiler.program import ITEM_BYTES

ALIGNMENT = 64
# result (-1: the last): arguments that it may overwrite, best first; kernels read element i of them before they
# write it, and not again.
IN_PLACE = {
    torch.ops.octavo.add.default: {0: (0, 1)},
    # The residual first: it then stays in one place through all layers, and fragments nothing.
    torch.ops.octavo.add_rms_norm.default: {1: (1, 0)},
    torch.ops.octavo.add_rms_norm_quantize.default: {-1: (1, 0)},
}


@dataclass(frozen=True)
class Size:
    """per_token * T + per_row * N + fixed bytes."""

    per_token: int = 0
    fixed: int = 0
    per_row: int = 0

    @property
    def text(self) -> str:
        """As an expression in T and N."""
        rows = f" + {self.per_row} * N" if self.per_row else ""
        return f"{self.per_token} * T{rows}" + (f" + {self.fixed}" if self.fixed else "")

    @property
    def order(self) -> tuple[int, int, int]:
        return self.per_token, self.per_row, self.fixed

    def __add__(self, other: "Size") -> "Size":
        return Size(self.per_token + other.per_token, self.fixed + other.fixed, self.per_row + other.per_row)

    def __sub__(self, other: "Size") -> "Size":
        return Size(self.per_token - other.per_token, self.fixed - other.fixed, self.per_row - other.per_row)

    def has_room_for(self, other: "Size") -> bool:
        """Whether this is no less than the other for every T and N."""
        return all(a >= b for a, b in zip(self.order, other.order, strict=True))


def _highest(sizes: Iterable[Size]) -> Size:
    """The least size that is no less than any, for every T and N."""
    sizes = list(sizes)
    return Size(
        max((size.per_token for size in sizes), default=0), max((size.fixed for size in sizes), default=0),
        max((size.per_row for size in sizes), default=0),
    )  # fmt: skip


def _lower(one: Size, other: Size) -> Size:
    """The largest size that is no more than either, for every T and N."""
    return Size(
        min(one.per_token, other.per_token), min(one.fixed, other.fixed), min(one.per_row, other.per_row)
    )


@dataclass(frozen=True)
class Placement:
    """Memory of one value: workspace bytes [offset, offset + width); all coefficients are multiples of 64."""

    name: str
    offset: Size
    width: Size


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of workspace.

    peak   a token, as planned
    naive  a token, if every value had memory of its own
    fixed  beside peak, in every step
    rows   beside peak, for each of the N tokens of all ranks of a step
    """

    peak: int
    naive: int
    values: int
    in_place: int
    fixed: int = 0
    rows: int = 0

    @property
    def workspace(self) -> Size:
        return Size(self.peak, self.fixed, self.rows)


@dataclass(eq=False)
class _Value:
    """A piece of memory to place. first, last: indices of the nodes that write it and that read it last."""

    name: str
    width: Size
    first: int
    last: int
    offset: Size = Size()
    shares: "_Value | None" = None

    @property
    def memory(self) -> "_Value":
        """The value whose memory this one takes over, or itself."""
        return self.shares.memory if self.shares else self

    def overlaps(self, other: "_Value") -> bool:
        return self.first <= other.last and other.first <= self.last

    @property
    def end(self) -> Size:
        return self.offset + self.width


def plan_memory(graph: fx.Graph) -> MemoryReport:
    """Give every intermediate a place, as meta["buffer"]: a Placement, or a tuple of them.

    A view and an item of a tuple carry the Placement of what they show. Nodes whose value is an input, a
    weight or the output have none. Raises IllegalGraphError for a value whose size nothing linear in T, L or N bounds.
    """
    owned = _lifetimes(graph)
    values = list({id(value): value for results in owned.values() for value in results}.values())
    num_in_place = _reuse_in_place(graph, owned)
    peak = _place([value for value in values if not value.shares])
    for node, results in owned.items():
        placements = tuple(Placement(v.name, v.memory.offset, v.width) for v in results)
        node.meta["buffer"] = placements if isinstance(node.meta["val"], tuple | list) else placements[0]
    naive = sum(value.width.per_token for value in values)
    return MemoryReport(peak.per_token, naive, len(values), num_in_place, peak.fixed, peak.per_row)


def _lifetimes(graph: fx.Graph) -> dict[fx.Node, tuple[_Value, ...]]:
    """What each node's own results are, and from where to where they live."""
    rows = {symbol: name for symbol, name in dim_names(graph).items() if name in ("T", "L", "N")}
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
        elif node.target is torch.ops.octavo.arrived.default:
            owned[node] = tuple(owned[result][0] for result in node.args[:4])
        elif node.target is operator.getitem:
            assert isinstance(source, fx.Node) and isinstance(node.args[1], int)
            owned[node] = (owned[source][node.args[1]],)
        else:
            owned[node] = _results(node, index, rows)
    _keep_for_counting(graph, owned)
    return owned


def _keep_for_counting(graph: fx.Graph, owned: Mapping[fx.Node, tuple[_Value, ...]]) -> None:
    """Which experts tokens go to is there until the next collective: between kernels a runner may count them."""
    nodes = list(graph.nodes)
    collectives = [index for index, node in enumerate(nodes) if op(node) in COLLECTIVES]
    for index, node in enumerate(nodes):
        if op(node) == "octavo::map_experts":
            (value,) = owned[node]
            value.last = max(value.last, next((c for c in collectives if c > index), value.last))


def _results(node: fx.Node, index: int, rows: Mapping[sympy.Symbol, str]) -> tuple[_Value, ...]:
    value = node.meta["val"]
    if not isinstance(value, tuple | list):
        return (_Value(node.name, _width(node, value, rows), index, index),)
    leaving = leaving_items(node)
    widths = [Size() if i in leaving else _width(node, v, rows) for i, v in enumerate(value)]
    return tuple(_Value(f"{node.name}.{i}", width, index, index) for i, width in enumerate(widths))


def _width(node: fx.Node, value: torch.Tensor, rows: Mapping[sympy.Symbol, str]) -> Size:
    """Bytes, both coefficients rounded up to ALIGNMENT. A quotient that is rounded down counts as it is."""
    count = sympy.Mul(*(as_expression(size) for size in value.shape))
    bound = sympy.expand(count.replace(FloorDiv, lambda size, divisor: size / divisor))
    symbols = sorted(bound.free_symbols & set(rows), key=str)
    is_falling = any(number.is_negative for number in count.atoms(sympy.Number))
    if len(symbols) == 1 and not is_falling:
        per_row, fixed = bound.coeff(symbols[0], 1), bound.coeff(symbols[0], 0)
        if per_row.is_Rational and fixed.is_Rational and bound == per_row * symbols[0] + fixed:
            item = ITEM_BYTES["fp32" if makes_logits(node) else dtype_name(value)]
            each, rest = _aligned(per_row * item), _aligned(fixed * item)
            return Size(0, rest, each) if rows[symbols[0]] == "N" else Size(each, rest)
    raise IllegalGraphError(
        f"plan_memory: a value must hold a fixed number of elements per token, got shape "
        f"{tuple(value.shape)} (node {node.name})"
    )


def _aligned(num_bytes: sympy.Rational) -> int:
    return int(sympy.ceiling(num_bytes / ALIGNMENT)) * ALIGNMENT


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


def _place(values: list[_Value]) -> Size:
    """Give offsets, widest first, each into the tightest gap that is free all its life; returns the peak.

    Pisarchyk and Lee 2020, greedy by size. Never worse than one after another: a value starts no later than
    where those placed before it end.
    """
    placed: list[_Value] = []
    for value in sorted(values, key=lambda v: (*(-size for size in v.width.order), v.first)):
        rivals = sorted((o for o in placed if o.overlaps(value)), key=lambda o: o.offset.order)
        # where the first of them begins that is not below a gap: of two, neither need be the lower one for every T
        begins = list(accumulate((other.offset for other in reversed(rivals)), _lower))[::-1]
        best_gap, best_offset, end = None, Size(), Size()
        for other, begin in zip(rivals, begins, strict=True):
            gap = begin - end
            if gap.has_room_for(value.width) and (best_gap is None or gap.order < best_gap.order):
                best_gap, best_offset = gap, end
            end = _highest((end, other.end))
        value.offset = end if best_gap is None else best_offset
        placed.append(value)
    return _highest(value.end for value in placed)
