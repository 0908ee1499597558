"""What holds of a graph over pages and is no rewrite of a site, so that no proof of a site shows it.

Each cache is written once, before it is read, and logits are those of the wanted rows.
"""

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.dims import CACHE_NAME
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.legality import named_arguments
from octavo.compiler.origin import where

octavo = torch.ops.octavo


def check_paging(graph_module: GraphModule, after: str) -> None:
    """Raise IllegalGraphError for a cache or a gather that is not used as it must be; after: the last pass."""
    order = {node: index for index, node in enumerate(graph_module.graph.nodes)}
    for node in order:
        if node.op == "placeholder" and CACHE_NAME.fullmatch(node.name):
            _check_cache(node, order, after)
    _check_rows(graph_module, after)


def _check_cache(cache: Node, order: dict[Node, int], after: str) -> None:
    writers = sorted((user for user in cache.users if _writes(user, cache)), key=order.__getitem__)
    readers = sorted((user for user in cache.users if user not in writers), key=order.__getitem__)
    if len(writers) == 1 and readers and order[writers[0]] < order[readers[0]]:
        return
    place = where((readers or writers or [cache])[0])
    found = ", ".join(writer.name for writer in writers) or "nobody"
    if not readers:
        raise IllegalGraphError(f"{after}: {cache.name} is written by {found} and never read ({place})")
    if len(writers) == 1:
        raise IllegalGraphError(f"{after}: {cache.name} is read before {found} writes it ({place})")
    raise IllegalGraphError(f"{after}: {cache.name} is written by {found}, expected one write ({place})")


def _writes(user: Node, cache: Node) -> bool:
    target = user.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    given = named_arguments(user)
    written = [p.name for p in target._schema.arguments if p.alias_info is not None and p.alias_info.is_write]
    return any(given[name] is cache for name in written)


def _check_rows(graph_module: GraphModule, after: str) -> None:
    gathers = [n for n in graph_module.graph.nodes if n.target is octavo.gather_logits.default]
    for node in gathers:
        rows = node.args[1]
        if not isinstance(rows, Node) or rows.op != "placeholder" or rows.name != "logit_rows":
            raise IllegalGraphError(
                f"{after}: the rows of which logits are wanted must be logit_rows, got {rows} ({where(node)})"
            )
    if len(gathers) != 1:
        place = where(graph_module.graph.output_node().all_input_nodes[0])
        raise IllegalGraphError(
            f"{after}: expected one gather of the wanted rows, got {len(gathers)} ({place})"
        )
