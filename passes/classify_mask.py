"""What masks and biases do to the scores of every pair of positions: causal, window, slopes of the distance.

A mask is not trusted to be what it looks like: its own nodes are evaluated over positions and compared with the
predicates of octavo.attention. Anything else (prefix-LM, chunks, learned relative positions, masks of tokens) is
refused by what it is, never dropped. Called by fuse_attention.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from octavo.compiler.ops.attention import may_attend
from octavo.passes.pattern import aten
from octavo.passes.rewrite import collect, extract, held

# Read the shape of what they are given, never its values.
SHAPES_ONLY = (
    aten.sym_size.int, aten.ones_like.default, aten.zeros_like.default, aten.full_like.default,
    aten.new_ones.default, aten.new_zeros.default, aten.new_full.default,
)  # fmt: skip
FORBIDDEN = -1e4  # additive masks mean "never" by anything below
LARGEST_BIAS = 1 << 26  # elements of a bias by head and pair of positions that are evaluated at once


class Refused(Exception):
    """Why a place that looks like attention was left alone."""


@dataclass(frozen=True)
class Mask:
    """What all masks of an attention mean together; slopes (heads,) in fp32 or None, and what made them."""

    causal: bool
    window: int
    slopes: Tensor | None = None
    biases: tuple[Node, ...] = ()


def classify(graph_module: GraphModule, masks: Sequence[tuple[Node, str]], heads: int, length: int) -> Mask:
    """masks are (node, kind) with kind add, keep, drop, or one: a factor that is 1 wherever the others allow a key.

    Raises Refused where they are no such mask.
    """
    values = [
        (node, kind, _evaluate(graph_module, node, _probe(node, heads, length))) for node, kind in masks
    ]
    shortest = min(value.shape[-1] for _, _, value in values)
    if shortest < length:
        values = [(node, kind, value[..., :shortest, :shortest]) for node, kind, value in values]
    names = ", ".join(node.name for node, _ in masks)
    allowed = torch.ones(shortest, shortest, dtype=torch.bool)
    for node, kind, value in values:
        if kind != "one":
            allowed &= _allowed(value, kind, node)
    for node, kind, value in values:
        if kind == "one" and bool(((_planes(value) != 1) & allowed).any()):
            raise Refused(
                f"the scores are multiplied by {node.name}, which is not 1 for every key that counts"
            )
    causal, window = _predicate(allowed, names)
    biases = {node: value for node, kind, value in values if kind == "add" and not _is_plain(value)}
    if not biases:
        return Mask(causal, window)
    total = torch.stack([_by_head(bias, heads) for bias in biases.values()]).sum(0)
    return Mask(causal, window, _slopes(total, allowed, names), tuple(biases))


def _probe(node: Node, heads: int, length: int) -> int:
    """How many positions are looked at: fewer where each head has its own values."""
    shape = node.meta["val"].shape
    has_heads = len(shape) > 2 and any(isinstance(d, int) and d > 1 for d in shape[:-2])
    return min(length, int((LARGEST_BIAS / heads) ** 0.5)) if has_heads else length


def _evaluate(graph_module: GraphModule, node: Node, length: int) -> Tensor:
    """The mask for one sequence, (..., length, length). It may depend on positions and constants, never on tokens."""
    if reads_tokens(node):
        raise Refused(f"the mask {node.name} depends on tokens, not on positions alone")
    leaves = collect([node], [])[0]
    values: list[Tensor] = []
    for leaf in leaves:
        if leaf.op == "get_attr":
            values.append(held(graph_module, str(leaf.target)))
        else:
            values.append(
                torch.arange(length)[None] if leaf.name == "position_ids" else torch.zeros(1, length).long()
            )
    if any(value.is_meta for value in values):
        raise Refused(f"the mask {node.name} is made of weights that have no values here")
    with torch.no_grad():
        (mask,) = Interpreter(extract([node], leaves)).run(*values)
    if any(size not in (1, length) for size in mask.shape[-2:]):
        raise Refused(
            f"the mask {node.name} is {tuple(mask.shape)} for {length} positions: choose a max_model_len of at "
            "most what it covers"
        )
    whole: Tensor = mask.expand(*mask.shape[:-2], length, length)
    return whole


def reads_tokens(node: Node) -> bool:
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


def _planes(mask: Tensor) -> Tensor:
    return mask.reshape(-1, *mask.shape[-2:])


def _allowed(mask: Tensor, kind: str, node: Node) -> Tensor:
    """(T, T) bool: which keys a query may see."""
    planes = _planes(mask)
    allowed = planes > FORBIDDEN if kind == "add" else planes.bool() if kind == "keep" else ~planes.bool()
    if bool((allowed != allowed[0]).any()):
        raise Refused(f"the mask {node.name} hides other keys from other heads, shape {tuple(mask.shape)}")
    return allowed[0]


def _is_plain(mask: Tensor) -> bool:
    """Whether it adds nothing to what it allows."""
    return not bool(((mask > FORBIDDEN) & (mask != 0)).any())


def _predicate(allowed: Tensor, names: str) -> tuple[bool, int]:
    """(causal, window) that allow just these pairs."""
    length = len(allowed)
    positions = torch.arange(length)
    window = int(allowed[-1].sum())
    for causal, size in ((True, 0), (True, window), (False, 0)):
        if torch.equal(allowed, may_attend(positions, positions, causal, size)):
            return causal, size if size < length else 0
    raise Refused(_what(allowed, names))


def _what(allowed: Tensor, names: str) -> str:
    """A name for a mask that cannot be paged, and the figures that show it."""
    length = len(allowed)
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    later = allowed & (column > row)
    prefix = int(later.any(0).nonzero().max()) + 1 if bool(later.any()) else 0
    if prefix and torch.equal(allowed, (column <= row) | (column < prefix)):
        return (
            f"the mask {names} is prefix-LM: query i sees key j > i for j < {prefix}, which a causal page cache "
            "cannot serve, as a step may hold a part of the prefix"
        )
    for chunk in range(2, length):
        if torch.equal(allowed, (column <= row) & (column // chunk == row // chunk)):
            return f"the mask {names} is chunked: a query sees the keys of its own chunk of {chunk} positions only"
    return (
        f"the mask {names} is neither causal nor a sliding window: over {length} positions it allows "
        f"{int(allowed.sum())} pairs, causal would allow {length * (length + 1) // 2}"
    )


def _by_head(bias: Tensor, heads: int) -> Tensor:
    """(heads, T, T) in fp64."""
    planes = _planes(bias.double())
    if len(planes) not in (1, heads):
        raise Refused(
            f"a bias of shape {tuple(bias.shape)} is neither one for all heads nor one for each of {heads}"
        )
    return planes.expand(heads, -1, -1)


def _slopes(bias: Tensor, allowed: Tensor, names: str) -> Tensor:
    """The factor of the distance for each head. What is the same for all keys of a query cancels in the softmax."""
    length = len(allowed)
    positions = torch.arange(length, dtype=torch.float64)
    distance = positions[None, :] - positions[:, None]
    relative = (bias - bias.diagonal(dim1=1, dim2=2)[..., None]).masked_fill(~allowed, 0.0)
    # The second query and the first key differ by one product, which no sum has rounded.
    row = 1 if length > 1 and bool(allowed[1, 0]) else length - 1
    key = int(allowed[row].nonzero().min())
    slopes = -relative[:, row, key] / max(row - key, 1)
    error = (relative - slopes[:, None, None] * distance).masked_fill(~allowed, 0.0).abs().max()
    largest = bias.masked_fill(~allowed, 0.0).abs().max()
    if bool(error <= 1e-6 * largest):
        return slopes.float()
    by_distance = relative.diagonal(offset=-1, dim1=1, dim2=2)
    kind = "other than a multiple of the distance to the key"
    if bool((by_distance == by_distance[:, -1:]).all()):
        kind = (
            "that depends on the distance but is no multiple of it (learned or bucketed relative positions)"
        )
    raise Refused(
        f"{names} adds a bias of up to {float(largest):.3g} to allowed scores {kind}: it differs from one by "
        f"{float(error):.3g}; only slopes of the distance (ALiBi) can be paged"
    )
