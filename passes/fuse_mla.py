"""octavo.attention whose keys and values are products of one latent  ->  octavo.mla_attention (DeepSeek-V2, 2024).

Each head's key is cat(W_uk c, k_rope), k_rope the same for all heads, and its value W_uv c, for a latent c. Where
both q and k have the elements of their rotated part in another order (even before odd), the order is dropped: a
scalar product does not see it. Not matched: groups of heads that share keys, biases, sinks, and anything between
the products and the attention.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.passes.pattern import arguments, aten, describe
from octavo.passes.rewrite import Builder, Site, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
NAMES = ("q", "k", "v", "sinks", "scale", "causal", "window", "softcap", "slopes")
DEFAULTS: dict[str, Any] = {"sinks": None, "causal": True, "window": 0, "softcap": 0.0, "slopes": None}
PLAIN = [0, 1, 2, 3]


class Refused(Exception):
    """Why an attention with a key part shared by all heads was left alone."""


@dataclass(frozen=True)
class _Heads:
    """`node`, whose axes taken in `order` are (1, T, heads, width)."""

    node: Node
    order: list[int]

    @property
    def shape(self) -> list[Any]:
        return [self.node.meta["val"].shape[d] for d in self.order]

    def tokens_first(self, b: Builder) -> Node:
        return b.call(aten.permute.default, self.node, self.order)

    def below(self, node: Node) -> "_Heads":
        """Another value with the same order of axes."""
        return _below_transposes(node, self.order)


@dataclass(frozen=True)
class _Latent:
    """The parts of one attention; k_rope has one head."""

    q_nope: _Heads
    q_rope: _Heads
    k_rope: _Heads
    latent: Node
    w_uk: Node
    w_uv: Node


def fuse_mla(graph_module: GraphModule) -> PassReport:
    report = PassReport("fuse_mla", "reassociates")
    for node in list(graph_module.graph.nodes):
        if node.target is not octavo.attention.default or _shared_key(node) is None:
            continue
        try:
            report.sites.append(_replace(graph_module, node, _recognise(node)))
        except Refused as refusal:
            report.reject(node, str(refusal))
    return report


def _below_transposes(node: Node, order: list[int]) -> _Heads:
    while node.target is aten.permute.default:
        source, inner = arguments(node)
        node, order = source, [inner[d] for d in order]
    return _Heads(node, order)


def _joined(heads: _Heads) -> list[_Heads] | None:
    """The parts of a cat along the last axis."""
    if heads.node.target is not aten.cat.default:
        return None
    args: tuple[Any, ...] = (*arguments(heads.node), 0)
    parts, axis = args[:2]
    if axis % len(heads.order) != heads.order[-1]:
        return None
    return [heads.below(part) for part in parts]


def _one_head(heads: _Heads) -> _Heads | None:
    """What one head's value is repeated from for all heads."""
    if heads.node.target is not aten.expand.default:
        return None
    if len(arguments(heads.node)[0].meta["val"].shape) != len(heads.order):
        return None
    source = heads.below(arguments(heads.node)[0])
    return source if source.shape[2] == 1 and heads.shape[2] != 1 else None


def _shared_key(node: Node) -> _Heads | None:
    """The part of k that all heads share, if k has one."""
    parts = _joined(_below_transposes(arguments(node)[1], PLAIN)) or []
    shared = [_one_head(part) for part in parts]
    return next((part for part in shared if part is not None), None)


