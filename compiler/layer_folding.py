"""Of many equal layers, keep as many as the passes need to see, and put the others back after lowering.

A model of 80 layers is a prologue, one body repeated, and an epilogue. Bodies are cut at the attentions, the one
op that every later form of a layer keeps: a body starts behind an attention and ends with the next one. Two bodies
are equal when their nodes are, with the values that they take from outside numbered by first use, and weights by
shape. Of a run of equal bodies two are kept. What the passes make of the two must be equal bodies again; the
others are then copies of the second with their own weights, caches and module paths.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from octavo.compiler.dims import CACHE_NAME
from octavo.compiler.errors import PassError
from octavo.compiler.legality import is_attention, op
from octavo.passes.rewrite import Recipe, content, held, hold, recipes

KEPT = 2  # bodies of a run that the passes see
LONGEST_PERIOD = 12  # layers after which a pattern of unlike layers starts again


@dataclass(frozen=True)
class Body:
    """Consecutive nodes, and what they take from outside in the order of first use.

    text      equal for bodies of equal structure
    outside   values of earlier nodes and inputs; weights, caches: names
    """

    nodes: tuple[Node, ...]
    text: str
    outside: tuple[Node, ...]
    weights: tuple[str, ...]
    caches: tuple[Node, ...]


@dataclass(frozen=True)
class Run:
    """A run of equal bodies in a graph. start: the first body's index among the cuts; period: cuts a body."""

    start: int
    period: int
    count: int


@dataclass(frozen=True)
class Repeat:
    """What was left out of a run: weights and module paths of every body, of which KEPT are in the graph.

    start  index of the first kept body among the cuts of the folded graph
    """

    start: int
    period: int
    weights: tuple[tuple[str, ...], ...]
    paths: tuple[Mapping[str, str], ...]

    @property
    def left_out(self) -> int:
        return len(self.weights) - KEPT


@dataclass(frozen=True)
class Folded:
    """The short graph, what it leaves out, and the whole model's weights."""

    graph_module: GraphModule
    repeats: tuple[Repeat, ...]
    whole: GraphModule

    @property
    def layers_left_out(self) -> int:
        return sum(r.left_out * r.period for r in self.repeats)


def fold(graph_module: GraphModule) -> Folded | None:
    """Leave out what is repeated, in a new graph. None: nothing is repeated often enough."""
    segments = _segments(graph_module.graph)
    singles = [body_of(graph_module, segment) for segment in segments]
    texts = [single.text for single in singles]
    repeats: list[Repeat] = []
    dropped: set[Node] = set()
    stands_for: dict[Node, Node] = {}
    counts: dict[Node, int] = {}
    removed = 0
    for run in sorted(_runs(texts, 1, len(segments) - 1), key=lambda r: r.start):
        if run.period == 1:
            bodies = singles[run.start : run.start + run.count]
        else:
            bodies = [_joined(graph_module, segments, run, i) for i in range(run.count)]
        last = bodies[-1].nodes
        if not _is_chain(bodies, segments[run.start + run.period * run.count :]):
            continue
        for body in bodies[KEPT:]:
            dropped.update(body.nodes)
        stands_for.update(zip(last, bodies[KEPT - 1].nodes, strict=True))
        counts.update(dict.fromkeys(bodies[KEPT - 1].nodes, run.count - KEPT + 1))
        paths = tuple(_path_map(bodies[KEPT - 1], body) for body in bodies)
        weights = tuple(body.weights for body in bodies)
        repeats.append(Repeat(run.start - removed, run.period, weights, paths))
        removed += (run.count - KEPT) * run.period
    if not repeats:
        return None
    short = _without(graph_module, dropped, stands_for, counts)
    return Folded(short, tuple(repeats), graph_module)


