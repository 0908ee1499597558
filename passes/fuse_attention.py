"""softmax(mask(q k^T * scale)) v, as products or as scaled_dot_product_attention  ->  octavo.attention.

From each softmax the walk goes up to the product of q and k, collecting scale, soft-cap and masks, and down
to the product with v. What masks and biases mean is `classify_mask`'s to say. Heads repeated for grouped
queries are undone; a column of scores that is joined before the softmax and cut off after it is a sink.
"""

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.classify_mask import FORBIDDEN, Refused, classify
from octavo.passes.pattern import arguments, aten, describe
from octavo.passes.rewrite import Builder, content, held, new_weight, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
SDPA = aten.scaled_dot_product_attention.default
CASTS = (aten._to_copy.default,)
MAXIMA = (aten.amax.default, aten.max.dim)
FLOORS = (aten.max.other, aten.maximum.default, aten.clamp.default, aten.clamp_min.default)
HEADS_FIRST, SWAP_LAST, HEADS_TOKENS = [0, 1, 2, 3], [0, 1, 3, 2], [0, 2, 1, 3]
PRODUCTS = (aten.matmul.default, aten.bmm.default)
VIEWS = (
    aten.reshape.default, aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default,
    aten.squeeze.dim, aten.squeeze.dims,
)  # fmt: skip
LARGEST_PROBE = 4097


@dataclass(frozen=True)
class Operand:
    """q, k or v: `node`, whose axes taken in `order` are (1, heads, T, D); without a first axis (heads, T, D)."""

    node: Node
    order: list[int]

    def tokens_first(self, build: Builder) -> Node:
        if len(self.order) == 3:
            heads_first = build.call(aten.permute.default, self.node, self.order)
            sizes = [1, *(d if isinstance(d, int) else -1 for d in heads_first.meta["val"].shape)]
            return build.call(
                aten.permute.default, build.call(aten.reshape.default, heads_first, sizes), HEADS_TOKENS
            )
        return build.call(aten.permute.default, self.node, [self.order[d] for d in HEADS_TOKENS])

    @property
    def shape(self) -> list[Any]:
        sizes = self.node.meta["val"].shape
        if len(sizes) not in (3, 4) or len(self.order) != len(sizes):
            raise Refused(f"{self.node.name} has {len(sizes)} axes, expected (1, heads, T, D)")
        return [1, *(sizes[d] for d in self.order)][-4:]


@dataclass
class Core:
    """One attention that ends in `root`; masks are (node, kind) with kind add, keep, drop or one (see classify_mask).

    cut      the last column of the weights is dropped, which a sink must have brought
    factors  what multiplies each bias after it was added
    """

    root: Node
    q: Operand = field(init=False)
    k: Operand = field(init=False)
    v: Operand = field(init=False)
    scale: float = 1.0
    softcap: float = 0.0
    causal: bool = False
    window: int = 0
    sinks: Node | None = None
    slopes: torch.Tensor | None = None
    cut: bool = False
    masks: list[tuple[Node, str]] = field(default_factory=list)
    factors: dict[Node, float] = field(default_factory=dict)

    def add(self, bias: Node) -> None:
        """A bias is scaled by what multiplies the sum afterwards, and must not be below a soft-cap."""
        if self.softcap:
            raise Refused(f"{describe(bias)} is added before the soft-cap")
        self.masks.append((bias, "add"))
        self.factors[bias] = self.scale


def fuse_attention(graph_module: GraphModule, max_model_len: int) -> PassReport:
    report = PassReport("fuse_attention", "reassociates")
    for node in list(graph_module.graph.nodes):
        if node.target not in (*SOFTMAX, SDPA) or not node.users:
            continue
        try:
            core = from_sdpa(node) if node.target is SDPA else from_softmax(node)
            _classify_masks(graph_module, core, max_model_len)
            report.sites.append(_replace(graph_module, core))
        except Refused as refusal:
            report.reject(node, str(refusal))
    return report


