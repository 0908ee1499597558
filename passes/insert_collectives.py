"""From where each value lies to the collectives between: every op gets its arguments where its rule needs them.

What a rank has only a part of a sum of is summed (all_reduce), or summed and cut (reduce_scatter); parts of channels
are joined (all_gather). Where ranks along dp have tokens of their own and experts lie along it too, tokens travel to
their experts and back (dispatch, combine). Sizes in reshapes and head counts become the rank's own.
"""

import math
import operator
from collections import Counter
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.legality import named_arguments, op
from octavo.compiler.options import Parallel
from octavo.compiler.origin import where as origin
from octavo.compiler.placement import Placement, Where, collective, text
from octavo.compiler.placement_rules import EXPERT_OPS, outcome
from octavo.compiler.program import STEP_INPUTS
from octavo.passes.rewrite import Builder, fake_mode, set_meta, symbolic_input
from octavo.passes.rule import PassReport
from octavo.passes.sharding import placement_of

octavo = torch.ops.octavo
MODEL_AXES = ("tp", "ep")  # ranks along these see the same tokens
LOCAL_COUNTS = {"octavo::rope_kv_write": "num_heads"}


def insert_collectives(graph_module: GraphModule, parallel: Parallel) -> PassReport:
    """Raises IllegalGraphError for a value that no collective brings to where it is needed."""
    report = PassReport("insert_collectives", "reassociates")
    walk = _Walk(graph_module, parallel)
    for node in list(graph_module.graph.nodes):
        walk.visit(node)
    report.notes.update({name: str(count) for name, count in sorted(walk.counts.items())})
    return report


