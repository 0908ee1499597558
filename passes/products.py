"""The products of a lowered graph that formats are chosen for, and the pages of its attentions.

A product is one weight with all that multiply by it: a linear whose weight is held, or the experts of one layer. Made
weights know what they consist of (recipes), so that globs of the model's own modules find them.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.dims import cache_number, caches_of
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS
from octavo.compiler.origin import module_path
from octavo.compiler.precision import PrecisionPlan, ProductPrecision
from octavo.passes.pattern import arguments
from octavo.passes.rewrite import Recipe, recipes
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
# Parts of module paths by which draft heads go.
DRAFT = re.compile(r"(^|\.)(mtp|nextn|draft|eagle|medusa)(_\w+|\d*)(\.|$)")
PAGES = "pages"  # pages are called by their attention's module and this
_STOPS = (
    octavo.linear.default, octavo.moe.default, octavo.head_linear.default, octavo.paged_attention.default,
    octavo.paged_mla_attention.default, octavo.embedding.default,
)  # fmt: skip


@dataclass(frozen=True)
class Product:
    """One weight (of experts: two) and the nodes that multiply by it.

    name      of its weight in the graph; of experts, that of gate and up
    weights   all its weights: (name,), or those of gate and up and of down
    lengths   of the rows of each, K
    elements  of all its weights
    sources   the model's own weights that they consist of
    modules   names of those, of the modules that hold them and of all around; of the product's own, of tied weights
    high      why it stays as it is unless asked for, or ""
    """

    name: str
    kind: Literal["linear", "moe"]
    nodes: tuple[Node, ...]
    weights: tuple[str, ...]
    lengths: tuple[int, ...]
    elements: int
    sources: tuple[str, ...]
    modules: frozenset[str]
    high: str = ""


@dataclass(frozen=True)
class Pages:
    """The pages of one attention. widths: elements of a head's key and value; high: as of Product, for NVFP4."""

    number: int
    node: Node
    widths: tuple[int, ...]
    is_latent: bool
    modules: frozenset[str]
    high: str = ""


def find_products(graph_module: GraphModule) -> list[Product]:
    """In the order in which they are first reached."""
    why_high = dict(_high(graph_module))
    weights: dict[str, list[Node]] = {}
    for node in graph_module.graph.nodes:
        held = _weights(node)
        if held:
            weights.setdefault(str(held[0].target), []).append(node)
    return [_product(graph_module, name, nodes, why_high) for name, nodes in weights.items()]


def planned(
    node: Node, weights: Sequence[Node], plan: PrecisionPlan, report: PassReport
) -> ProductPrecision | None:
    """What a plan says of the product of these weights, by the first of them; None: it stays, as the report says."""
    if any(weight.op != "get_attr" for weight in weights):
        what = "weight is" if len(weights) == 1 else "weights are"
        report.reject(node, f"its {what} computed in every step")
        return None
    precision = plan.products.get(str(weights[0].target))
    if precision is None or precision.format == "bf16":
        report.reject(node, "stays as it is" if precision is None else precision.reason)
        return None
    return precision


def _weights(node: Node) -> list[Node]:
    """The weights of a product, of experts both; none where one is computed in every step, or for other nodes."""
    if node.target is octavo.linear.default:
        found = [arguments(node)[1]]
    elif node.target is octavo.moe.default:
        found = [arguments(node)[3], arguments(node)[5]]
    else:
        return []
    return found if all(weight.op == "get_attr" for weight in found) else []


def _product(graph_module: GraphModule, name: str, nodes: list[Node], why_high: dict[Node, str]) -> Product:
    held = _weights(nodes[0])
    shapes = [tuple(weight.meta["val"].shape) for weight in held]
    names = tuple(str(weight.target) for weight in held)
    sources = tuple(
        dict.fromkeys(source for one in names for source in source_weights(recipes(graph_module), one))
    )
    # A weight that other ops read too (tied embeddings) is also called by the module of the product.
    paths = {*sources} | {
        f"{module_path(node)}.weight"
        for node, weight in zip(nodes, held, strict=False)
        if set(_readers(graph_module, str(weight.target))) != set(nodes)
    }
    high = next((why_high[node] for node in nodes if node in why_high), "")
    is_experts = nodes[0].target is octavo.moe.default
    if not high and not is_experts and shapes[0][0] < BLOCK_ELEMENTS:
        high = f"has {shapes[0][0]} outputs, fewer than {BLOCK_ELEMENTS}: a gate"
    if not high and any(DRAFT.search(path) for path in paths):
        high = "belongs to a head that drafts tokens"
    return Product(
        name, "moe" if is_experts else "linear", tuple(nodes), names, tuple(shape[-1] for shape in shapes),
        sum(int(torch.Size(shape).numel()) for shape in shapes), sources, _modules(paths), high,
    )  # fmt: skip


def _readers(graph_module: GraphModule, name: str) -> Iterator[Node]:
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if node.target == name:
            yield from node.users


def source_weights(known: Mapping[str, Recipe], name: str) -> list[str]:
    """The model's own weights that a weight of the graph consists of. known: how passes made weights."""
    recipe = known.get(name)
    if recipe is None:
        return [name]
    found = [one for source in recipe.sources for one in source_weights(known, source)]
    return list(dict.fromkeys(found))


def _modules(weights: set[str]) -> frozenset[str]:
    """Names of weights, of the modules that hold them and of all modules around those."""
    parts = [weight.split(".") for weight in weights]
    return frozenset(".".join(path[:end]) for path in parts for end in range(1, len(path) + 1))


def find_pages(graph_module: GraphModule) -> list[Pages]:
    """In the order of the graph."""
    kinds = (octavo.paged_attention.default, octavo.paged_mla_attention.default)
    return [_pages(node) for node in graph_module.graph.nodes if node.target in kinds]


def _pages(node: Node) -> Pages:
    values = arguments(node)
    is_latent = node.target is octavo.paged_mla_attention.default
    caches = caches_of(node)
    window = values[8] if not is_latent and len(values) > 8 else 0
    return Pages(
        cache_number(caches[0]), node, tuple(int(c.meta["val"].shape[3]) for c in caches), is_latent,
        frozenset((f"{module_path(node)}.{PAGES}",)),
        f"its window is {window} tokens" if window else "",
    )  # fmt: skip


def matches(modules: frozenset[str], globs: tuple[str, ...]) -> str:
    """The first glob that names one of the modules, or "". `*` stands for dots too."""
    return next((glob for glob in globs if any(fnmatchcase(module, glob) for module in modules)), "")


def _high(graph_module: GraphModule) -> Iterator[tuple[Node, str]]:
    """(product, why it stays as it is unless asked for), of what the graph around a product tells."""
    router, latent = octavo.router.default, octavo.latent_write.default
    for node in graph_module.graph.nodes:
        if node.op == "output":
            yield from ((product, "makes the logits") for product in _behind(list(node.all_input_nodes)))
        elif node.target is router:
            yield from ((product, "selects experts") for product in _behind([node.args[0]]))
        elif node.target is latent:
            behind = _behind(list(node.args[:2]))
            yield from ((product, "makes the latent that attention keeps") for product in behind)


def _behind(values: list[Any]) -> list[Node]:
    """The linears that make these values, with no other product in between."""
    found, seen = [], set()
    while values:
        node = values.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.target not in _STOPS:
            values.extend(node.all_input_nodes)
        elif node.target is octavo.linear.default:
            found.append(node)
    return found
