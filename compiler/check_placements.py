"""The check of a graph that ranks run: every op gets its arguments where its rule needs them, and the output is whole.

It follows values from weights and inputs anew and believes nothing that passes wrote at other nodes, so a graph that
lost a collective, or has one too many, is refused: a sum of a whole value with a part of a sum has no rule.
"""

from typing import Any

from torch.fx import GraphModule, Node

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.legality import COLLECTIVES, named_arguments, op
from octavo.compiler.mesh import AXES, Mesh
from octavo.compiler.origin import where as origin
from octavo.compiler.placement import Where, text
from octavo.compiler.placement_rules import EXPERT_OPS, Places, outcome
from octavo.passes.sharding import placement_of

TOKENS: Where = "tokens"


def check_placements(graph_module: GraphModule, mesh: Mesh, after: str) -> None:
    """Raises IllegalGraphError for the first node that gets a value elsewhere than its rule needs it."""
    for axis in AXES:
        if mesh.size(axis) > 1:
            _check_axis(graph_module, axis, after)


def _check_axis(graph_module: GraphModule, axis: str, after: str) -> None:
    places: dict[Node, Any] = {}
    for node in graph_module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            places[node] = placement_of(node).along(axis)
        elif node.op == "output":
            for source in node.all_input_nodes:
                if places[source] not in (None, TOKENS):
                    raise _misplaced(after, node, source.name, axis, places[source], None)
        elif op(node) == "getitem":
            source, index = node.args
            found = places[source]
            places[node] = found[index] if isinstance(found, tuple) else found
        else:
            given = {name: value for name, value in named_arguments(node).items() if isinstance(value, Node)}
            at = {name: places[value] for name, value in given.items()}
            places[node] = _own_tokens(node, at, after) if axis == "dp" else _along(node, axis, at, after)


def _along(node: Node, axis: str, at: Places, after: str) -> Any:
    if op(node) in COLLECTIVES:
        return _collective(node, axis, at, after)
    wanted = outcome(node, at)
    for name, where in wanted.needs.items():
        if name in at and at[name] != where:
            raise _misplaced(after, node, name, axis, at[name], where)
    return wanted.gives


def _collective(node: Node, axis: str, at: Places, after: str) -> Where:
    """Of another axis it changes nothing here."""
    given, name = named_arguments(node), op(node).removeprefix("octavo::")
    has = next(iter(at.values()))
    if given["axis"] != axis:
        if name == "dispatch" and set(at.values()) != {None}:
            raise IllegalGraphError(f"{after}: {node.name} sends what {axis} has parts of ({origin(node)})")
        return has
    last = len(node.meta["val"].shape) - 1
    expected: dict[str, tuple[Where, Where]] = {
        "all_reduce": ("partial", None), "all_gather": (last, None), "reduce_scatter": ("partial", last),
    }  # fmt: skip
    takes, gives = expected[name]
    if has != takes:
        raise _misplaced(after, node, "x", axis, has, takes)
    return gives


def _own_tokens(node: Node, at: Places, after: str) -> Where:
    """Along dp: tokens are each rank's own; experts that lie along it are met by tokens that were sent to them."""
    found = {name: where for name, where in at.items() if isinstance(where, int)}
    if found and (op(node) not in EXPERT_OPS or "dispatch" not in _source(node)):
        name, where = next(iter(found.items()))
        raise _misplaced(after, node, name, "dp", where, None)
    return TOKENS if TOKENS in at.values() else None


def _source(node: Node) -> str:
    """The op that the rows of a mixture come from."""
    rows = named_arguments(node)["x"]
    while op(rows) in ("getitem", "octavo::arrived"):
        rows = rows.args[0]
    return op(rows)


def _misplaced(after: str, node: Node, name: str, axis: str, has: Where, wants: Where) -> IllegalGraphError:
    return IllegalGraphError(
        f"{after}: {op(node)} needs {name} {text(wants)} along {axis}, and it is {text(has)} ({origin(node)})"
    )
