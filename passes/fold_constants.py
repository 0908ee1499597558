"""Evaluate what depends on weights alone, and keep the result as a weight."""

from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from octavo.passes.rewrite import held, new_weight
from octavo.passes.rule import PassReport


def fold_constants(graph_module: GraphModule) -> PassReport:
    """A view of a weight is folded too, so that kernels only ever see whole tensors."""
    report = PassReport("fold_constants")
    values: dict[Node, Any] = {}
    folded = 0
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr":
            values[node] = held(graph_module, node.target)
        elif node.op == "call_function" and node.all_input_nodes and not node.is_impure():
            if all(n in values for n in node.all_input_nodes):
                args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
                values[node] = node.target(*args, **kwargs)
    for node, value in values.items():
        if (
            node.op == "call_function"
            and isinstance(value, torch.Tensor)
            and any(u not in values for u in node.users)
        ):
            _replace_with_weight(graph_module, node, value.contiguous())
            folded += 1
    graph_module.graph.eliminate_dead_code()
    report.notes["folded"] = folded
    return report


def _replace_with_weight(graph_module: GraphModule, node: Node, value: torch.Tensor) -> None:
    node.replace_all_uses_with(new_weight(graph_module, constant_name(node), value))


def constant_name(node: Node) -> str:
    """Merged weights are called after their parts: `layers.0.self_attn.q_proj.weight+k_proj.weight+...`."""
    parts = [n.target for n in node.all_input_nodes if n.op == "get_attr"]
    if not parts:
        return f"folded.{node.name}"
    prefix = str(parts[0]).rsplit(".", 2)[0]
    names = [str(p).removeprefix(prefix + ".").removesuffix(".weight").replace(".", "_") for p in parts]
    return f"{prefix}.{'_'.join(dict.fromkeys(names))}_{node.name}"
