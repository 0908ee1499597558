"""Weights of which every rank holds pieces: the graph has those of rank 0, whole ones are kept beside it."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.mesh import Mesh
from octavo.compiler.placement import REPLICATED, Placement
from octavo.compiler.program import Shard
from octavo.compiler.type_rules import declared
from octavo.compiler.types import Part
from octavo.passes.rewrite import exchange, fake_tensor, held, new_weight

Ranges = Sequence[tuple[int, int]]


def shards(graph_module: GraphModule) -> dict[str, Shard]:
    """The pieces that ranks hold of weights, by name."""
    known: dict[str, Shard] = graph_module.meta.setdefault("shards", {})
    return known


def whole_weights(graph_module: GraphModule) -> dict[str, torch.Tensor]:
    """What the pieces are cut from, by name."""
    known: dict[str, torch.Tensor] = graph_module.meta.setdefault("whole", {})
    return known


def whole_types(graph_module: GraphModule) -> dict[str, Part]:
    """Which part of a whole quantised value the whole weights hold, by name."""
    known: dict[str, Part] = graph_module.meta.setdefault("whole_types", {})
    return known


def piece(tensor: torch.Tensor, shard: Shard, rank: int) -> torch.Tensor:
    """What a rank holds: a view where that is one range."""
    parts = [tensor.narrow(shard.dim, start, stop - start) for start, stop in shard.pieces[rank]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, shard.dim)


def spread(
    graph_module: GraphModule, node: Node, dim: int, ranges: Sequence[Ranges], placement: Placement,
    whole: torch.Tensor | None = None, elements: int = 1,
) -> None:  # fmt: skip
    """Let every rank hold ranges of `dim` of a weight; ranges[rank].

    node   get_attr of the weight
    whole  what the ranges are of, where that is not the weight itself
    elements  of the tensor, for each row of the value that it is a part of: swizzled block scales have several
    """
    name = str(node.target)
    tensor = held(graph_module, name) if whole is None else whole
    shard = Shard(dim, tuple(tuple((int(start), int(stop)) for start, stop in own) for own in ranges))
    whole_weights(graph_module)[name] = tensor
    if part := declared(graph_module).get(name):
        whole_types(graph_module)[name] = part
        shape = list(part.type.shape)
        shape[dim] = shard.length(0) // elements
        declared(graph_module)[name] = replace(part, type=replace(part.type, shape=tuple(shape)))
    shards(graph_module)[name] = shard
    local = piece(tensor, shard, 0)
    exchange(graph_module, name, local)
    node.meta["val"] = fake_tensor(graph_module, local)
    node.meta["placement"] = placement


def own_copy(graph_module: GraphModule, node: Node, user: Node) -> Node:
    """The weight's node if `user` alone reads it, else one of another name for that user; the memory is the same."""
    if len(node.users) == 1:
        return node
    name = f"{node.target}_of_{user.name}"
    part = declared(graph_module).get(str(node.target))
    copy = new_weight(graph_module, name, held(graph_module, str(node.target)), part=part)
    user.replace_input_with(node, copy)
    return copy


def by_coordinate(mesh: Mesh, axis: str, ranges: Callable[[int], Ranges]) -> list[Ranges]:
    """Ranges of every rank, from those of a coordinate along one axis."""
    return [ranges(mesh.coordinates(rank)[axis]) for rank in range(mesh.world)]


def placement_of(node: Node) -> Placement:
    """Where a value lies; replicated unless a pass said otherwise."""
    found: Placement = node.meta.get("placement", REPLICATED)
    return found