def unfold(folded: Folded) -> GraphModule:
    """The passes' result with every layer in it again. Raises PassError if they made the kept bodies unequal."""
    graph_module = folded.graph_module
    segments = _segments(graph_module.graph)
    writer = _Writer(folded)
    done = 0
    for repeat in folded.repeats:
        run = Run(repeat.start, repeat.period, KEPT)
        first, second = (_joined(graph_module, segments, run, i) for i in range(KEPT))
        after = segments[repeat.start + KEPT * repeat.period :]
        if first.text != second.text or not _is_chain((first, second), after):
            raise PassError(
                f"unfold: equal layers became unequal: those that end at {first.nodes[-1].name} and at "
                f"{second.nodes[-1].name}"
            )
        end = repeat.start + KEPT * repeat.period
        writer.write(n for segment in segments[done:end] for n in segment)
        writer.write_copies(repeat, first, second)
        done = end
    writer.write(n for segment in segments[done:] for n in segment)
    return writer.finish()


def _is_anchor(node: Node) -> bool:
    return node.op == "call_function" and (is_attention(node) or op(node).startswith("octavo::paged_"))


def _segments(graph: Graph) -> list[list[Node]]:
    """The calls of a graph, cut behind every attention."""
    segments: list[list[Node]] = [[]]
    for node in graph.nodes:
        if node.op == "call_function":
            segments[-1].append(node)
            if _is_anchor(node):
                segments.append([])
    return segments


def _joined(graph_module: GraphModule, segments: Sequence[list[Node]], run: Run, index: int) -> Body:
    start = run.start + index * run.period
    return body_of(graph_module, [n for s in segments[start : start + run.period] for n in s])


def body_of(graph_module: GraphModule, nodes: Sequence[Node]) -> Body:
    """The text of `nodes` in which names do not matter, and what it leaves open."""
    inside: dict[Node, int] = {}
    outside: dict[Node, str] = {}
    weights: dict[str, str] = {}
    caches: dict[Node, str] = {}

    def name(node: Node) -> str:
        if node in inside:
            return f"%{inside[node]}"
        if node.op == "get_attr":
            return weights.setdefault(str(node.target), f"weight{len(weights)}")
        if node.op == "placeholder" and CACHE_NAME.fullmatch(node.name):
            return caches.setdefault(node, f"{node.name.partition('_')[0]}{len(caches)}")
        return outside.setdefault(node, f"value{len(outside)}")

    lines = []
    for node in nodes:
        args = map_arg((node.args, node.kwargs), name)
        inside[node] = len(inside)
        leaves = " leaves" if any(user.op == "output" for user in node.users) else ""
        lines.append(f"{node.target} {args} {_shape(node.meta.get('val'))}{leaves}")
    lines += [f"{_shape(n.meta['val'])}" for n in (*outside, *caches)]
    lines += [_weight_text(graph_module, target) for target in weights]
    return Body(tuple(nodes), "\n".join(lines), tuple(outside), tuple(weights), tuple(caches))


