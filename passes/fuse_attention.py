"""softmax(mask(q k^T * scale)) v, as products or as scaled_dot_product_attention  ->  octavo.attention.

From each softmax the walk goes up to the product of q and k, collecting scale, soft-cap and masks, and down
to the product with v. A mask is not trusted to be causal: its own nodes are evaluated and compared with the
predicate. Heads repeated for grouped queries are undone. Not matched: masks that depend on tokens, additive
biases, sinks.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from octavo.compiler.ops.attention import may_attend
from octavo.passes.pattern import arguments, aten, describe
from octavo.passes.rewrite import Builder, collect, extract, held, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
SDPA = aten.scaled_dot_product_attention.default
CASTS = (aten._to_copy.default,)
HEADS_FIRST, SWAP_LAST, HEADS_TOKENS = [0, 1, 2, 3], [0, 1, 3, 2], [0, 2, 1, 3]
# Read the shape of what they are given, never its values.
SHAPES_ONLY = (
    aten.sym_size.int, aten.ones_like.default, aten.zeros_like.default, aten.full_like.default,
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default,
)  # fmt: skip
LARGEST_PROBE = 4097
FORBIDDEN = -1e4  # additive masks mean "never" by anything below


class Refused(Exception):
    """Why a place that looks like attention was left alone."""


@dataclass(frozen=True)
class Operand:
    """q, k or v: `node`, whose axes taken in `order` are (1, heads, T, D)."""

    node: Node
    order: list[int]

    def tokens_first(self, build: Builder) -> Node:
        return build.call(aten.permute.default, self.node, [self.order[d] for d in HEADS_TOKENS])

    @property
    def shape(self) -> list[Any]:
        sizes = self.node.meta["val"].shape
        if len(sizes) != 4:
            raise Refused(f"{self.node.name} has {len(sizes)} axes, expected (1, heads, T, D)")
        return [sizes[d] for d in self.order]


@dataclass
class Core:
    """One attention that ends in `root`; masks are (node, kind) with kind add, keep or drop."""

    root: Node
    q: Operand = field(init=False)
    k: Operand = field(init=False)
    v: Operand = field(init=False)
    scale: float = 1.0
    softcap: float = 0.0
    causal: bool = False
    window: int = 0
    masks: list[tuple[Node, str]] = field(default_factory=list)


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
        core.masks.append((mask, "keep" if mask.meta["val"].dtype is torch.bool else "add"))
    return core


def from_softmax(node: Node) -> Core:
    if node.args[1] not in (-1, 3):
        raise Refused(f"softmax over axis {node.args[1]}, not over the keys")
    core = Core(_product_below(node))
    core.v = _operand(core.root.args[1], HEADS_FIRST)
    product = _walk_up(node.args[0], core)
    core.q, core.k = _operand(product.args[0], HEADS_FIRST, core), _operand(product.args[1], SWAP_LAST, core)
    return core


def _product_below(node: Node) -> Node:
    """The product of the weights with v, past conversions."""
    users = list(node.users)
    while len(users) == 1 and users[0].target in CASTS:
        node, users = users[0], list(users[0].users)
    if len(users) != 1 or users[0].target is not aten.matmul.default or users[0].args[0] is not node:
        raise Refused(f"the weights go to {[describe(u) for u in users]}, not into one product with v")
    return users[0]


def _walk_up(value: Any, core: Core) -> Node:
    """From the softmax's input to the product of q and k."""
    while isinstance(value, Node) and value.target is not aten.matmul.default:
        value = _step_up(value, core)
    if not isinstance(value, Node):
        raise Refused(f"the scores do not come from a product of q and k but from {describe(value)}")
    return value


def _step_up(node: Node, core: Core) -> Any:
    first, *rest = node.args
    if node.target in CASTS:
        return first
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        factor = _constant(rest[0])
        core.scale *= factor if node.target is aten.mul.Tensor else 1.0 / factor
        return first
    if node.target is aten.tanh.default:
        # What was multiplied on so far is the cap; what follows inside completes the scale.
        core.softcap = core.scale
        return first
    if node.target is aten.add.Tensor:
        inner, mask = (first, rest[0]) if _reaches_product(first) else (rest[0], first)
        if not isinstance(mask, Node) or _reaches_product(mask):
            raise Refused(f"{describe(node)} adds {describe(mask)} to the scores")
        core.masks.append((mask, "add"))
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


