"""All ranks of a graph in one process, a node at a time on each: no network, and every value can be looked at."""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from octavo.compiler.legality import op
from octavo.compiler.mesh import Mesh
from octavo.compiler.simulate_collectives import COLLECTIVES
from octavo.passes.rewrite import held
from octavo.passes.sharding import piece, shards, whole_weights

Inputs = Mapping[str, Tensor]


def simulate(
    graph_module: GraphModule,
    mesh: Mesh,
    inputs: Sequence[Inputs],
    convert: Callable[[Tensor], Tensor] = lambda x: x,
) -> list[tuple[Tensor, ...]]:
    """The outputs of every rank.

    inputs   of every rank, by the names of placeholders; caches are written in place
    convert  what becomes of each weight when it is read
    """
    values: list[dict[Node, Any]] = [{} for _ in range(mesh.world)]
    last = {source: node for node in graph_module.graph.nodes for source in node.all_input_nodes}
    for node in graph_module.graph.nodes:
        if node.op == "output":
            return [tuple(map_arg(node.args[0], own.__getitem__)) for own in values]
        _run(graph_module, mesh, node, inputs, convert, values)
        for source in node.all_input_nodes:
            if last[source] is node:
                for own in values:
                    del own[source]
    raise AssertionError("a graph without an output")


def _run(
    graph_module: GraphModule, mesh: Mesh, node: Node, inputs: Sequence[Inputs],
    convert: Callable[[Tensor], Tensor], values: list[dict[Node, Any]],
) -> None:  # fmt: skip
    if node.op == "placeholder":
        for own, given in zip(values, inputs, strict=True):
            own[node] = given[node.name]
    elif node.op == "get_attr":
        name = str(node.target)
        shard = shards(graph_module).get(name)
        common = convert(held(graph_module, name)) if shard is None else None
        for rank, own in enumerate(values):
            own[node] = (
                common if shard is None else convert(piece(whole_weights(graph_module)[name], shard, rank))
            )
    elif (name := op(node).removeprefix("octavo::")) in COLLECTIVES:
        arguments = [map_arg(node.args, own.__getitem__) for own in values]
        axis = node.args[{"all_gather": 2, "reduce_scatter": 2}.get(name, -1)]
        assert isinstance(axis, str)
        for group in mesh.groups(axis):
            results = COLLECTIVES[name]([arguments[rank] for rank in group])
            for rank, result in zip(group, results, strict=True):
                values[rank][node] = result
    else:
        target: Any = operator.getitem if node.target is operator.getitem else node.target
        for own in values:
            own[node] = target(*map_arg(node.args, own.__getitem__), **map_arg(node.kwargs, own.__getitem__))
