"""Evaluate what depends on weights alone, and keep the result as a weight."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg

from octavo.compiler.origin import where
from octavo.passes.pattern import is_constant
from octavo.passes.rewrite import Recipe, Site, collect, extract, held, new_weight
from octavo.passes.rule import PassReport


def fold_constants(graph_module: GraphModule) -> PassReport:
    """A view of a weight is folded too, so that kernels only ever see whole tensors.

    What is made without inputs (arange, full) counts as a weight, and stays where nothing is made of it.
    """
    report = PassReport("fold_constants")
    values: dict[Node, Any] = {}
    made: list[tuple[Node, Node]] = []
    for node in list(graph_module.graph.nodes):
        if node.op == "get_attr":
            values[node] = held(graph_module, node.target)
        elif node.op == "call_function" and not node.is_impure():
            if is_constant(node) or _has_only(values, node):
                values[node] = _evaluated(node, values)
    for node, value in values.items():
        is_made = not is_constant(node) and isinstance(value, torch.Tensor)
        if is_made and any(u not in values for u in node.users):
            made.append((node, _replace_with_weight(graph_module, node, value.contiguous())))
    # Once all are there: a weight that took another's name would show in the other's proof.
    report.sites += [_site(graph_module, node, weight) for node, weight in made]
    graph_module.graph.eliminate_dead_code()
    report.notes["folded"] = len(made)
    return report


def _site(graph_module: GraphModule, node: Node, weight: Node) -> Site:
    """The computation and what is kept of it, for the weights' own values: they are proven bit for bit."""
    leaves = [*collect([node], [])[0], weight]
    constants = {leaf.name: held(graph_module, str(leaf.target)) for leaf in leaves}
    return Site(
        node.name, where(node), extract([node], leaves), extract([weight], leaves),
        tuple(leaf.meta.get("val") for leaf in leaves), constants, f"constant {weight.target}", weight.name,
    )  # fmt: skip


def _evaluated(node: Node, values: dict[Node, Any]) -> Any:
    """The value of a call; where a weight has no values yet, the result has none."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: values[n])
    given = [values[n] for n in node.all_input_nodes]
    if any(isinstance(v, torch.Tensor) and v.is_meta for v in given):
        args, kwargs = map_arg(
            (node.args, node.kwargs),
            lambda n: values[n].to("meta") if isinstance(values[n], torch.Tensor) else values[n],
        )
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _has_only(values: dict[Node, Any], node: Node) -> bool:
    return bool(node.all_input_nodes) and all(n in values for n in node.all_input_nodes)


def _replace_with_weight(graph_module: GraphModule, node: Node, value: torch.Tensor) -> Node:
    leaves, _ = collect([node], [])
    alone = extract([node], leaves)

    def make(sources: Sequence[torch.Tensor]) -> torch.Tensor:
        (result,) = Interpreter(alone).run(*sources)
        return result.contiguous()  # type: ignore[no-any-return]

    recipe = Recipe(tuple(str(leaf.target) for leaf in leaves), make)
    weight = new_weight(graph_module, constant_name(node), value, recipe)
    node.replace_all_uses_with(weight)
    return weight


def constant_name(node: Node) -> str:
    """Made weights are called after those they are made of, `layers.0.self_attn.q_proj_k_proj_v_proj_cat`.

    The node's own name alone would not do: once nodes are gone, others get their names.
    """
    parts = [n.target for n in collect([node], [])[0] if n.op == "get_attr"]
    if not parts:
        return f"folded.{node.name}"
    # A weight of the model itself, in no module, is not a place to keep others.
    prefix = str(parts[0]).rsplit(".", 2)[0] if "." in str(parts[0]) else "folded"
    names = [str(p).removeprefix(prefix + ".").removesuffix(".weight").replace(".", "_") for p in parts]
    return f"{prefix}.{'_'.join(dict.fromkeys(names))}_{node.name}"