def _reaches_product(value: Any, depth: int = 12) -> bool:
    if not isinstance(value, Node) or depth == 0:
        return False
    if value.target is aten.matmul.default:
        return True
    return any(_reaches_product(n, depth - 1) for n in value.all_input_nodes)


def _constant(value: Any) -> float:
    if isinstance(value, int | float):
        return float(value)
    if isinstance(value, Node) and value.target in (aten.full.default, aten.scalar_tensor.default):
        return float(value.args[-1])  # type: ignore[arg-type]
    raise Refused(f"the scores are multiplied by {describe(value)}, which is not a constant")


def _require_forbidden(value: Any) -> None:
    if _constant(value) > FORBIDDEN:
        raise Refused(f"masked scores become {_constant(value)}, which does not forbid a key")


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
    allowed = torch.ones(length, length, dtype=torch.bool)
    for node, kind in core.masks:
        allowed &= _allowed(_evaluate(graph_module, node, length), kind, node)
    positions = torch.arange(length)
    window = int(allowed[-1].sum())
    for causal, size in ((True, 0), (True, window), (False, 0)):
        if torch.equal(allowed, may_attend(positions, positions, causal, size)):
            core.causal, core.window = core.causal or causal, size if size < length else 0
            return
    raise Refused(
        f"the mask {', '.join(n.name for n, _ in core.masks)} is neither causal nor a sliding window: "
        f"over {length} positions it allows {int(allowed.sum())} pairs, causal would allow "
        f"{length * (length + 1) // 2}"
    )


def _evaluate(graph_module: GraphModule, node: Node, length: int) -> torch.Tensor:
    """The mask for one sequence. It may depend on length, positions and constants, never on tokens."""
    if _reads_tokens(node):
        raise Refused(f"the mask {node.name} depends on tokens, not on positions alone")
    leaves = collect([node], [])[0]
    values: list[torch.Tensor] = []
    for leaf in leaves:
        if leaf.op == "get_attr":
            values.append(held(graph_module, str(leaf.target)))
        else:
            values.append(
                torch.arange(length)[None] if leaf.name == "position_ids" else torch.zeros(1, length).long()
            )
    with torch.no_grad():
        (mask,) = Interpreter(extract([node], leaves)).run(*values)
    return mask  # type: ignore[no-any-return]


def _reads_tokens(node: Node) -> bool:
    """Whether a value comes from input_ids by more than shapes."""
    pending, seen = [node], {node}
    while pending:
        node = pending.pop()
        if node.op == "placeholder" and node.name != "position_ids":
            return True
        inputs = [] if node.target in SHAPES_ONLY else node.all_input_nodes
        pending += [n for n in inputs if n not in seen]
        seen.update(inputs)
    return False


def _allowed(mask: torch.Tensor, kind: str, node: Node) -> torch.Tensor:
    """(T, T) bool: which keys a query may see."""
    if mask.dim() > 2 and (mask != mask.reshape(-1, *mask.shape[-2:])[0]).any():
        raise Refused(
            f"the mask {node.name} differs between heads or sequences: it is a bias, shape "
            f"{tuple(mask.shape)}"
        )
    plane = mask.reshape(-1, *mask.shape[-2:])[0] if mask.dim() > 2 else mask
    if kind == "add":
        biases = plane[plane > FORBIDDEN]
        if biases.numel() and float(biases.abs().max()) > 0.0:
            raise Refused(
                f"the mask {node.name} adds up to {float(biases.abs().max()):.3g} to allowed scores"
            )
        return plane > FORBIDDEN
    return plane.bool() if kind == "keep" else ~plane.bool()


def _replace(graph_module: GraphModule, core: Core) -> Any:
    if not math.isfinite(core.scale):
        raise Refused(f"the scale is {core.scale}")

    def build(b: Builder) -> list[Node]:
        q, k, v = (operand.tokens_first(b) for operand in (core.q, core.k, core.v))
        options = (core.scale, core.causal, core.window, core.softcap)
        out = b.call(octavo.attention.default, q, k, v, None, *options)
        return [b.call(aten.permute.default, out, HEADS_TOKENS)]

    return replace(graph_module, [core.root], build, [core.q.node, core.k.node, core.v.node])
