"""Proofs at smaller widths: what they leave out, when they are taken, and that faults at full width still show."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from stages import FP32
from torch.fx import Node

from octavo.compiler.reduced_sizes import reductions
from octavo.compiler.verify import prove
from octavo.passes.pattern import aten
from octavo.passes.rewrite import Builder, Site, replace

octavo = torch.ops.octavo
HIDDEN, INNER = 1024, 3072


def site(build: Callable[[Builder, list[Node]], Node], before: Callable[[LoweredGraph], Node]) -> Site:
    """`before` replaced by what `build` makes of the weights and the input."""
    g = LoweredGraph()
    root = before(g)
    graph_module = g.finish(root)
    leaves = [n for n in graph_module.graph.nodes if n.op in ("placeholder", "get_attr")]
    leaves = [n for n in leaves if n.users]
    return replace(graph_module, [root], lambda b: [build(b, leaves)], leaves)


def two_products(g: LoweredGraph) -> Node:
    x = g.tokens("x", (HIDDEN,), FP32)
    first, second = (g.weight(n, torch.empty(INNER, HIDDEN)) for n in ("first", "second"))
    return g.function(
        aten.add.Tensor,
        g.function(octavo.linear.default, x, first),
        g.function(octavo.linear.default, x, second),
    )


def merged(start: int, end: int) -> Callable[[Builder, list[Node]], Node]:
    """One product; its parts [0, INNER) and [start, end) are added."""

    def build(b: Builder, leaves: list[Node]) -> Node:
        x, *weights = sorted(leaves, key=lambda n: n.op == "get_attr")
        both = b.call(octavo.linear.default, x, b.call(aten.cat.default, weights))
        parts = [b.call(aten.slice.Tensor, both, 2, *ends) for ends in ((0, INNER), (start, end))]
        return b.call(aten.add.Tensor, *parts)

    return build


def widths(one: Site) -> list[list[Any]]:
    return [[d for d in e.shape if isinstance(d, int)] for e in one.examples]


def test_widths_and_where_parts_end_are_divided() -> None:
    small = next(reductions(site(merged(INNER, 2 * INNER), two_products)))
    assert sorted(widths(small)) == [[1, 64], [192, 64], [192, 64]]
    slices = [n.args[2:] for n in small.after.graph.nodes if n.target is aten.slice.Tensor]
    assert slices == [(0, 192), (192, 384)]
    assert prove(small).error < 1e-5


def test_the_proof_takes_the_smaller_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of the full width is never made."""
    made = []
    randn = torch.randn

    def counted(size: Any, **options: Any) -> torch.Tensor:
        made.append(max(size))
        return randn(size, **options)

    monkeypatch.setattr(torch, "randn", counted)
    prove(site(merged(INNER, 2 * INNER), two_products))
    assert max(made) == 192


@pytest.mark.parametrize("part", [(0, INNER), (INNER - 1, 2 * INNER - 1), (HIDDEN, HIDDEN + INNER)])
def test_faults_show_at_any_width(part: tuple[int, int]) -> None:
    with pytest.raises(Exception, match="relative error"):
        prove(site(merged(*part), two_products))


def test_a_width_that_is_a_product_of_sizes_is_left_alone() -> None:
    """8 heads of 128 are 1024 columns, and neither 8 nor 128 becomes smaller with them."""

    def heads(g: LoweredGraph) -> Node:
        x = g.tokens("x", (INNER,), FP32)
        weight = g.weight("w", torch.empty(HIDDEN, INNER))
        return g.function(aten.reshape.default, g.function(octavo.linear.default, x, weight), [1, -1, 8, 128])

    def same(b: Builder, leaves: list[Node]) -> Node:
        x, weight = sorted(leaves, key=lambda n: n.op == "get_attr")
        rows = b.call(aten.reshape.default, b.call(octavo.linear.default, x, weight), [1, -1, 1024])
        return b.call(aten.reshape.default, rows, [1, -1, 8, 128])

    one = site(same, heads)
    tried = [widths(s) for s in reductions(one)]
    assert [1, 64] not in tried[0] or len(tried) > 1
    assert any([HIDDEN, 96] in w or [HIDDEN, 48] in w for w in tried)
    assert prove(one).error < 1e-5


def test_narrow_sites_have_no_reduction() -> None:
    def narrow(g: LoweredGraph) -> Node:
        x = g.tokens("x", (64,), FP32)
        return g.function(octavo.linear.default, x, g.weight("w", torch.empty(512, 64)))

    def same(b: Builder, leaves: list[Node]) -> Node:
        return b.call(octavo.linear.default, *sorted(leaves, key=lambda n: n.op == "get_attr"))

    assert list(reductions(site(same, narrow))) == []