class _Walk:
    """One pass over the nodes in order. made: collectives by value, axis and wanted place, so that none is twice."""

    def __init__(self, graph_module: GraphModule, parallel: Parallel) -> None:
        self.graph_module, self.parallel, self.mesh = graph_module, parallel, parallel.mesh
        self.mode = fake_mode(graph_module)
        self.made: dict[tuple[Node, str, Where], Node] = {}
        self.counts: Counter[str] = Counter()
        self.row_ranks: Node | None = None

    def visit(self, node: Node) -> None:
        if node.op == "placeholder" and self.mesh.dp > 1:
            node.meta["placement"] = placement_of(node).at("dp", "tokens")
        elif op(node) == "getitem" and node.op == "call_function":
            source, index = node.args
            assert isinstance(source, Node) and isinstance(index, int)
            node.meta["placement"] = source.meta["placements"][index]
            node.meta["val"] = source.meta["val"][index]
        elif node.op == "call_function":
            combine = self._dispatch(node) if op(node) in EXPERT_OPS and self.mesh.dp > 1 else None
            self._call(node)
            if combine is not None:
                self._combine(node, *combine)
        elif node.op == "output":
            for source in node.all_input_nodes:
                for axis in MODEL_AXES:
                    self._bring(node, source, axis, None)

    def _call(self, node: Node) -> None:
        given = {n: v for n, v in named_arguments(node).items() if isinstance(v, Node)} if node.target else {}
        gives: dict[str, Any] = {"dp": self._tokens(node, given)}
        for axis in MODEL_AXES:
            if self.mesh.size(axis) == 1:
                continue
            at: dict[str, Where] = {name: placement_of(value).along(axis) for name, value in given.items()}
            wanted = outcome(node, at)
            for name, where in wanted.needs.items():
                if name in given and at[name] != where:
                    given[name] = self._bring(node, given[name], axis, where)
            gives[axis] = wanted.gives
        self._localize(node)
        set_meta(node, self.mode)
        value = node.meta["val"]
        if isinstance(value, tuple | list):
            node.meta["placements"] = [
                Placement(**{a: g[i] if isinstance(g, tuple) else g for a, g in gives.items()})
                for i in range(len(value))
            ]
        else:
            node.meta["placement"] = Placement(**gives)

    def _tokens(self, node: Node, given: dict[str, Node]) -> Where:
        """Along dp: rows of the rank's own requests, if any argument has them. Weights are whole, but for experts."""
        found = {name: placement_of(value).dp for name, value in given.items()}
        for name, where in found.items():
            if isinstance(where, int) and op(node) not in EXPERT_OPS:
                raise IllegalGraphError(
                    f"insert_collectives: {op(node)} takes {name} {text(where)} along dp, whose ranks have requests of "
                    f"their own ({origin(node)})"
                )
        return "tokens" if "tokens" in found.values() else None

    def _bring(self, user: Node, value: Node, axis: str, wants: Where) -> Node:
        """The value where the user needs it: itself, or through a collective."""
        has = placement_of(value).along(axis)
        if has == wants:
            return value
        if (value, axis, wants) not in self.made:
            try:
                name = collective(has, wants)
            except IllegalGraphError as error:
                raise IllegalGraphError(
                    f"insert_collectives: {op(user)} needs {value.name} {text(wants)} along {axis}: {error} "
                    f"({origin(user)})"
                ) from None
            with self.graph_module.graph.inserting_before(user):
                made = self._collective(value, name, axis, has, wants)
            made.meta["placement"] = placement_of(value).at(axis, wants)
            self.made[value, axis, wants] = made
            self.counts[name] += 1
        made = self.made[value, axis, wants]
        user.replace_input_with(value, made)
        return made

    def _collective(self, value: Node, name: str, axis: str, has: Where, wants: Where) -> Node:
        builder, size = Builder(self.graph_module, value), self.mesh.size(axis)
        rank = len(value.meta["val"].shape)
        if name == "all_reduce":
            return builder.call(octavo.all_reduce.default, value, axis)
        dim = has if name == "all_gather" else wants
        assert isinstance(dim, int)
        if dim < rank - 1:  # heads: gathered along the last dimension they make one with their channels
            raise IllegalGraphError(f"no {name} along dimension {dim} of {rank}")
        target = octavo.all_gather.default if name == "all_gather" else octavo.reduce_scatter.default
        return builder.call(target, value, dim - rank, axis, size)

    def _localize(self, node: Node) -> None:
        """Numbers that say how many heads or channels there are: as many as the rank has."""
        if op(node) in LOCAL_COUNTS and placement_of(named_arguments(node)["k_cache"]).tp == 1:
            index = [a.name for a in node.target._schema.arguments].index(LOCAL_COUNTS[op(node)])  # type: ignore[union-attr]
            node.args = (*node.args[:index], node.args[index] // self.mesh.tp, *node.args[index + 1 :])  # type: ignore[operator]
        elif op(node) == "aten::reshape":
            source = node.all_input_nodes[0].meta["val"].shape
            sizes: list[int] = list(node.args[1])  # type: ignore[arg-type]
            token = sizes.index(-1)
            channels = math.prod(d for d in source if isinstance(d, int))
            rest = math.prod(d for i, d in enumerate(sizes) if i not in (token, token + 1))
            if channels % rest:
                raise IllegalGraphError(
                    f"insert_collectives: {channels} channels are no {sizes} ({origin(node)})"
                )
            sizes[token + 1] = channels // rest
            node.args = (node.args[0], sizes)

    def _dispatch(self, node: Node) -> tuple[Node, Node, int]:
        """Send tokens to their experts in front of a mixture; what `_combine` needs to bring them back."""
        given = named_arguments(node)
        x, experts, weights = given["x"], given["experts"], given["weights"]
        for value in (x, weights):
            for axis in MODEL_AXES:
                self._bring(node, value, axis, None)
        given = named_arguments(node)
        x, weights = given["x"], given["weights"]
        if placement_of(given["down"]).dp != 0:
            raise IllegalGraphError(f"insert_collectives: the experts of {node.name} do not lie along dp")
        wire, outer = self.parallel.wire, None
        if wire == "nvfp4" and op(node) == "octavo::nvfp4_moe":
            outer = given["x_outer"]
        num_local = given["down"].meta["val"].shape[0]
        with self.graph_module.graph.inserting_before(node):
            builder = Builder(self.graph_module, node)
            sent = builder.call(
                octavo.dispatch.default, x, experts, weights, self._row_ranks(), outer, num_local, wire, "dp"
            )
            rows, local, row_weights, source = (_item(builder, sent, i) for i in range(4))
        node.args = tuple({x: rows, experts: local, weights: row_weights}.get(a, a) for a in node.args)
        self.counts["dispatch"] += 1
        return source, experts, num_local

    def _combine(self, node: Node, source: Node, experts: Node, num_local: int) -> None:
        users = list(node.users)
        with self.graph_module.graph.inserting_after(node):
            made = self.graph_module.graph.call_function(
                octavo.combine.default, (node, source, experts, num_local, "dp")
            )
        set_meta(made, self.mode, node)
        made.meta["placement"] = placement_of(node)
        for user in users:
            user.replace_input_with(node, made)
        self.counts["combine"] += 1

    def _row_ranks(self) -> Node:
        """The step input that says how many tokens each rank of dp has."""
        if self.row_ranks is None:
            last = [
                n for n in self.graph_module.graph.nodes if n.op == "placeholder" and n.name in STEP_INPUTS
            ][-1]
            self.row_ranks = symbolic_input(self.graph_module, "row_ranks", (7,), torch.int64, after=last)
            self.row_ranks.meta["placement"] = Placement()
        return self.row_ranks


def _item(builder: Builder, source: Node, index: int) -> Node:
    node = builder.call(operator.getitem, source, index)
    node.meta["placement"] = Placement(dp="tokens")
    return node
