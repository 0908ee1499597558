"""A rewrite site with smaller widths: what holds for 112 of 7168 columns holds for all of them.

The two forms of a site are made of ops that treat every column alike, and their only other tie to a width is a
number among their arguments (where a part ends, say). So widths, and arguments of that size, are divided by one
number. A form that depends on a width in another way does not run or does not agree then, and the site is proven at
its full size.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate

from octavo.passes.rewrite import Site, fake_mode

WIDE = 512  # sizes up to this are left alone: heads, their widths, experts, pages
NARROW = 64  # no width becomes less
ENDLESS = 1 << 31  # an argument beyond it says "to the end"


def reductions(site: Site) -> Iterator[Site]:
    """The site with all wide sizes divided; then, for each of them, with that one left alone."""
    wide = sorted(_wide_sizes(site))
    for left_alone in (None, *wide) if wide else ():
        chosen = frozenset(wide) - {left_alone}
        factor = _factor(chosen)
        if factor > 1:
            yield _divided(site, chosen, frozenset({left_alone}), factor)


def _wide_sizes(site: Site) -> set[int]:
    """Wide sizes of the inputs, but for those of constants, whose values are given."""
    names = [n.name for n in site.before.graph.nodes if n.op == "placeholder"]
    found, fixed = set[int](), set[int]()
    for name, example in zip(names, site.examples, strict=True):
        if isinstance(example, Tensor):
            sizes = {d for d in example.shape if isinstance(d, int) and d > WIDE}
            (fixed if name in site.constants else found).update(sizes)
    return found - fixed


def _factor(sizes: frozenset[int]) -> int:
    """The largest power of two that divides every size and leaves NARROW of each."""
    if not sizes:
        return 1
    common = math.gcd(*sizes)
    largest = min(common & -common, min(sizes) // NARROW)
    return 1 << (largest.bit_length() - 1) if largest > 0 else 1


def _divided(site: Site, chosen: frozenset[int], left_alone: frozenset[int | None], factor: int) -> Site:
    def size(value: Any) -> Any:
        return value // factor if isinstance(value, int) and value in chosen else value

    def argument(value: Any) -> Any:
        """Also sums and multiples of widths: where the second of two parts ends."""
        is_width = type(value) is int and WIDE < abs(value) < ENDLESS and value not in left_alone
        return value // factor if is_width and value % factor == 0 else value

    mode = fake_mode(site.before)
    with mode:
        examples = tuple(
            e.new_empty([size(d) for d in e.shape]) if isinstance(e, Tensor) else e for e in site.examples
        )
    before, after = (_with_arguments(form, argument, examples) for form in (site.before, site.after))
    return replace(site, before=before, after=after, examples=examples)


def _with_arguments(
    form: GraphModule, argument: Callable[[Any], Any], examples: tuple[Any, ...]
) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    given = iter(examples)
    for node in form.graph.nodes:
        copy = copies[node] = graph.node_copy(node, lambda n: copies[n])
        if node.op == "placeholder":
            copy.meta = {**node.meta, "val": next(given)}
        elif node.op == "call_function":
            copy.args = cast(tuple[Any, ...], map_aggregate(copy.args, argument))
            copy.kwargs = cast(dict[str, Any], map_aggregate(copy.kwargs, argument))
    return GraphModule(form, graph)
