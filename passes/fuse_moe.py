"""Stacked experts in whatever spelling  ->  octavo.moe (Shazeer et al. 2017; Mixtral, arXiv 2401.04088).

All experts for every token, those of each slot gathered, tokens sorted by expert and multiplied group by group: a
region of the graph reads stacked weights (E, ...), what a top-k selected, and the tokens, and gives one row a token.
Where such a region starts and ends is read off the graph; what it computes is found by running it (probe_moe). Not
matched: weights on the experts' inputs, experts without a gate, and activations that the op does not have.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.classify_mask import SHAPES_ONLY
from octavo.passes.pattern import aten
from octavo.passes.probe_moe import Reading, Refused, Region, matrix_sizes, read
from octavo.passes.rewrite import Builder, collect, replace
from octavo.passes.rule import PassReport
from octavo.passes.weights_of_experts import Unselected, Weighting, weighting

octavo = torch.ops.octavo
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
MOST_ENDS = 12  # values of one row a token that are tried as a region's result
IGNORED = ("octavo", "convolution", "conv1d", "embedding")


def fuse_moe(graph_module: GraphModule) -> PassReport:
    report = PassReport("fuse_moe", "reassociates")
    seen: set[Node] = set()
    for stack in list(graph_module.graph.nodes):
        if stack in seen or not _is_stack(stack):
            continue
        refusal = ""
        for region in _regions(graph_module, stack):
            seen.update(region.stacks)
            try:
                report.sites.append(_fuse(graph_module, region))
                break
            except Refused as reason:
                # What was read as a mixture came nearer than what was not.
                if not refusal or isinstance(reason, Unselected):
                    refusal = str(reason)
        else:
            if refusal:
                report.reject(next(iter(stack.users)), f"its experts {stack.target}: {refusal}")
    return report


def _is_stack(node: Node) -> bool:
    """A matrix for each of several experts, or whatever else is three-dimensional."""
    value = node.meta.get("val")
    return (
        node.op == "get_attr"
        and isinstance(value, torch.Tensor)
        and value.dtype.is_floating_point
        and value.dim() > 2
        and value.shape[0] > 1
        and len(matrix_sizes(node)) == 2
        and bool(node.users)
        and not any(name in str(user.target) for user in node.users for name in IGNORED)
    )


def _fuse(graph_module: GraphModule, region: Region) -> Any:
    reading = read(graph_module, region)
    weights = weighting(region) if region.of_all else Weighting(region.weights)
    inputs = [region.x, *weights.inputs(region.experts), *region.stacks, *_values(region.others)]
    return replace(graph_module, [region.root], _build(region, reading, weights), inputs)


def _values(nodes: Sequence[Node]) -> list[Node]:
    return [n for n in nodes if n.op != "get_attr"]


def _build(region: Region, reading: Reading, weights: Weighting) -> Callable[[Builder], list[Node]]:
    def rows(b: Builder, node: Node) -> Node:
        sizes = [1, -1, node.meta["val"].shape[-1]]
        return b.call(aten.reshape.default, node, sizes)

    def build(b: Builder) -> list[Node]:
        x, root = rows(b, region.x), region.root.meta["val"]
        shares = b.call(aten._to_copy.default, rows(b, weights.build(b, region.experts)), dtype=torch.float32)
        gate_up = _joined(b, [_matrix(b, g, reading.transposed[0]) for g in reading.gate_up], reading)
        biases = [b.call(aten.reshape.default, g, _expert_sizes(g)) for g in reading.gate_up_bias]
        bias = _joined(b, biases, reading) if biases else None
        down, last = _matrix(b, reading.down, reading.transposed[1]), reading.down_bias
        down_bias = None if last is None else b.call(aten.reshape.default, last, _expert_sizes(last))
        y = b.call(
            octavo.moe.default, x, rows(b, region.experts), shares, gate_up, bias, down, down_bias,
            reading.activation, reading.limit, reading.alpha,
        )  # fmt: skip
        if root.dtype != y.meta["val"].dtype:
            y = b.call(aten._to_copy.default, y, dtype=root.dtype)
        sizes = [d if isinstance(d, int) else -1 for d in root.shape]
        return [y if root.dim() == 3 else b.call(aten.reshape.default, y, sizes)]

    return build


def _expert_sizes(stack: Node) -> list[int]:
    return [int(stack.meta["val"].shape[0]), *matrix_sizes(stack)]


def _matrix(b: Builder, stack: Node, transposed: bool) -> Node:
    """(E, outputs, inputs)."""
    whole = b.call(aten.reshape.default, stack, _expert_sizes(stack))
    return b.call(aten.permute.default, whole, [0, 2, 1]) if transposed else whole


def _joined(b: Builder, parts: list[Node], reading: Reading) -> Node:
    """Gates before ups along axis 1."""
    if len(parts) == 1 and not reading.interleaved and not reading.up_first:
        return parts[0]
    if len(parts) == 1:
        whole, rows = parts[0], int(parts[0].meta["val"].shape[1])
        spans = (
            [(0, 1 << 62, 2), (1, 1 << 62, 2)] if reading.interleaved else [(0, rows // 2), (rows // 2, rows)]
        )
        parts = [b.call(aten.slice.Tensor, whole, 1, *span) for span in spans]
        parts = parts[::-1] if reading.up_first else parts
    return b.call(aten.cat.default, parts, 1)


def _regions(graph_module: GraphModule, stack: Node) -> Iterator[Region]:
    """Regions that read `stack`, the smallest first."""
    graph = graph_module.graph
    length = next(n.meta["val"].shape[1] for n in graph.nodes if n.op == "placeholder")
    sizes = [n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    derived: set[Node] = set()
    tried = 0
    for end in _ends(stack, derived):
        if not _has_rows(end, length):
            continue
        tried += 1
        yield from _regions_to(_added_to_zeros(end), length, sizes, derived)
        if tried == MOST_ENDS:
            return


def _ends(stack: Node, derived: set[Node]) -> Iterator[Node]:
    """Nodes through which everything goes that is made of `stack`. Fills `derived` with all that is."""
    open_uses = {stack: len(stack.users)}
    node = stack.next
    while node.op != "output":
        read = [n for n in node.all_input_nodes if n in open_uses or n in derived]
        if read:
            derived.add(node)
            for source in read:
                if source in open_uses:
                    open_uses[source] -= 1
                    if open_uses[source] == 0:
                        del open_uses[source]
            if node.users:
                open_uses[node] = len(node.users)
            if list(open_uses) == [node]:
                yield node
        node = node.next


def _added_to_zeros(node: Node) -> Node:
    """The last sum of `node` and zeros, which loops start from."""
    users = list(node.users)
    while len(users) == 1 and users[0].target is aten.add.Tensor and not users[0].kwargs:
        others = [n for n in users[0].args if n is not node]
        if len(others) != 1 or getattr(others[0], "target", None) not in ZEROS:
            break
        node, users = users[0], list(users[0].users)
    return node


def _has_rows(node: Node, length: Any, width: int | None = None) -> bool:
    """(T, any) or (1, T, any) of floats; any is `width` where one is given."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point or value.dim() not in (2, 3):
        return False
    *lead, rows, last = value.shape
    is_width = isinstance(last, int) and width in (None, last)
    return is_width and str(rows) == str(length) and all(isinstance(d, int) and d == 1 for d in lead)


