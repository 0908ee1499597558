"""Channels of what products read, made more alike before they share scales: their producer multiplies, weights divide.

    rms_norm(x, g) @ W.T                 =  rms_norm(x, g * s) @ (W / s).T
    (act(x @ G.T) * (x @ U.T)) @ W.T     =  (act(x @ G.T) * (x @ (U * s).T)) @ (W / s).T

s = 2 ** e with whole e, so nothing is rounded and every sum is the one that it was. s is about (second moment) ** -0.2:
with 0 nothing is scaled, with -0.5 all channels are alike and their whole spread is in the weights.
Source: Xiao et al. 2023 (SmoothQuant), section 4.

The graph is not changed here: weights are scaled when they are quantised, one at a time (passes/quantize_linear.py).
Not matched: norms whose weight has an offset, which it could not hold exactly; values that another op reads too or a
product that stays as it is; weights that others read; products with biases in front of an activation; experts.
"""

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.passes.pattern import arguments, aten
from octavo.passes.rewrite import Builder, Recipe, Site, held, make_site, new_weight, release
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
LINEAR, ACT_MUL = octavo.linear.default, octavo.act_mul.default
EXPONENT = -0.2
LARGEST_SHIFT = 6
# Where a norm has its weight, and its offset or None.
NORMS = {octavo.rms_norm.default: (1, 3), octavo.add_rms_norm.default: (2, 4)}


@dataclass
class Balance:
    """What is multiplied, all powers of two, by the name of a weight (N, K) or (K,).

    inputs  s (K,): products read their input times it, so columns are divided by it
    rows    of gates and ups, the product that reads what they make: ups are multiplied by its s
    norms   of the weight of a norm, a product that reads its result
    """

    inputs: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, str] = field(default_factory=dict)
    norms: dict[str, str] = field(default_factory=dict)

    def weight(self, name: str, weight: Tensor) -> Tensor:
        """The weight as it is quantised: itself, or a scaled copy."""
        if name in self.rows:
            ups = self.inputs[self.rows[name]]
            weight = _times(weight, torch.cat([torch.ones_like(ups), ups])[:, None])
        return weight / self.inputs[name].to(weight.dtype) if name in self.inputs else weight

    def input(self, name: str, x: Tensor) -> Tensor:
        """What the product of this weight will read, of what it reads now."""
        return _times(x, self.inputs[name]) if name in self.inputs else x

    def scale_norms(self, graph_module: GraphModule) -> None:
        """Give the norms their new weights."""
        for node in graph_module.graph.find_nodes(op="get_attr"):
            name = str(node.target)
            if name in self.norms:
                make = partial(_times_first, scale=self.inputs[self.norms[name]])
                value = make([held(graph_module, name)])
                made = new_weight(graph_module, f"{name}_balanced", value, Recipe((name,), make))
                node.replace_all_uses_with(made)


def _times(value: Tensor, scale: Tensor) -> Tensor:
    return value * scale.to(value.dtype)


def _times_first(sources: Sequence[Tensor], scale: Tensor) -> Tensor:
    return _times(sources[0], scale)


@dataclass(frozen=True)
class _Place:
    """products: all that read `value`, which `maker` makes: a norm, or the product in front of an activation."""

    value: Node
    maker: Node
    products: tuple[Node, ...]


def balance_channels(
    graph_module: GraphModule, quantised: Collection[str], moments: Mapping[str, Tensor]
) -> tuple[PassReport, Balance]:
    """quantised: the weights of all linears that will be in NVFP4; moments: (K,) of the input of each, second moments.

    A site holds both forms for any values of weights and exponents.
    """
    report, balance = PassReport("balance_channels", "reassociates"), Balance()
    for place in _places(graph_module, quantised, report):
        names = [str(node.args[1].target) for node in place.products]  # type: ignore[union-attr]
        scale = _scales(moments[names[0]])
        balance.inputs.update(dict.fromkeys(names, scale))
        if place.maker.target is LINEAR:
            balance.rows[str(place.maker.args[1].target)] = names[0]  # type: ignore[union-attr]
        else:
            norm = arguments(place.maker)[NORMS[place.maker.target][0]]  # type: ignore[index]
            balance.norms[str(norm.target)] = names[0]
        report.sites.append(_site(graph_module, place))
    report.notes["balanced"] = f"{len(balance.inputs)} of {len(quantised)} products"
    return report, balance


def _scales(moments: Tensor) -> Tensor:
    """(K,) powers of two, about as many above 1 as below. A channel that was never used keeps its values."""
    is_used = moments > 0
    if not bool(is_used.any()):
        return torch.ones_like(moments)
    logs = moments.clamp(min=torch.finfo(torch.float32).tiny).log2()
    shift = (EXPONENT * (logs - logs[is_used].median())).round().clamp(-LARGEST_SHIFT, LARGEST_SHIFT)
    return torch.exp2(torch.where(is_used, shift, torch.zeros_like(shift)))