def from_sdpa(node: Node) -> Core:
    names = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    core = Core(node)
    core.scale = (
        given["q"].meta["val"].shape[-1] ** -0.5 if given.get("scale") is None else float(given["scale"])
    )
    core.q, core.k = _operand(given["q"], HEADS_FIRST, core), _operand(given["k"], HEADS_FIRST, core)
    core.v = _operand(given["v"], HEADS_FIRST)
    core.causal = bool(given.get("is_causal", False))
    mask = given.get("attn_mask")
    if isinstance(mask, Node):
        if mask.meta["val"].dtype is torch.bool:
            core.masks.append((mask, "keep"))
        else:
            core.masks.append((mask, "add"))
            core.factors[mask] = 1.0
    return core


def from_softmax(node: Node) -> Core:
    if node.args[1] not in (-1, len(node.meta["val"].shape) - 1):
        raise Refused(f"softmax over axis {node.args[1]}, not over the keys")
    root, cut = _product_below(node)
    core = Core(root, cut=cut)
    core.v = _operand(core.root.args[1], _axes(core.root.args[1], HEADS_FIRST))
    q, k = _walk_up(node.args[0], core)
    if core.cut and core.sinks is None:
        raise Refused("the weights of the last key are dropped, which is no sink")
    core.q, core.k = _operand(q, _axes(q, HEADS_FIRST), core), _operand(k, _axes(k, SWAP_LAST), core)
    return core


def _axes(value: Any, order: list[int]) -> list[int]:
    """The order for an operand with or without the axis of size one in front."""
    rank = len(value.meta["val"].shape) if isinstance(value, Node) else 4
    return [d - 1 for d in order[1:]] if rank == 3 else order


def _product_below(node: Node) -> tuple[Node, bool]:
    """The product of the weights with v, past conversions; and whether the last column was cut off on the way."""
    users, cut = list(node.users), False
    while len(users) == 1 and (users[0].target in CASTS or _is_lead_view(users[0]) or _cuts_last(users[0])):
        cut = cut or _cuts_last(users[0])
        node, users = users[0], list(users[0].users)
    if len(users) != 1 or users[0].target not in PRODUCTS or users[0].args[0] is not node:
        raise Refused(f"the weights go to {[describe(u) for u in users]}, not into one product with v")
    return users[0], cut


def _cuts_last(node: Node) -> bool:
    """x[..., :-1], or as many as there are keys."""
    if node.target is not aten.slice.Tensor or node.args[1] not in (-1, 3):
        return False
    whole, part = (value.meta["val"].shape[-1] for value in (node.args[0], node))  # type: ignore[union-attr]
    return bool(node.args[2] == 0) and str(whole - part) == "1"


def _is_lead_view(node: Node) -> bool:
    """A view that adds or takes away axes of size one in front."""
    if node.target not in VIEWS or not isinstance(node.args[0], Node):
        return False
    old, new = ([str(d) for d in value.meta["val"].shape] for value in (node.args[0], node))
    short, long = sorted((old, new), key=len)
    lead = len(long) - len(short)
    return long[lead:] == short and long[:lead] == ["1"] * lead


def _walk_up(value: Any, core: Core) -> tuple[Any, Any]:
    """From the softmax's input to q and k."""
    while isinstance(value, Node) and value.target not in PRODUCTS:
        if value.target is aten.baddbmm.default:
            bias, q, k = value.args
            if value.kwargs.get("beta", 1) != 1:
                raise Refused(f"{describe(value)} scales its bias by {value.kwargs['beta']}")
            core.add(bias)  # type: ignore[arg-type]
            core.scale *= _constant(value.kwargs.get("alpha", 1))
            return q, k
        value = _step_up(value, core)
    if not isinstance(value, Node):
        raise Refused(f"the scores do not come from a product of q and k but from {describe(value)}")
    return value.args[0], value.args[1]