def _recognise(node: Node) -> _Latent:
    given = _given(node)
    if given["sinks"] is not None:
        raise Refused("latent attention with sinks")
    if given["slopes"] is not None:
        raise Refused("latent attention with slopes of the distance (ALiBi)")
    q, k = (_joined(_below_transposes(given[name], PLAIN)) for name in ("q", "k"))
    assert k is not None
    if q is None or len(q) != 2 or len(k) != 2:
        raise Refused(
            f"q joins {len(q or [])} parts and k {len(k)}, expected a plain part and a rotated one each"
        )
    rope_first = _one_head(k[0]) is not None
    k_rope = _one_head(k[0] if rope_first else k[1])
    k_nope, q_nope, q_rope = (k[1], q[1], q[0]) if rope_first else (k[0], q[0], q[1])
    assert k_rope is not None
    heads = given["q"].meta["val"].shape[2]
    if given["k"].meta["val"].shape[2] != heads or given["v"].meta["val"].shape[2] != heads:
        raise Refused(f"{heads} query heads share {given['k'].meta['val'].shape[2]} keys")
    if q_rope.shape[3] != k_rope.shape[3]:
        raise Refused(
            f"the last part of q has {q_rope.shape[3]} elements a head, that of k {k_rope.shape[3]}"
        )
    k_latent, w_uk = _product(k_nope, "the plain part of k")
    v_latent, w_uv = _product(_below_transposes(given["v"], PLAIN), "v")
    if k_latent is not v_latent:
        raise Refused(f"k is made of {describe(k_latent)} and v of {describe(v_latent)}, expected one latent")
    q_rope, k_rope = _unordered(q_rope, k_rope)
    return _Latent(q_nope, q_rope, k_rope, k_latent, w_uk, w_uv)


def _given(node: Node) -> dict[str, Any]:
    return {**DEFAULTS, **dict(zip(NAMES, node.args, strict=False))}


def _product(heads: _Heads, what: str) -> tuple[Node, Node]:
    """(latent, weight) of the product that `heads` is, seen as one row for each head."""
    view = heads.node
    if view.target is not aten.reshape.default or arguments(view)[0].target is not octavo.linear.default:
        raise Refused(f"{what} is {describe(view)}, expected a product of the latent with a weight")
    x, weight, *bias = arguments(arguments(view)[0])
    if heads.order != PLAIN or view.meta["val"].shape[1] != _tokens(x):
        raise Refused(f"{what} mixes tokens and heads in {describe(view)}, {tuple(view.meta['val'].shape)}")
    if any(b is not None for b in bias):
        raise Refused(f"the product that makes {what} has a bias")
    while (
        x.target is aten.reshape.default and x.meta["val"].shape[-1] == arguments(x)[0].meta["val"].shape[-1]
    ):
        x = arguments(x)[0]
    return x, weight


def _tokens(node: Node) -> Any:
    """The size of the token axis of a value with rows for tokens alone."""
    sizes = [d for d in node.meta["val"].shape[:-1] if not (isinstance(d, int) and d == 1)]
    return sizes[0] if len(sizes) == 1 else None


def _unordered(q: _Heads, k: _Heads) -> tuple[_Heads, _Heads]:
    """q and k below a cat of their even and their odd elements, if both have it."""
    q_inner, k_inner = _even_odd(q), _even_odd(k)
    return (q_inner, k_inner) if q_inner is not None and k_inner is not None else (q, k)


def _even_odd(heads: _Heads) -> _Heads | None:
    parts = _joined(heads)
    if parts is None or len(parts) != 2 or any(p.node.target is not aten.slice.Tensor for p in parts):
        return None
    sources = []
    for start, part in enumerate(parts):
        args: tuple[Any, ...] = (*arguments(part.node), 1)
        source, axis, first, end, step = args[:5]
        size = source.meta["val"].shape[axis]
        if axis % 4 != part.order[-1] or (first, step) != (start, 2) or end < size:
            return None
        sources.append(part.below(source))
    return sources[0] if sources[0].node is sources[1].node and sources[0].order == sources[1].order else None


def _replace(graph_module: GraphModule, node: Node, found: _Latent) -> Site:
    given = _given(node)

    def build(b: Builder) -> list[Node]:
        rank, width = found.latent.meta["val"].shape[-1], found.k_rope.shape[3]
        q_nope, q_rope = found.q_nope.tokens_first(b), found.q_rope.tokens_first(b)
        latent = b.call(aten.reshape.default, found.latent, [1, -1, rank])
        k_rope = b.call(aten.reshape.default, found.k_rope.node, [1, -1, width])
        weights, options = (
            (found.w_uk, found.w_uv),
            (given[n] for n in ("scale", "causal", "window", "softcap")),
        )
        return [b.call(octavo.mla_attention.default, q_nope, q_rope, latent, k_rope, *weights, *options)]

    values = (found.q_nope.node, found.q_rope.node, found.latent, found.k_rope.node, found.w_uk, found.w_uv)
    return replace(graph_module, [node], build, list(dict.fromkeys(values)))
