"""Attention's heads and FFNs' widths over the ranks of tp (Megatron-LM, arXiv 1909.08053, section 3).

What makes queries, keys, values, gates, ups and logits is cut by rows, so that each rank makes its own heads or
channels; what takes them is cut by columns and leaves a part of a sum. A head of keys that several ranks need, each
has; latents, which all heads share, every rank has whole. Left whole, with a reason: heads or widths that do not
divide, quantised products that take cut channels, block scales whose tiles would be cut.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.dims import caches_of, leaves_graph
from octavo.compiler.legality import named_arguments, op
from octavo.compiler.mesh import Mesh
from octavo.compiler.nvfp4 import TILE_ROWS
from octavo.compiler.options import Parallel
from octavo.compiler.placement import Placement
from octavo.passes.rule import PassReport
from octavo.passes.shard_experts import first_rank_only
from octavo.passes.sharding import Ranges, by_coordinate, own_copy, spread

octavo = torch.ops.octavo
LINEARS = ("octavo::linear", "octavo::nvfp4_linear", "octavo::nvfp4_weight_linear", "octavo::fp8_linear")
ROW_ARGUMENTS = ("weight", "weight_scale", "alpha", "bias")
# What stands between a product and attention, head by head.
PER_HEAD = ("aten::reshape", "octavo::rms_norm", "octavo::rope")

Section = tuple[int, int]  # units (heads) and elements of each


def shard_tensors(graph_module: GraphModule, parallel: Parallel) -> PassReport:
    report = PassReport("shard_tensors", "reassociates")
    if parallel.tp == 1:
        return report
    nodes = list(graph_module.graph.nodes)
    cut = _Cut(graph_module, parallel.mesh, report)
    for node in nodes:
        if op(node) == "octavo::paged_attention":
            cut.attention(node)
        elif op(node) == "octavo::paged_mla_attention":
            cut.latent_attention(node)
        elif op(node) in ("octavo::act_mul", "octavo::pointwise"):
            cut.ffn(node)
        elif op(node) == "octavo::act_mul_quantize":
            report.reject(node, "channels that are quantised as they are made are left whole")
        elif op(node) in LINEARS and leaves_graph(node):
            cut.rows(node, [(_rows(node), 1)])
    report.notes["cut"] = f"{cut.num_attentions} attentions, {cut.num_ffns} FFNs"
    return report


def _rows(linear: Node) -> int:
    rows: int = linear.meta["val"].shape[-1]
    return rows


class _Cut:
    """The cuts of one graph along tp."""

    def __init__(self, graph_module: GraphModule, mesh: Mesh, report: PassReport) -> None:
        self.graph_module, self.mesh, self.report = graph_module, mesh, report
        self.num_attentions = self.num_ffns = 0

    def attention(self, node: Node) -> None:
        writer = _writer(node)
        given = named_arguments(writer)
        heads, kv_heads = node.meta["val"].shape[2], caches_of(node)[0].meta["val"].shape[1]
        if op(writer) == "octavo::rope_kv_write":
            width = writer.meta["val"].shape[3]
            rest = _rows(given["qkv"]) - (heads + kv_heads) * width
            sections = {given["qkv"]: [(heads, width), (kv_heads, width), (kv_heads, rest // kv_heads)]}
        else:
            ends = {named_arguments(node)["q"]: heads, given["k"]: kv_heads, given["v"]: kv_heads}
            sections = {_product(end): [(count, end.meta["val"].shape[3])] for end, count in ends.items()}
        reason = self._why_not_heads(node, heads, kv_heads, sections)
        if reason:
            self.report.reject(node, reason)
            return
        for linear, own in sections.items():
            self.rows(linear, own)
        self._cut_caches(node, kv_heads)
        for name in ("sinks", "slopes"):
            weight = named_arguments(node)[name]
            if isinstance(weight, Node):
                self._cut(own_copy(self.graph_module, weight, node), 0, [(heads, 1)])
        self._columns(node)
        self.num_attentions += 1

    def latent_attention(self, node: Node) -> None:
        """Queries and what each head makes of latents, by heads (absorb_mla); the latents' pages stay whole."""
        given, heads = named_arguments(node), node.meta["val"].shape[2]
        into, users = given["q_latent"], list(node.users)
        out = users[0] if len(users) == 1 else node
        reason = None
        if {op(into), op(out)} != {"octavo::head_linear"}:
            reason = (
                f"its heads come from {op(into)} and go to {op(out)}, expected products of each head's own"
            )
        ends = {_product(end): end for end in (into.args[0] if reason is None else into, given["q_rope"])}
        sections = {linear: [(heads, end.meta["val"].shape[3])] for linear, end in ends.items()}
        reason = reason or self._why_not_heads(out, heads, heads, sections)
        if reason:
            self.report.reject(node, reason)
            return
        for linear, own in sections.items():
            self.rows(linear, own)
        for product in (into, out):
            self._cut(
                own_copy(self.graph_module, named_arguments(product)["weight"], product), 0, [(heads, 1)]
            )
        self._columns(out)
        self.num_attentions += 1

    def _why_not_heads(
        self, node: Node, heads: int, kv_heads: int, sections: dict[Node, list[Section]]
    ) -> str | None:
        tp = self.mesh.tp
        if heads % tp or (kv_heads % tp and tp % kv_heads):
            return f"{heads} heads of queries and {kv_heads} of keys do not divide over {tp} ranks"
        for linear, own in sections.items():
            if op(linear) not in LINEARS:
                return f"its heads come from {op(linear)}, expected a product"
            if sum(count * width for count, width in own) != _rows(linear):
                return f"{linear.name} makes {_rows(linear)} channels, expected those of {own}"
            if reason := self._why_not_rows(linear, own):
                return reason
        takers = list(_takers(node))
        if len(takers) != 1 or op(takers[0]) not in (*LINEARS, "octavo::quantize"):
            return f"its heads go to {', '.join(op(n) for n in takers)}, expected one product"
        return None

    def _cut_caches(self, node: Node, kv_heads: int) -> None:
        for cache in caches_of(node):
            local = max(kv_heads // self.mesh.tp, 1)
            cache.meta["val"] = cache.meta["val"].narrow(1, 0, local).contiguous()
            cache.meta["placement"] = Placement(tp=1)

    def ffn(self, node: Node) -> None:
        """linear -> gate or activation -> linear."""
        linear = node.args[0]
        if op(node) == "octavo::pointwise" and any(isinstance(arg, Node) for arg in node.args[1:4]):
            return
        users = list(node.users)
        if not isinstance(linear, Node) or op(linear) not in LINEARS or len(linear.users) > 1:
            return
        if len(users) != 1 or op(users[0]) not in LINEARS or users[0].all_input_nodes[0] is not node:
            return
        halves = 2 if op(node) == "octavo::act_mul" else 1
        width = _rows(linear) // halves
        reason = self._why_not_rows(linear, [(width, 1)] * halves)
        if width % self.mesh.tp:
            reason = f"a width of {width} does not divide over {self.mesh.tp} ranks"
        if reason:
            self.report.reject(node, reason)
            return
        self.rows(linear, [(width, 1)] * halves)
        self._columns(node)
        self.num_ffns += 1

    def rows(self, linear: Node, sections: Sequence[Section]) -> None:
        """Cut what makes channels, section by section."""
        if any(count % self.mesh.tp and self.mesh.tp % count for count, _ in sections) or self._why_not_rows(
            linear, sections
        ):
            return
        given, rows = named_arguments(linear), _rows(linear)
        for name in ROW_ARGUMENTS:
            weight = given.get(name)
            if not isinstance(weight, Node):
                continue
            size = weight.meta["val"].shape[0]
            if size == rows:
                self._cut(own_copy(self.graph_module, weight, linear), 0, sections)
            elif name == "weight_scale":  # swizzled: tiles of 128 rows lie one after another
                self._cut(own_copy(self.graph_module, weight, linear), 0, sections, size // rows)

    def _columns(self, node: Node) -> None:
        """Cut what takes the channels of a value, where it is a plain product."""
        (linear,) = _takers(node)
        if op(linear) != "octavo::linear":
            return  # the channels are gathered for it
        given = named_arguments(linear)
        weight = own_copy(self.graph_module, given["weight"], linear)
        self._cut(weight, 1, [(weight.meta["val"].shape[1], 1)])
        if isinstance(given["bias"], Node):
            first_rank_only(self.graph_module, own_copy(self.graph_module, given["bias"], linear), self.mesh)

    def _why_not_rows(self, linear: Node, sections: Sequence[Section]) -> str | None:
        """Swizzled block scales are cut between tiles of 128 rows only."""
        if named_arguments(linear).get("layout", "linear") == "linear":
            return None
        ends = [
            end for t in range(self.mesh.tp) for piece in _ranges(sections, t, self.mesh.tp) for end in piece
        ]
        if uneven := [end for end in (*ends, _rows(linear)) if end % TILE_ROWS]:
            return (
                f"block scales of {linear.name} lie in tiles of {TILE_ROWS} rows, and one of {self.mesh.tp} parts "
                f"would end at row {uneven[0]}"
            )
        return None

    def _cut(self, weight: Node, dim: int, sections: Sequence[Section], elements: int = 1) -> None:
        """elements: of the tensor, for each row."""

        def ranges(t: int) -> Ranges:
            parts = _ranges(sections, t, self.mesh.tp)
            return [(start * elements, stop * elements) for start, stop in parts]

        placement = Placement(tp=dim)
        spread(
            self.graph_module,
            weight,
            dim,
            by_coordinate(self.mesh, "tp", ranges),
            placement,
            elements=elements,
        )


def _ranges(sections: Sequence[Section], t: int, tp: int) -> Iterator[tuple[int, int]]:
    """Of each section the part of place t; where there are fewer units than ranks, the one that it shares."""
    start = 0
    for count, width in sections:
        first, last = (t * count // tp, (t + 1) * count // tp) if count >= tp else (t * count // tp,) * 2
        yield start + first * width, start + max(last, first + 1) * width
        start += count * width


def _writer(attention: Node) -> Node:
    """What writes the pages that an attention reads."""
    cache = named_arguments(attention)["k_cache"]
    writers: list[Node] = [n for n in cache.users if n is not attention]
    return writers[0]


def _product(value: Node) -> Node:
    """The product that makes heads, below what is done head by head."""
    while op(value) in PER_HEAD:
        value = value.all_input_nodes[0]
    return value


def _takers(node: Node) -> Iterator[Node]:
    """Users, beyond reshapes."""
    for user in node.users:
        if op(user) == "aten::reshape":
            yield from _takers(user)
        else:
            yield user