def _step_up(node: Node, core: Core) -> Any:
    first, *rest = node.args
    if node.target in CASTS or _is_lead_view(node):
        return first
    if node.target is aten.mul.Tensor and _is_of_pairs(rest[0]) and not _reaches_product(rest[0]):
        core.masks.append((rest[0], "one"))  # type: ignore[arg-type]
        return first
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        factor = _constant(rest[0])
        core.scale *= factor if node.target is aten.mul.Tensor else 1.0 / factor
        return first
    if node.target is aten.tanh.default:
        # What was multiplied on so far is the cap; what follows inside completes the scale.
        core.softcap = core.scale
        return first
    if node.target is aten.sub.Tensor and _is_maximum(rest[0], first):
        return first
    if node.target in FLOORS and len(rest) == 1 and not node.kwargs and _filled(rest[0]) <= FORBIDDEN:
        return first  # masked scores, of which none becomes one that counts
    if node.target is aten.cat.default and core.cut:
        core.sinks = _sink(node, core)
        return first[0]  # type: ignore[index]
    if node.target is aten.add.Tensor:
        inner, mask = (first, rest[0]) if _reaches_product(first) else (rest[0], first)
        if not isinstance(mask, Node) or _reaches_product(mask):
            raise Refused(f"{describe(node)} adds {describe(mask)} to the scores")
        core.add(mask)
        return inner
    if node.target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        _require_forbidden(rest[1])
        core.masks.append((rest[0], "drop"))  # type: ignore[arg-type]
        return first
    if node.target in (aten.where.self, aten.where.ScalarOther):
        _require_forbidden(rest[1])
        core.masks.append((first, "keep"))  # type: ignore[arg-type]
        return rest[0]
    raise Refused(f"{describe(node)} stands between the scores and the softmax")


def _is_of_pairs(value: Any) -> bool:
    """One value for each pair of tokens."""
    sizes = value.meta["val"].shape[-2:] if isinstance(value, Node) else ()
    return len(sizes) == 2 and not any(isinstance(d, int) for d in sizes)


def _is_maximum(value: Any, scores: Any) -> bool:
    """The largest score of each query, which cancels in the softmax."""
    if isinstance(value, Node) and value.target is operator.getitem:
        value = value.args[0]
    return isinstance(value, Node) and value.target in MAXIMA and value.args[0] is scores


def _sink(node: Node, core: Core) -> Node:
    """The weight (heads,) that the joined column of scores repeats."""
    parts = arguments(node)[0]
    column = parts[1] if len(parts) == 2 else None
    while isinstance(column, Node) and column.target in (aten.expand.default, aten.reshape.default, *CASTS):
        column = column.args[0]
    if core.scale != 1.0 or core.masks or core.softcap:
        raise Refused("scales or masks are applied after a sink is joined")
    heads = node.meta["val"].shape[1]
    if not isinstance(column, Node) or column.op != "get_attr" or column.meta["val"].numel() != heads:
        raise Refused(
            f"{describe(node)} joins {len(parts)} parts, the last of which is no weight with one element a head"
        )
    return column


def _reaches_product(value: Any, depth: int = 12) -> bool:
    if not isinstance(value, Node) or depth == 0:
        return False
    if value.target in (*PRODUCTS, aten.baddbmm.default):
        return True
    return any(_reaches_product(n, depth - 1) for n in value.all_input_nodes)


def _constant(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Node) and value.target in (aten.full.default, aten.scalar_tensor.default):
        return float(value.args[-1])  # type: ignore[arg-type]
    raise Refused(f"the scores are multiplied by {describe(value)}, which is not a constant")


def _filled(value: Any) -> float:
    """The number that stands for masked scores, of the graph or held by the model's module."""
    module = value.graph.owning_module if isinstance(value, Node) and value.op == "get_attr" else None
    tensor = None if module is None else held(module, str(value.target))
    if tensor is None or tensor.is_meta or tensor.numel() != 1:
        return _constant(value)
    return float(tensor)


def _require_forbidden(value: Any) -> None:
    if _filled(value) > FORBIDDEN:
        raise Refused(f"masked scores become {_filled(value)}, which does not forbid a key")


def _operand(value: Any, order: list[int], core: Core | None = None) -> Operand:
    """Below transposes, repeated heads and, where a core is given, constant factors, which join its scale."""
    while isinstance(value, Node):
        if value.target is aten.permute.default:
            inner: list[int] = list(value.args[1])  # type: ignore[arg-type]
            value, order = value.args[0], [inner[d] for d in order]
        elif (
            core is not None
            and value.target in (aten.mul.Tensor, aten.div.Tensor)
            and _is_constant(value.args[1])
        ):
            factor = _constant(value.args[1])
            core.scale *= factor if value.target is aten.mul.Tensor else 1.0 / factor
            value = value.args[0]
        elif _repeated_axis(value) == order[1]:
            value = arguments(value)[0]
        elif _is_expanded_group(value) and order[1] == 1:
            value = value.args[0].args[0].args[0]  # type: ignore[union-attr]
        else:
            return Operand(value, order)
    raise Refused(f"{describe(value)} is not a value of the graph")


