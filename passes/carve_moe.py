"""down @ (act(gate @ x) * (up @ x))  ->  its shared neurons as a smaller FFN, plus octavo.moe of the others.

By carvings that calibration made (compiler/carving.py). With all experts active it is the dense FFN in another order
of sums, and proven to be. With fewer the new form is proven to be what it claims: the dense FFN with the neurons of
experts that were not selected set to zero, whatever the router's scores are. How far that is from the model is
measured, not proven (compiler/carve_model.py).

Not matched: products with a bias, and the shared expert of a mixture that the model already has.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler.carving import Carving, width_of
from octavo.compiler.options import CarveConfig
from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import Builder, Recipe, Site, held, make_site, new_weight, recipes, release
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
LINEAR, ACT_MUL = octavo.linear.default, octavo.act_mul.default


@dataclass(frozen=True)
class FFN:
    """The nodes of one: product of gate and up (2 * I, H), its activation, product of down (H, I)."""

    gate_up: Node
    activated: Node
    down: Node

    @property
    def x(self) -> Node:
        x: Node = arguments(self.gate_up)[0]
        return x

    @property
    def weights(self) -> tuple[Node, Node]:
        return arguments(self.gate_up)[1], arguments(self.down)[1]

    @property
    def name(self) -> str:
        """Of its down projection's weight."""
        return str(self.weights[1].target)


def find_ffns(graph_module: GraphModule, config: CarveConfig, report: PassReport | None = None) -> list[FFN]:
    """Those that can be carved, in order; `report` tells why others cannot."""
    found = []
    for down in graph_module.graph.find_nodes(op="call_function", target=LINEAR):
        activated = arguments(down)[0]
        if activated.target is not ACT_MUL or activated.args[0].target is not LINEAR:
            continue
        ffn = FFN(activated.args[0], activated, down)
        reason = _refusal(ffn, config)
        if not reason:
            found.append(ffn)
        elif report is not None:
            report.reject(down, reason)
    return found


def _refusal(ffn: FFN, config: CarveConfig) -> str:
    if any(len(one.users) > 1 for one in (ffn.gate_up, ffn.activated)):
        return "what it computes in between is read elsewhere too"
    if any(len(arguments(one)) > 2 and arguments(one)[2] is not None for one in (ffn.gate_up, ffn.down)):
        return "its products have a bias"
    if any(weight.op != "get_attr" for weight in ffn.weights):
        return "its weights are computed in every step"
    if any(user.target is octavo.moe.default for user in ffn.x.users):
        return "it is the shared expert of a mixture of experts"
    intermediate = ffn.weights[1].meta["val"].shape[1]
    is_wide = bool(width_of(intermediate, config))
    return "" if is_wide else f"it has {intermediate} neurons, fewer than {config.num_experts} experts"


def carve_moe(
    graph_module: GraphModule, carve: CarveConfig, carvings: Mapping[str, Carving],
    prove: Callable[[PassReport, Site], None] | None = None,
) -> PassReport:  # fmt: skip
    """carvings: by the name of the down projection's weight.

    prove  called for every site while the old weights are still held; afterwards they are not
    """
    report = PassReport("carve_moe", "reassociates")
    for ffn in find_ffns(graph_module, carve, report):
        site, unread = _rewrite(graph_module, ffn, carve, carvings[ffn.name])
        if prove is not None:
            prove(report, site)
        report.sites.append(release(graph_module, site, unread))
    return report


def _rewrite(
    graph_module: GraphModule, ffn: FFN, config: CarveConfig, carving: Carving
) -> tuple[Site, list[Node]]:
    """The site, and the weights that it alone reads."""
    graph, old, unread = graph_module.graph, ffn.down, [*ffn.weights]
    claim = old
    with graph.inserting_after(old):
        marker = graph.call_function(aten.alias.default, (old,))
    weights = _weights(graph_module, ffn, carving)
    with graph.inserting_before(marker):
        b = Builder(graph_module, old)
        logits = b.call(LINEAR, ffn.x, weights["weight"])
        result, experts = _carved(b, ffn, weights, logits, config)
        if not config.is_whole:
            unread.append(_owners(graph_module, ffn, carving))
            claim = _zeroed(b, ffn, experts, unread[-1])
    site = make_site(graph_module, [claim], [result], [ffn.x] if config.is_whole else [ffn.x, logits])
    graph.erase_node(marker)
    old.replace_all_uses_with(result)
    _remove(graph_module, [claim, old])
    return site, unread


