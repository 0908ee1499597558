"""Parts copied into fresh memory until they cover it  ->  cat of the parts.

Export writes `y[..., :n] = a; y[..., n:] = b` as slice_scatter(slice_scatter(empty, copy(_, a)), copy(_, b)).
Not matched: parts that leave a gap, which would keep what the memory held before, and steps other than one.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import Builder, Site, replace
from octavo.passes.rule import PassReport

# What the memory held does not matter once all of it is overwritten.
FRESH = (
    aten.new_empty.default, aten.empty.memory_format, aten.empty_like.default, aten.new_zeros.default,
    aten.zeros.default, aten.zeros_like.default,
)  # fmt: skip


@dataclass(frozen=True)
class _Part:
    """`value`, repeated along axes of size one to `shape`, written to start:end of `axis`."""

    value: Node
    shape: torch.Size
    axis: int
    start: int
    end: int


def join_scatters(graph_module: GraphModule) -> PassReport:
    report = PassReport("join_scatters")
    scatters = [n for n in graph_module.graph.nodes if n.target is aten.slice_scatter.default and n.users]
    for node in [n for n in scatters if not _is_inner(n)]:
        parts = _parts(node)
        if isinstance(parts, str):
            report.reject(node, parts)
        else:
            report.sites.append(_join(graph_module, node, parts))
    return report


def _join(graph_module: GraphModule, node: Node, parts: list[_Part]) -> Site:
    values = [part.value for part in parts]
    memory = node
    while memory.target is aten.slice_scatter.default:
        memory = memory.all_input_nodes[0]

    def build(b: Builder) -> list[Node]:
        return [b.call(aten.cat.default, [_whole(b, part) for part in parts], parts[0].axis)]

    return replace(graph_module, [node], build, list(dict.fromkeys((*values, *memory.all_input_nodes))))


def _whole(b: Builder, part: _Part) -> Node:
    """The part's value repeated to its shape."""
    sizes = part.value.meta["val"].shape
    if sizes == part.shape:
        return part.value
    added = [d for d in part.shape[: len(part.shape) - len(sizes)]]
    kept = zip(part.shape[len(added) :], sizes, strict=True)
    return b.call(aten.expand.default, part.value, [*added, *(-1 if d == s else d for d, s in kept)])


def _is_inner(node: Node) -> bool:
    """Whether a later write starts from this one's result."""
    return any(u.target is aten.slice_scatter.default and u.args[0] is node for u in node.users)


def _parts(node: Node) -> list[_Part] | str:
    """The parts in the order of the axis, or why they are no cat."""
    dtype = node.meta["val"].dtype
    found: list[_Part] = []
    value: Any = node
    while isinstance(value, Node) and value.target is aten.slice_scatter.default:
        part = _part(value)
        if isinstance(part, str):
            return part
        found.append(part)
        value = value.args[0]
    if not isinstance(value, Node) or value.target not in FRESH:
        return f"the parts are written into {value}, which is no fresh memory"
    found.sort(key=lambda part: part.start)
    if len({part.axis for part in found}) > 1:
        return "the parts are written along different axes"
    if any(part.value.meta["val"].dtype != dtype for part in found):
        return f"a part is {[str(p.value.meta['val'].dtype) for p in found]}, the memory is {dtype}"
    ends = [0, *(part.end for part in found)]
    size = node.meta["val"].shape[found[0].axis]
    if [part.start for part in found] != ends[:-1] or ends[-1] != size:
        spans = ", ".join(f"{part.start}:{part.end}" for part in found)
        return f"the parts {spans} do not cover the {size} of axis {found[0].axis} once each"
    return found


def _part(node: Node) -> _Part | str:
    args: tuple[Any, ...] = (*arguments(node), *(0, None, None, 1)[len(node.args) - 2 :])
    axis, start, end, step = args[2:6]
    shape = node.meta["val"].shape
    axis = axis % len(shape)
    size = shape[axis]
    if step != 1 or not isinstance(size, int):
        return f"{node.name} writes every {step}th of {size} elements"
    first, last, _ = slice(start, end).indices(size)
    return _Part(_source(args[1]), args[1].meta["val"].shape, axis, first, last)


def _source(value: Node) -> Node:
    """What a copy into other memory takes its values from, if it does not change the dtype."""
    source = arguments(value)[1] if value.target is aten.copy.default else value
    return source if source.meta["val"].dtype == value.meta["val"].dtype else value