def _regions_to(end: Node, length: Any, sizes: list[Node], derived: set[Node]) -> Iterator[Region]:
    inner = collect([end], sizes)[1]
    for topk in [n for n in reversed(inner) if n.target is aten.topk.default and n not in derived]:
        experts = next((u for u in topk.users if u.args[1:] == (1,)), None)
        count, slots = topk.args[0].meta["val"].shape[-1], topk.args[1]  # type: ignore[union-attr]
        if experts is None or not isinstance(slots, int):
            continue
        found = False
        for region in _between(end, experts, (int(slots), int(count)), length, sizes, derived):
            found = True
            yield region
        if found:
            return


def _between(
    end: Node, experts: Node, widths: tuple[int, int], length: Any, sizes: list[Node], derived: set[Node]
) -> Iterator[Region]:
    """Regions from what a top-k selected to `end`: weights as late, x as late as they can be."""
    inner = collect([end], [*sizes, experts])[1]
    before = [n for n in reversed(inner) if n not in derived]
    for width, of_all in ((widths[0], False), (widths[1], True)):
        for weights in [n for n in before if _has_rows(n, length, width)]:
            stop = [*sizes, experts, weights]
            shapes = _read_for_shape(collect([end], stop)[1])
            for x in [n for n in before if n is not weights and n not in shapes and _has_rows(n, length)]:
                leaves = collect([end], [*stop, *shapes, x])[0]
                region = _region(end, x, experts, weights, of_all, leaves, widths[1], shapes)
                if region is not None:
                    yield region
                    break


def _read_for_shape(inner: Sequence[Node]) -> list[Node]:
    """Values of which the others read no more than the shape."""
    inside = set(inner)
    sources = dict.fromkeys(n for node in inner if node.target in SHAPES_ONLY for n in node.all_input_nodes)
    return [
        n
        for n in sources
        if all(user.target in SHAPES_ONLY for user in n.users if user in inside) and n.op != "get_attr"
    ]


def _region(
    end: Node, x: Node, experts: Node, weights: Node, of_all: bool, leaves: list[Node], count: int,
    shapes: list[Node],
) -> Region | None:  # fmt: skip
    """None where the region reads something else, or does not read these."""
    stacks = tuple(n for n in leaves if _is_of_experts(n, count))
    given = {x, weights} if of_all else {x, weights, experts}
    rest = [n for n in leaves if n not in stacks and n not in (x, weights, experts)]
    if not given <= set(leaves) or not stacks or any(not _is_fixed(n) and n not in shapes for n in rest):
        return None
    return Region(end, x, experts, weights, of_all, stacks, tuple(rest))


def _is_of_experts(node: Node, count: int) -> bool:
    value = node.meta.get("val")
    if node.op != "get_attr" or not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    return value.dim() > 1 and value.shape[0] == count and len(matrix_sizes(node)) in (1, 2)


def _is_fixed(node: Node) -> bool:
    return node.op == "get_attr" or isinstance(node.meta.get("val"), torch.SymInt)