def _repeated_axis(node: Node) -> int | None:
    """The axis along which each element is repeated, if that is what `node` does."""
    args = arguments(node)
    if node.target is not aten.repeat_interleave.self_int or len(args) < 3 or args[2] is None:
        return None
    return int(args[2] % len(node.meta["val"].shape))


def _is_constant(value: Any) -> bool:
    return isinstance(value, int | float)


def _is_expanded_group(node: Node) -> bool:
    """reshape(expand(reshape(x))) that repeats every head of x (axis 1) for its group of queries."""
    expanded = node.args[0] if node.args else None
    if node.target is not aten.reshape.default or not isinstance(expanded, Node):
        return False
    unsqueezed = expanded.args[0]
    if expanded.target is not aten.expand.default or not isinstance(unsqueezed, Node):
        return False
    dims, source = unsqueezed.meta["val"].shape, unsqueezed.args[0]
    if unsqueezed.target is not aten.reshape.default or not isinstance(source, Node):
        return False
    shape = source.meta["val"].shape
    return len(dims) == 5 and len(shape) == 4 and dims[2] == 1 and tuple(dims[:2]) == tuple(shape[:2])


def _classify_masks(graph_module: GraphModule, core: Core, max_model_len: int) -> None:
    """Sets causal and window from what the masks do for every pair of positions, or raises Refused."""
    heads, kv_heads = core.q.shape[1], core.k.shape[1]
    if core.v.shape[1] != kv_heads or heads % kv_heads:
        raise Refused(
            f"{heads} query heads do not divide over {kv_heads} key and {core.v.shape[1]} value heads"
        )
    queries, keys = core.q.shape[2], core.k.shape[2]
    if str(queries) != str(keys):  # as text: comparing symbols would tie the graph to the sizes seen first
        raise Refused(f"{queries} queries look at {keys} keys: not those of one sequence and no more")
    if not core.masks:
        return
    length = keys if isinstance(keys, int) else min(max_model_len, LARGEST_PROBE)
    mask = classify(graph_module, core.masks, heads, length)
    core.causal, core.window, core.slopes = core.causal or mask.causal, mask.window, mask.slopes
    factors = {core.factors[bias] for bias in mask.biases}
    if len(factors) > 1:
        raise Refused(f"biases are added at several places of the scale: {sorted(factors)}")
    if core.slopes is not None:
        core.slopes = core.slopes * factors.pop()


def _replace(graph_module: GraphModule, core: Core) -> Any:
    if not math.isfinite(core.scale):
        raise Refused(f"the scale is {core.scale}")

    slopes = [] if core.slopes is None else [_weight_of(graph_module, core.slopes)]

    def build(b: Builder) -> list[Node]:
        q, k, v = (operand.tokens_first(b) for operand in (core.q, core.k, core.v))
        options = (core.scale, core.causal, core.window, core.softcap)
        sinks = None if core.sinks is None else b.call(aten.reshape.default, core.sinks, [-1])
        out = b.call(octavo.attention.default, q, k, v, sinks, *options, *slopes)
        out = b.call(aten.permute.default, out, HEADS_TOKENS)
        sizes = [d if isinstance(d, int) else -1 for d in core.root.meta["val"].shape]
        return [out if len(sizes) == 4 else b.call(aten.reshape.default, out, sizes)]

    sinks = [core.sinks] if core.sinks is not None else []
    return replace(graph_module, [core.root], build, [core.q.node, core.k.node, core.v.node, *sinks])


def _weight_of(graph_module: GraphModule, slopes: torch.Tensor) -> Node:
    """One weight for equal slopes of all layers."""
    name = f"folded.slopes_{content(slopes)[:12]}"
    known = [n for n in graph_module.graph.nodes if n.op == "get_attr" and n.target == name]
    return known[0] if known else new_weight(graph_module, name, slopes)
