"""Page groups: layers that look back equally far keep the same pages, and groups share the memory of pages.

A page that slid out of a window is of no use to a layer with that window, but layers without one still read it. So
layers are put into groups of equal windows and of no more layers than the rarest window has. Group g >= 1 reads
page_table_g and slot_mapping_g in place of page_table and slot_mapping, and layer i of every group keeps its rows in
the caches number i: a page belongs to one group at a time, and all pages are of one size.
Not grouped: layers with latents, or of different shapes, and models whose layers are all alike.
Source: the hybrid KV cache of vLLM.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.dims import caches_of
from octavo.compiler.legality import named_arguments
from octavo.compiler.page_groups import page_windows
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
ATTENTIONS = (octavo.paged_attention.default, octavo.paged_mla_attention.default)
# What each group has for itself: inputs of attention, and of the writes.
TABLES = ("page_table", "slot_mapping")


def group_pages(graph_module: GraphModule) -> PassReport:
    """The last pass, on the whole graph: numbers of caches are those of attentions up to here."""
    report = PassReport("group_pages")
    if len(page_windows(graph_module.graph)) > 1:
        return report  # done before
    attentions = [n for n in graph_module.graph.nodes if n.target in ATTENTIONS]
    windows = {n: int(named_arguments(n)["window"]) for n in attentions}
    groups = _groups(windows)
    if len(groups) > 1 and (reason := _refusal(attentions)) is not None:
        report.reject(attentions[0], reason)
        groups = []
    if len(groups) > 1:
        shared = {cache.name: cache for node in max(groups, key=len) for cache in caches_of(node)}
        names = [[cache.name for cache in caches_of(node)] for node in max(groups, key=len)]
        for number, group in enumerate(groups):
            _use_tables(graph_module, group, number)
            _use_caches(graph_module, group, [[shared[name] for name in own] for own in names])
        for index, own in enumerate(names):
            for name in own:
                new = f"{name.rpartition('_')[0]}_{index}"
                shared[name].name = shared[name].target = new
        report.notes["groups"] = [
            {"layers": len(group), "window": windows[group[0]] or None} for group in groups
        ]
    return report


def _groups(windows: dict[Node, int]) -> list[list[Node]]:
    """Attentions of equal windows, no more together than the rarest window has; those without a window first."""
    kinds: dict[int, list[Node]] = {}
    for node, window in sorted(windows.items(), key=lambda item: item[1]):
        kinds.setdefault(window, []).append(node)
    size = min((len(nodes) for nodes in kinds.values()), default=0)
    return [nodes[i : i + size] for nodes in kinds.values() for i in range(0, len(nodes), size)]


def _refusal(attentions: list[Node]) -> str | None:
    if any(n.target is octavo.paged_mla_attention.default for n in attentions):
        return "layers keep latents, so all of them keep their pages alike"
    kinds = {
        str([(c.name[0], c.meta["val"].dtype, c.meta["val"].shape[1:]) for c in caches_of(n)])
        for n in attentions
    }
    if len(kinds) > 1:
        return f"pages of layers differ, so that none can take another's place: {', '.join(sorted(kinds))}"
    return None


def _use_tables(graph_module: GraphModule, group: list[Node], number: int) -> None:
    """Have a group's reads and writes use tables of its own; those of group 0 stay."""
    if number == 0:
        return
    inputs = {n.name: n for n in graph_module.graph.nodes if n.op == "placeholder"}
    own: dict[Node, Node] = {}
    for name in TABLES:
        with graph_module.graph.inserting_after(inputs.get(f"{name}_{number - 1}", inputs[name])):
            node = graph_module.graph.placeholder(f"{name}_{number}")
        node.meta["val"] = inputs[name].meta["val"]
        own[inputs[name]] = node
    for user in {user for attention in group for cache in caches_of(attention) for user in cache.users}:
        for old, new in own.items():
            user.replace_input_with(old, new)


def _use_caches(graph_module: GraphModule, group: list[Node], shared: list[list[Node]]) -> None:
    replaced: list[tuple[Node, Any]] = []
    for attention, places in zip(group, shared, strict=False):
        replaced += [
            pair for pair in zip(caches_of(attention), places, strict=True) if pair[0] is not pair[1]
        ]
    for old, new in replaced:
        old.replace_all_uses_with(new)
        graph_module.graph.erase_node(old)
