"""One weight of every expert (T, E), zero where it was not selected  ->  one weight a slot (T, K).

Models that weigh all experts spread the selected weights over E columns, in one of many ways: a scatter, a mask times
the scores, a sum over one-hot rows, scores of minus infinity before a softmax. Which it is, is found by running it on
random scores. Called by fuse_moe.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from octavo.compiler.wide import Wide
from octavo.passes.pattern import aten
from octavo.passes.probe_moe import BOUND, TOKENS, Refused, Region
from octavo.passes.rewrite import Builder, collect, extract, held

WAYS = ("as they are", "divided by their sum", "softmax of the selected")


class Unselected(Refused):
    """A mixture whose weights are not those of a selection."""


@dataclass(frozen=True)
class Weighting:
    """How weights of slots are made: `scores` are those themselves, or one of each expert and a way to read them."""

    scores: Node
    way: str = ""

    def inputs(self, experts: Node) -> list[Node]:
        """Values that the weights are made of, and `experts` unless these are made of them too."""
        return [self.scores] if self._ranks(experts) else [self.scores, experts]

    def _ranks(self, experts: Node) -> bool:
        topk: Any = experts.args[0]
        return bool(self.way) and topk.args[0] is self.scores

    def build(self, b: Builder, experts: Node) -> Node:
        """(T, K) or (1, T, K), like experts."""
        if not self.way:
            return self.scores
        topk: Any = experts.args[0]
        if self._ranks(experts):
            selected = b.call(operator.getitem, topk, 0)
        else:
            scores = self.scores
            if scores.meta["val"].dim() != experts.meta["val"].dim():
                sizes = [-1 if not isinstance(d, int) else d for d in topk.args[0].meta["val"].shape]
                scores = b.call(aten.reshape.default, scores, sizes)
            selected = b.call(aten.gather.default, scores, -1, experts)
        if self.way == WAYS[2]:
            return b.call(aten.softmax.int, selected, -1)
        if self.way == WAYS[1]:
            return b.call(aten.div.Tensor, selected, b.call(aten.sum.dim_IntList, selected, [-1], True))
        return selected


def weighting(region: Region) -> Weighting:
    """The earliest scores of which `region.weights` are the selected ones. Raises Unselected."""
    spread, experts = region.weights, region.experts
    sizes = [n for n in spread.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)]
    for scores in _scores(spread, experts, sizes):
        leaves = collect([spread], [*sizes, experts, scores])[0]
        if scores in leaves and all(_is_known(n, (scores, experts)) for n in leaves):
            way = _way(spread, scores, experts, leaves)
            is_read = way != WAYS[2] or experts.args[0].args[0] is scores  # type: ignore[union-attr]
            if way is not None and is_read:
                return Weighting(scores, way)
    raise Unselected(
        f"the weights of its experts, {spread.name}, are not those that {experts.args[0]} selected and zero elsewhere"
    )


def _scores(spread: Node, experts: Node, sizes: Sequence[Node]) -> Iterator[Node]:
    """Values of the shape of `spread`, the earliest first."""
    columns = spread.meta["val"].shape[-1]
    for node in collect([spread], [*sizes, experts])[1]:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
            continue
        is_of_rows = value.dim() == 2 or (value.dim() == 3 and str(value.shape[0]) == "1")
        same = str(value.numel()) == str(spread.meta["val"].numel()) and value.shape[-1] == columns
        if is_of_rows and same:
            yield node


def _is_known(node: Node, given: tuple[Node, ...]) -> bool:
    return node in given or node.op == "get_attr" or isinstance(node.meta.get("val"), torch.SymInt)


def _way(spread: Node, scores: Node, experts: Node, leaves: list[Node]) -> str | None:
    columns, slots = (int(n.meta["val"].shape[-1]) for n in (spread, experts))
    generator = torch.Generator().manual_seed(0)
    rows = torch.rand(TOKENS, columns, generator=generator).double() + 0.1
    chosen = torch.rand(TOKENS, columns, generator=generator).argsort(-1)[:, :slots]
    values = [_leaf(n, {scores: rows, experts: chosen}) for n in leaves]
    try:
        with torch.no_grad():
            (result,) = Wide(extract([spread], leaves)).run(*values)
    except Exception:
        return None  # made of rows that are no scores, say
    selected = rows.gather(1, chosen)
    shares = (selected, selected / selected.sum(-1, keepdim=True), selected.softmax(-1))
    for way, share in zip(WAYS, shares, strict=True):
        expected = torch.zeros_like(rows).scatter(1, chosen, share)
        if bool((result.reshape(rows.shape) - expected).abs().max() <= BOUND):
            return way
    return None


def _leaf(node: Node, given: dict[Node, Tensor]) -> Any:
    if node in given:
        return given[node].reshape([TOKENS if not isinstance(d, int) else d for d in node.meta["val"].shape])
    if node.op == "get_attr":
        module = node.graph.owning_module
        assert module is not None
        return held(module, str(node.target))
    expression = node.meta["val"].node.expr
    return int(expression.subs({symbol: TOKENS for symbol in expression.free_symbols}))