def _places(graph_module: GraphModule, quantised: Collection[str], report: PassReport) -> Iterator[_Place]:
    readers: dict[str, list[Node]] = {}
    for node in graph_module.graph.find_nodes(op="get_attr"):
        readers.setdefault(str(node.target), []).extend(node.users)
    linears = graph_module.graph.find_nodes(op="call_function", target=LINEAR)
    products = [n for n in linears if n.args[1].op == "get_attr" and n.args[1].target in quantised]
    for value in dict.fromkeys(n.args[0] for n in products):
        reading = [n for n in products if n.args[0] is value]
        maker = _maker(value)
        reason = _refusal(value, maker, reading, quantised, readers)
        if reason:
            report.reject(reading[0], reason)
        elif maker is not None:
            yield _Place(value, maker, tuple(reading))


def _maker(value: Node) -> Node | None:
    """The norm, or the product in front of the activation."""
    source = value.args[0] if value.target is operator.getitem else value
    if not isinstance(source, Node):
        return None
    if source.target in NORMS and (source is value or value.args[1] == 0):
        return source
    inner = value.args[0] if value.target is ACT_MUL else None
    return inner if isinstance(inner, Node) and inner.target is LINEAR else None


def _refusal(
    value: Node, maker: Node | None, reading: Sequence[Node], quantised: Collection[str],
    readers: Mapping[str, Sequence[Node]],
) -> str:  # fmt: skip
    """Why the place is left as it is, or ""."""
    if maker is None:
        return "its input is not made by a norm or a gated activation, so nothing can be scaled there"
    if set(value.users) != set(reading):
        return "its input is also read by what is not in NVFP4"
    weights = [str(node.args[1].target) for node in reading]  # type: ignore[union-attr]
    if any(set(readers[name]) - set(reading) for name in weights):
        return "its weight is read elsewhere too"
    return _refusal_of_maker(maker, quantised, readers)


def _refusal_of_maker(maker: Node, quantised: Collection[str], readers: Mapping[str, Sequence[Node]]) -> str:
    values = arguments(maker)
    if maker.target is LINEAR:
        weight = values[1]
        if len(values) > 2 and values[2] is not None:
            return "the product in front of the activation has a bias"
        if weight.op != "get_attr" or weight.target not in quantised or len(maker.users) > 1:
            return "the product in front of the activation stays as it is"
        return (
            "" if set(readers[str(weight.target)]) == {maker} else "the weight in front is read elsewhere too"
        )
    place, offset = NORMS[maker.target]  # type: ignore[index]
    if len(values) > offset and values[offset]:
        return f"the norm adds {values[offset]} to its weight, which then could not hold the scales exactly"
    is_alone = values[place].op == "get_attr" and set(readers[str(values[place].target)]) == {maker}
    return "" if is_alone else "the norm's weight is computed in every step, or read elsewhere too"


def _site(graph_module: GraphModule, place: _Place) -> Site:
    """Both forms; the new one is built at the end of the graph and removed again."""
    width = place.value.meta["val"].shape[-1]
    weight = place.products[0].args[1]
    assert isinstance(weight, Node)
    with graph_module.graph.inserting_before(graph_module.graph.output_node()):
        builder = Builder(graph_module, place.products[0])
        shift = new_weight(graph_module, "balance.shift", weight.meta["val"].new_zeros(width, device="meta"))
        results, inputs = _after(builder, place, shift)
        site = make_site(graph_module, place.products, results, inputs)
    _remove(graph_module, results, {*inputs})
    return release(graph_module, site, [shift])


def _after(b: Builder, place: _Place, shift: Node) -> tuple[list[Node], list[Node]]:
    """The new results and all inputs of both forms."""
    scale = b.call(aten.exp2.default, shift)
    maker, values = place.maker, list(arguments(place.maker))
    if maker.target is LINEAR:
        rows = b.call(aten.cat.default, [b.call(aten.ones_like.default, scale), scale])
        inputs = [*maker.all_input_nodes]
        values[1] = b.call(aten.mul.Tensor, values[1], b.call(aten.reshape.default, rows, [-1, 1]))
        value = b.call(ACT_MUL, b.call(LINEAR, *values), *place.value.args[1:])
    else:
        inputs = [*maker.all_input_nodes]
        index = NORMS[maker.target][0]  # type: ignore[index]
        values[index] = b.call(aten.mul.Tensor, values[index], scale)
        value = b.call(maker.target, *values)  # type: ignore[arg-type]
        if place.value is not maker:
            value = b.call(place.value.target, value, 0)  # type: ignore[arg-type]
    results = []
    for node in place.products:
        _, weight, *bias = arguments(node)
        inputs += [n for n in node.all_input_nodes if n is not place.value]
        results.append(b.call(LINEAR, value, b.call(aten.div.Tensor, weight, scale), *bias))
    return results, [*inputs, shift]


def _remove(graph_module: GraphModule, results: Sequence[Node], inputs: Collection[Node]) -> None:
    waiting = list(results)
    while waiting:
        node = waiting.pop()
        if node not in inputs and not node.users:
            waiting += node.all_input_nodes
            graph_module.graph.erase_node(node)