def _shape(value: Any) -> str:
    """Shape and dtype; the pages of a cache have a symbol of their own for each layer."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{[str(d) for d in value.shape[-3:]]}"
    return str([_shape(v) for v in value]) if isinstance(value, tuple | list) else str(value)


def _weight_text(graph_module: GraphModule, name: str) -> str:
    """Parameters may have any value; passes look into buffers (masks, angles) and single numbers."""
    tensor = held(graph_module, name)
    text = f"{tensor.dtype}{list(tensor.shape)}"
    is_parameter = name in graph_module.meta.get("parameters", ()) or name in recipes(graph_module)
    return text if is_parameter and tensor.numel() > 1 else f"{text} {content(tensor)}"


def _runs(texts: Sequence[str], start: int, end: int) -> list[Run]:
    """The run that saves most among segments [start, end), then those left and right of it."""
    best, saved = None, 0
    for first in range(start, end):
        for period in range(1, LONGEST_PERIOD + 1):
            if period > 1 and first < start + period - 1:
                continue  # what unlike layers make once (tables, say), the first of each kind makes
            count = 1
            while (
                first + (count + 1) * period <= end
                and texts[first + count * period : first + (count + 1) * period]
                == texts[first : first + period]
            ):
                count += 1
            if (count - KEPT) * period > saved:
                best, saved = Run(first, period, count), (count - KEPT) * period
    if best is None:
        return []
    behind = best.start + best.period * best.count
    return [*_runs(texts, start, best.start), best, *_runs(texts, behind, end)]


def _is_chain(bodies: Sequence[Body], after: Sequence[list[Node]]) -> bool:
    """Whether each body takes the same values of the one before, and later nodes those of the last only."""
    places = [_places(a, b) for a, b in itertools.pairwise(bodies)]
    inner = {n for body in bodies for n in body.nodes}
    if any(body.text != bodies[0].text for body in bodies) or any(p != places[0] for p in places):
        return False
    if any(isinstance(p, Node) and p in inner for p in places[0]):
        return False
    early = inner - set(bodies[-1].nodes)
    return not any(n in early for segment in after for node in segment for n in node.all_input_nodes)


def _places(before: Body, body: Body) -> list[int | Node]:
    """Where each outside value comes from: its index in the body before, or the value itself."""
    index = {node: i for i, node in enumerate(before.nodes)}
    return [index.get(node, node) for node in body.outside]


def _path_map(kept: Body, body: Body) -> Mapping[str, str]:
    """Module paths of a kept body -> those of another."""
    pairs = zip(kept.nodes, body.nodes, strict=True)
    return {a: b for x, y in pairs for a, b in zip(_paths(x), _paths(y), strict=False)}


def _paths(node: Node) -> list[str]:
    return [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]


def _without(
    graph_module: GraphModule, dropped: set[Node], stands_for: Mapping[Node, Node], counts: Mapping[Node, int]
) -> GraphModule:
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in graph_module.graph.nodes:
        if node not in dropped and (node.op != "get_attr" or any(u not in dropped for u in node.users)):
            copies[node] = graph.node_copy(node, lambda n: copies[stands_for.get(n, n)])
            if node in counts:
                copies[node].meta["stands_for"] = counts[node]
    result = GraphModule(graph_module, graph)
    result.meta.update({k: v for k, v in graph_module.meta.items() if k not in ("sites", "recipes")})
    return result


class _Writer:
    """Writes the whole graph: nodes of the short one in order, and copies of bodies between them."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self.short = folded.graph_module
        self.graph = Graph()
        self.root = nn.Module()
        self.copies: dict[Node, Node] = {}
        self.weights: dict[str, Node] = {}
        self.recipes: dict[str, Recipe] = {}
        self.num_layers = 0  # attentions written so far: what caches are numbered by
        for node in self.short.graph.nodes:
            if node.op == "placeholder" and not CACHE_NAME.fullmatch(node.name):
                self.copies[node] = self.graph.node_copy(node)
        self.last_input = next(reversed(self.graph.nodes))

    def write(self, nodes: Iterator[Node]) -> None:
        for node in nodes:
            self.copies[node] = self._copy(node, self._of_short)

    def write_copies(self, repeat: Repeat, first: Body, second: Body) -> None:
        """Bodies KEPT, KEPT + 1, ... behind the second; later nodes read the last of them."""
        places = _places(first, second)
        previous = [self.copies[n] for n in second.nodes]
        for index in range(KEPT, len(repeat.weights)):
            values = {
                node: self.copies[node] if isinstance(place, Node) else previous[place]
                for node, place in zip(second.outside, places, strict=True)
            }
            named = dict(zip(repeat.weights[KEPT - 1], repeat.weights[index], strict=True))

            def value_of(
                node: Node, values: dict[Node, Node] = values, named: dict[str, str] = named
            ) -> Node:
                if node.op == "get_attr":
                    return self._weight(self._derive(str(node.target), named), node)
                return values[node] if node in values else self._cache(node, values)

            for node in second.nodes:
                values[node] = self._copy(node, value_of)
                values[node].meta["nn_module_stack"] = _moved(node, repeat.paths[index])
            previous = [values[n] for n in second.nodes]
        self.copies.update(zip(second.nodes, previous, strict=True))

    def _of_short(self, node: Node) -> Node:
        if node.op == "get_attr":
            return self._weight(str(node.target), node)
        return self.copies[node] if node in self.copies else self._cache(node, self.copies)

    def _copy(self, node: Node, value_of: Callable[[Node], Node]) -> Node:
        copy = self.graph.node_copy(node, value_of)
        copy.meta = {key: value for key, value in node.meta.items() if key != "stands_for"}
        self.num_layers += _is_anchor(node)
        return copy

    def _cache(self, node: Node, known: dict[Node, Node]) -> Node:
        """A placeholder for the layer that is being written."""
        kind = node.name.rpartition("_")[0]
        with self.graph.inserting_after(self.last_input):
            known[node] = self.last_input = self.graph.placeholder(f"{kind}_{self.num_layers}")
        known[node].meta = dict(node.meta)
        return known[node]

    def _weight(self, name: str, like: Node) -> Node:
        if name not in self.weights:
            self._kept(name)
            self.weights[name] = self.graph.get_attr(name)
            self.weights[name].meta = dict(like.meta)
        return self.weights[name]

    def _kept(self, name: str) -> torch.Tensor:
        """The weight, from then on held by the whole graph too, as is how it was made."""
        if not self._holds(self.root, name):
            if name in recipes(self.short):
                self.recipes[name] = recipes(self.short)[name]
            source = self.short if self._holds(self.short, name) else self.folded.whole
            hold(self.root, name, held(source, name))
        return held(self.root, name)

    def _derive(self, name: str, named: Mapping[str, str]) -> str:
        """The name of another layer's weight: the model's own, or made of its weights as this one was."""
        recipe = recipes(self.short).get(name)
        if recipe is None:
            return named.get(name, name)
        sources = [self._derive(source, named) for source in recipe.sources]
        if sources == list(recipe.sources):
            return name
        derived = _renamed(name, recipe.sources[0], sources[0])
        if not self._holds(self.root, derived):
            hold(self.root, derived, recipe.make([self._kept(source) for source in sources]))
            self.recipes[derived] = Recipe(tuple(sources), recipe.make)
        return derived

    @staticmethod
    def _holds(root: nn.Module, name: str) -> bool:
        value: Any = root
        for part in name.split("."):
            value = getattr(value, part, None)
        return isinstance(value, torch.Tensor)

    def finish(self) -> GraphModule:
        expected = len(_segments(self.short.graph)) - 1 + self.folded.layers_left_out
        if self.num_layers != expected:
            raise PassError(f"unfold: expected {expected} attentions, wrote {self.num_layers}")
        output = self.folded.graph_module.graph.output_node()
        self.graph.node_copy(output, self._of_short)
        graph_module = GraphModule(self.root, self.graph)
        graph_module.graph.lint()
        recipes(graph_module).update(self.recipes)
        return graph_module


def _renamed(name: str, source: str, other: str) -> str:
    """`layers.1.mlp.gate_up` made of `layers.1.mlp.gate` is `layers.7.mlp.gate_up` made of `layers.7.mlp.gate`."""
    old, new = source.split("."), other.split(".")
    common = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), len(old))
    prefix = ".".join(old[: common + 1])
    if name.startswith(f"{prefix}."):
        return ".".join(new[: common + 1]) + name.removeprefix(prefix)
    return f"{name}_{other.replace('.', '_')}"


def _moved(node: Node, paths: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    stack = node.meta.get("nn_module_stack") or {}
    return {key: (paths.get(path, path), kind) for key, (path, kind) in stack.items()}
