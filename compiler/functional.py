"""Calls that write to their argument  ->  calls that return a new value, where nobody else sees the memory.

torch's own functionalization traces the whole model a second time, which costs more than the export. Models write in
place in a few ways only: into a value of their own (`x /= s`, `mask.scatter_()`), and into parts of an empty tensor.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.rewrite import fake_mode, set_meta

aten = torch.ops.aten
# Their result may be their argument's memory, which their schema does not say.
MAYBE_VIEWS = frozenset(
    "aten::" + name
    for name in (
        "reshape", "contiguous", "to", "flatten", "type_as", "expand_as", "view_as", "_to_copy", "float", "dropout",
        "unflatten", "movedim", "matrix_H", "swapaxes",
    )
)  # fmt: skip


class _Shared(Exception):
    """Somebody else may see the write."""


def make_functional(graph_module: GraphModule) -> bool:
    """Rewrite every call that writes. False, and the graph is of no further use, where one cannot be."""
    base: dict[Node, Node] = {}
    for node in list(graph_module.graph.nodes):
        try:
            _visit(graph_module, node, base)
        except _Shared:
            return False
    graph_module.graph.lint()
    return True


def _visit(graph_module: GraphModule, node: Node, base: dict[Node, Node]) -> None:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        source = node.all_input_nodes[0] if node.op == "call_function" and node.all_input_nodes else node
        base[node] = base.get(source, node)  # an item of a tuple
    elif node.target._schema.is_mutable:
        written = _without_write(graph_module, node, base)
        base[written] = written
    else:
        is_view = any(a.alias_info is not None for a in node.target._schema.arguments)
        first = node.all_input_nodes[0] if node.all_input_nodes else node
        shares = is_view or node.target._schema.name in MAYBE_VIEWS
        base[node] = base.get(first, node) if shares else node


def _without_write(graph_module: GraphModule, node: Node, base: dict[Node, Node]) -> Node:
    """The value that holds what was written; later nodes read it in place of the memory that was written to."""
    target, (self_, *rest) = node.target, node.args
    if not isinstance(self_, Node) or not isinstance(target, torch._ops.OpOverload):
        raise _Shared
    memory = base[self_]
    if memory.op != "call_function":
        raise _Shared  # an input or a buffer: the write is an effect
    views = _views(node, self_, memory)
    later = {n for n, owner in base.items() if owner is memory and any(u not in base for u in n.users)}
    if later - {memory, *views}:
        raise _Shared
    with graph_module.graph.inserting_before(node):
        if self_ is memory:
            new = graph_module.graph.call_function(_functional(target), (self_, *rest), node.kwargs)
        else:
            new = _scattered(graph_module, views, memory, target, rest)
    set_meta(new, fake_mode(graph_module), node)
    expected, got = memory.meta["val"], new.meta["val"]
    if (expected.dtype, tuple(expected.shape)) != (got.dtype, tuple(got.shape)):
        raise _Shared  # a write keeps the dtype of the memory, a new value has that of the operands
    node.replace_all_uses_with(new)
    memory.replace_all_uses_with(new, delete_user_cb=lambda user: user not in base and user is not new)
    graph_module.graph.erase_node(node)
    for view in views:
        base.pop(view)
        graph_module.graph.erase_node(view)
    return new


def _views(node: Node, written: Node, memory: Node) -> list[Node]:
    """The slices between the memory and what is written to, the last first; nobody else may read them."""
    views: list[Node] = []
    reader, view = node, written
    while view is not memory:
        if view.target is not aten.slice.Tensor or set(view.users) != {reader}:
            raise _Shared
        views.append(view)
        reader, (view, *_) = view, view.all_input_nodes
    return views


def _functional(target: torch._ops.OpOverload) -> Any:
    """`aten.div.Tensor` for `aten.div_.Tensor`."""
    name = target._schema.name.split("::")[1]
    if not name.endswith("_") or target.namespace != "aten" or name == "copy_":
        raise _Shared
    packet = getattr(aten, name.removesuffix("_"), None)
    overloads = [getattr(packet, o) for o in packet.overloads()] if packet is not None else []
    types = [str(a.type) for a in target._schema.arguments]
    for overload in overloads:
        if [str(a.type) for a in overload._schema.arguments] == types:
            return overload
    raise _Shared


def _scattered(
    graph_module: GraphModule, views: list[Node], memory: Node, target: torch._ops.OpOverload, rest: list[Any]
) -> Node:
    """The whole of which `rest[0]` is now the part that the one view that is no whole was."""
    parts = [v for v in views if tuple(v.meta["val"].shape) != tuple(v.all_input_nodes[0].meta["val"].shape)]
    if target is not aten.copy_.default or len(rest) != 1 or not isinstance(rest[0], Node) or len(parts) != 1:
        raise _Shared
    value, part = rest[0].meta["val"], parts[0].meta["val"]
    if (value.dtype, tuple(value.shape)) != (part.dtype, tuple(part.shape)):
        raise _Shared
    args = (memory, rest[0], *parts[0].args[1:])
    return graph_module.graph.call_function(aten.slice_scatter.default, args)
