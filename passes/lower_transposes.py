"""permute that moves nothing but axes of size one  ->  reshape: memory stays as it is.

Attention with one key head, and rotations of one, leave such transposes behind. Runs late: before, a transpose tells
patterns which axis holds the heads.
"""

from typing import Any

from torch.fx import GraphModule

from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import Builder, Site, replace
from octavo.passes.rule import PassReport


def lower_transposes(graph_module: GraphModule) -> PassReport:
    report = PassReport("lower_transposes")
    for node in list(graph_module.graph.nodes):
        if node.target is aten.permute.default and node.users:
            source, order = arguments(node)
            sizes = [source.meta["val"].shape[d] for d in order]
            moved = [d % len(sizes) for d in order if not _is_one(source.meta["val"].shape[d])]
            if moved == sorted(moved) and sum(not isinstance(d, int) for d in sizes) <= 1:
                report.sites.append(_view(graph_module, node, source, sizes))
    return report


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _view(graph_module: GraphModule, node: Any, source: Any, sizes: list[Any]) -> Site:
    shape = [d if isinstance(d, int) else -1 for d in sizes]

    def build(b: Builder) -> list[Any]:
        return [b.call(aten.reshape.default, source, shape)]

    return replace(graph_module, [node], build, [source])
