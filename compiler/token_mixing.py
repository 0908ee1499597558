"""Which ops of a captured graph let one token see another outside attention.

The axis of the tokens is followed from the inputs to the logits. Every op must be pointwise along it, or belong
to softmax(q k^T) v. Whatever else mixes tokens (convolutions, scans, cumulative sums, shifts, linear attention)
is state that a paged cache does not hold. Needs no pass: it reads the graph as it was captured. An op that it
does not know loses the axis, and nothing more is said of what follows: the last stage's legality decides there.
"""

from typing import Any

import torch
from torch.fx import Graph, Node

from octavo.compiler.errors import CaptureError
from octavo.compiler.origin import where
from octavo.compiler.token_flow import (
    CONSTANT,
    Call,
    Depends,
    Flow,
    Mixes,
    expression,
    is_tensor,
    op_name,
    sizes,
)
from octavo.compiler.token_rules import RULES, elementwise

# Read the shape of what they are given, never its values.
SHAPES_ONLY = frozenset(
    ("ones_like", "zeros_like", "full_like", "empty_like", "new_ones", "new_zeros", "new_full", "new_empty")
)
LOOPS = frozenset(("scan", "while_loop", "associative_scan", "map_impl"))


def require_tokens_apart(graph: Graph) -> None:
    """Raise CaptureError that names the first op that mixes tokens, and the kinds of the others."""
    found = mixing(graph)
    if not found:
        return
    node, reason = found[0]
    others = sorted({r for _, r in found[1:]} - {reason})
    more = f"; also {'; '.join(others[:3])}" if others else ""
    raise CaptureError(
        f"capture: {reason} ({where(node)}), the first of {len(found)} such places{more}; a paged cache holds "
        "keys and values of attention and no other state, so this model cannot be served"
    )


def mixing(graph: Graph) -> list[tuple[Node, str]]:
    """Every node that mixes tokens outside attention, with how it does. Dead nodes are not asked."""
    live = _live(graph)
    length = next(n.meta["val"].shape[1] for n in graph.nodes if n.op == "placeholder")
    flows: dict[Node, Flow] = {}
    found: list[tuple[Node, str]] = []
    for node in graph.nodes:
        if node not in live:
            continue
        try:
            flows[node] = _flow(node, flows, length)
        except Mixes as reason:
            found.append((node, str(reason)))
            flows[node] = _as_if_apart(Call(node, flows, length))
    return found


def _live(graph: Graph) -> set[Node]:
    """Nodes on which the outputs depend."""
    pending: list[Node] = [graph.output_node()]
    live = set(pending)
    while pending:
        fresh = [n for n in pending.pop().all_input_nodes if n not in live]
        live.update(fresh)
        pending += fresh
    return live


def _flow(node: Node, flows: dict[Node, Flow], length: Any) -> Flow:
    if node.op == "placeholder" and len(sizes(node)) > 1:
        return Flow(Depends.POSITIONS if node.name == "position_ids" else Depends.TOKENS, 1)
    if node.op != "call_function":
        return CONSTANT
    return _flow_of_call(Call(node, flows, length))


def _flow_of_call(call: Call) -> Flow:
    """The flow of a call's result, of each if there are several. Raises Mixes."""
    node = call.node
    inputs = [call.flows[n] for n in node.all_input_nodes]
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        if call.name in LOOPS and any(flow.matters for flow in inputs):
            raise Mixes(f"{call.name} over tokens: a loop with state outside attention")
        return call.lost
    if not is_tensor(node):
        return CONSTANT
    if op_name(node).startswith("octavo::"):
        return _of_dialect(call)
    if any(flow.lost for flow in inputs):
        return call.lost
    if call.name in SHAPES_ONLY:
        return Flow(Depends.LENGTH).at(_places(call))
    if not any(flow.axes for flow in inputs):
        return _made(call)
    rule = RULES.get(call.name)
    if rule is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        rule = elementwise
    flow = rule(call) if rule is not None else call.lost
    return flow if call.depends is Depends.TOKENS or not flow.lost else _made(call)


def _as_if_apart(call: Call) -> Flow:
    """What is followed after an op that mixes tokens, so that the next one is found too."""
    axes = call.operand().axes or _places(call)
    same = len(sizes(call.node)) == call.rank()
    return Flow(Depends.TOKENS).at(axes[:1]) if same else Flow(Depends.TOKENS, lost=True)


def _places(call: Call) -> list[int]:
    """Axes that have the length's size."""
    length = expression(call.length)
    return [i for i, size in enumerate(sizes(call.node)) if expression(size) == length]


def _of_dialect(call: Call) -> Flow:
    """The dialect's ops keep tokens apart, but for attention."""
    places = _places(call)
    return Flow(call.depends, places[0]) if places else call.lost


def _made(call: Call) -> Flow:
    """A value made of constants, sizes and positions: its axes are those of the length's size."""
    places = _places(call)
    return Flow(max(call.depends, Depends.LENGTH) if places else call.depends).at(places)