def _remove(graph_module: GraphModule, values: Sequence[Node]) -> None:
    """Calls that nothing reads, and those that only they read."""
    waiting = [*values]
    while waiting:
        node = waiting.pop()
        if node.op == "call_function" and not node.users and not node._erased:
            waiting += node.all_input_nodes
            graph_module.graph.erase_node(node)


def _weights(graph_module: GraphModule, ffn: FFN, carving: Carving) -> dict[str, Node]:
    """Rows of gates and ups, and columns of downs, by neuron. Shared ones only where there are some."""
    (gate_up, down), found = ffn.weights, {}
    both = torch.cat([carving.routed, carving.routed + down.meta["val"].shape[1]], 1)
    made: dict[str, tuple[Node, Callable[[Tensor], Tensor]]] = {
        "experts_gate_up": (gate_up, lambda weight: weight[both]),
        "experts_down": (down, lambda weight: weight[:, carving.routed].transpose(0, 1).contiguous()),
    }
    if len(carving.shared):
        rows = torch.cat([carving.shared, carving.shared + down.meta["val"].shape[1]])
        made["shared_gate_up"] = gate_up, lambda weight: weight[rows]
        made["shared_down"] = down, lambda weight: weight[:, carving.shared].contiguous()
    for name, (source, make) in made.items():
        recipe = Recipe((str(source.target),), lambda given, make=make: make(given[0]))  # type: ignore[misc]
        tensor = make(held(graph_module, str(source.target)))
        found[name] = new_weight(graph_module, f"{source.target}_{name.partition('_')[0]}", tensor, recipe)
    dtype = down.meta["val"].dtype
    module = f"{ffn.name.removesuffix('.weight')}_router"
    for name, tensor in (("weight", carving.router.to(dtype)), ("bias", carving.bias)):
        found[name] = new_weight(graph_module, f"{module}.{name}", tensor)
        del recipes(graph_module)[
            f"{module}.{name}"
        ]  # nothing of the model's is in it: its modules are its own
    return found


def _carved(
    b: Builder, ffn: FFN, weights: Mapping[str, Node], logits: Node, config: CarveConfig
) -> tuple[Node, Node]:
    """The new value, and the experts that were selected."""
    activation = ffn.activated.args[1]
    routing = (config.top_k, "unit", False, 1, 1, "", 1.0)
    both = b.call(octavo.router.default, logits, weights["bias"], *routing)
    shares, experts = (b.call(operator.getitem, both, i) for i in (0, 1))
    given = (weights["experts_gate_up"], None, weights["experts_down"], None)
    routed = b.call(octavo.moe.default, ffn.x, experts, shares, *given, activation, 0.0, 0.0)
    if "shared_down" not in weights:
        return routed, experts
    hidden = b.call(ACT_MUL, b.call(LINEAR, ffn.x, weights["shared_gate_up"]), activation)
    return b.call(octavo.add.default, b.call(LINEAR, hidden, weights["shared_down"]), routed), experts


def _zeroed(b: Builder, ffn: FFN, experts: Node, owners: Node) -> Node:
    """The dense FFN with neurons of unselected experts set to zero. owners (I,): expert of each, -1 for shared ones."""
    is_selected = b.call(aten.eq.Tensor, b.call(aten.unsqueeze.default, experts, -1), owners)
    left_out = b.call(aten.bitwise_not.default, b.call(aten.any.dim, is_selected, -2))
    is_routed = b.call(aten.ge.Scalar, owners, 0)
    hidden = b.call(
        aten.masked_fill.Scalar, ffn.activated, b.call(aten.bitwise_and.Tensor, left_out, is_routed), 0.0
    )
    return b.call(LINEAR, hidden, ffn.weights[1])


def _owners(graph_module: GraphModule, ffn: FFN, carving: Carving) -> Node:
    owners = torch.full((len(carving.shared) + carving.routed.numel(),), -1)
    owners[carving.routed.flatten()] = torch.arange(len(carving.routed)).repeat_interleave(
        carving.routed.shape[1]
    )
    return new_weight(graph_module, f"{ffn.name}_owners", owners)
