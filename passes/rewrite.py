"""The one way in which a graph changes: a set of nodes is replaced, and both forms are kept for the proof."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext
from torch.fx.node import map_arg

from octavo.compiler.origin import where
from octavo.compiler.program import STEP_INPUTS
from octavo.compiler.type_rules import declared
from octavo.compiler.types import Part

PROVENANCE = ("nn_module_stack", "stack_trace", "stands_for")


@dataclass(frozen=True)
class Site:
    """One place where a pass rewrote the graph.

    before, after  the two forms as graphs over the same inputs
    examples       the inputs' fake tensors (shape, dtype), in order
    constants      values, by placeholder name, of weights that the pass relied on (the rows of a mask, say)
    table          name of the constant that holds results of the before form, rounded to the model's dtype
    stands_for     sites of the whole model that this one is an example of, where equal layers are left out
    key            equal for sites of equal structure, which need one proof between them
    """

    node: str
    where: str
    before: GraphModule
    after: GraphModule
    examples: tuple[Any, ...]
    constants: dict[str, torch.Tensor]
    key: str
    table: str | None = None
    stands_for: int = 1


class Builder:
    """Adds nodes in front of a node, with shapes inferred and the origin of `root` recorded."""

    def __init__(self, graph_module: GraphModule, root: Node) -> None:
        self.graph_module = graph_module
        self.root = root
        self.mode = fake_mode(graph_module)
        self.effects: list[Node] = []

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        name = getattr(target, "__name__", str(target)).split(".")[0]
        node = self.graph_module.graph.create_node("call_function", target, args, kwargs, name=name)
        set_meta(node, self.mode, self.root)
        return node

    def effect(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """A call made for what it writes; its result is not a value."""
        self.effects.append(self.call(target, *args, **kwargs))


def set_meta(node: Node, mode: FakeTensorMode, origin: Node | None = None) -> None:
    """Infer meta["val"] of a call from its arguments, and copy where it comes from."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    assert callable(node.target), f"{node} is not a call"
    with mode, enable_python_dispatcher():  # without it, some ops want sizes that are numbers
        node.meta["val"] = node.target(*args, **kwargs)
    for key in PROVENANCE:
        if origin is not None and key in origin.meta:
            node.meta.setdefault(key, origin.meta[key])


def fake_mode(graph_module: GraphModule) -> FakeTensorMode:
    values = [n.meta["val"] for n in graph_module.graph.nodes if n.op == "placeholder"]
    mode = detect_fake_mode(next(v for v in values if isinstance(v, torch.Tensor)))
    assert mode is not None, "the graph has no fake tensors in meta['val']"
    return mode


def placeholder(graph_module: GraphModule, name: str, value: Any, after: Node) -> Node:
    with graph_module.graph.inserting_after(after):
        node = graph_module.graph.placeholder(name)
    node.meta["val"] = value
    return node


def symbolic_tensor(
    mode: Any, name: str, sizes: tuple[int, ...], dtype: torch.dtype, static: tuple[int, ...] = ()
) -> Any:
    """A fake tensor whose sizes are symbols, but for the axes in `static`."""
    dims = [DimDynamic.STATIC if i in static else DimDynamic.DYNAMIC for i in range(len(sizes))]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
    return mode.from_tensor(
        torch.empty(sizes, dtype=dtype), source=ConstantSource(name), symbolic_context=context
    )


def symbolic_input(
    graph_module: GraphModule, name: str, sizes: tuple[int, ...], dtype: torch.dtype, after: Node
) -> Node:
    """A new placeholder of that rank, every size a symbol of its own."""
    return placeholder(
        graph_module, name, symbolic_tensor(fake_mode(graph_module), name, sizes, dtype), after
    )


def hold(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Keep `tensor` in `root` at the dotted `name`, making the modules on the way."""
    *path, leaf = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    root.register_buffer(leaf, tensor)


def held(root: nn.Module, name: str) -> torch.Tensor:
    """The tensor at a dotted name."""
    value: Any = root
    for part in name.split("."):
        value = getattr(value, part)
    assert isinstance(value, torch.Tensor), f"{name} is a {type(value).__name__}"
    return value


def exchange(root: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Keep `tensor` in place of what is held at the dotted name."""
    path, _, leaf = name.rpartition(".")
    delattr(root.get_submodule(path), leaf)
    hold(root, name, tensor)


@dataclass(frozen=True)
class Recipe:
    """How a pass made a weight out of others (by name): equal layers have theirs made in the same way."""

    sources: tuple[str, ...]
    make: Callable[[Sequence[torch.Tensor]], torch.Tensor]


def recipes(graph_module: GraphModule) -> dict[str, Recipe]:
    """The recipe of every weight that passes made."""
    known: dict[str, Recipe] = graph_module.meta.setdefault("recipes", {})
    return known


def new_weight(
    graph_module: GraphModule, name: str, tensor: torch.Tensor, recipe: Recipe | None = None,
    part: Part | None = None,
) -> Node:  # fmt: skip
    """A get_attr node at the top of the graph for a tensor that a pass made.

    recipe  None: of nothing that the graph holds
    part    what it holds of a quantised value
    """
    hold(graph_module, name, tensor)
    recipes(graph_module)[name] = recipe or Recipe((), lambda _: tensor)
    if part is not None:
        declared(graph_module)[name] = part
    with graph_module.graph.inserting_before(next(iter(graph_module.graph.nodes))):
        node = graph_module.graph.get_attr(name)
    node.meta["val"] = fake_tensor(graph_module, tensor)
    return node


def release(graph_module: GraphModule, site: Site, weights: Sequence[Node]) -> Site:
    """The site without the values of its constants; weights that nothing reads any more leave the graph and its memory.

    So a pass that replaces every weight holds the old and the new of one at a time.
    """
    graph_module.meta.get("sites", {}).pop(site.key, None)
    for node in weights:
        if not node.users:
            graph_module.graph.erase_node(node)
            path, _, leaf = str(node.target).rpartition(".")
            delattr(graph_module.get_submodule(path), leaf)
    return dataclasses.replace(site, constants={})


def fake_tensor(graph_module: GraphModule, tensor: torch.Tensor) -> torch.Tensor:
    """A weight's shape and dtype; one that has no values yet counts as the CPU's, like all others."""
    mode = fake_mode(graph_module)
    if not tensor.is_meta:
        return mode.from_tensor(tensor, static_shapes=True)
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)


def replace(
    graph_module: GraphModule, outputs: Sequence[Node], build: Callable[[Builder], Sequence[Node]],
    inputs: Sequence[Node] = (), effects: Sequence[Node] = (),
) -> Site:  # fmt: skip
    """Replace `outputs` by what `build` makes, remove `effects` (writes into caches), and return both forms.

    The nodes between `inputs` and `outputs` are the before form; placeholders and weights that it reaches are
    inputs too. Nodes that lose their last user stay until dead code is eliminated.
    """
    graph = graph_module.graph
    inputs = list(dict.fromkeys(inputs))  # a norm of x + x names x twice
    several = len(outputs) > 1 and not effects
    root = min(outputs) if several else max((*outputs, *effects))
    with graph.inserting_before(root) if several else graph.inserting_after(root):
        marker = graph.call_function(torch.ops.aten.alias.default, (root,) if not several else ())
    with graph.inserting_before(marker):
        builder = Builder(graph_module, root)
        results = list(build(builder))
    graph.erase_node(marker)
    site = make_site(graph_module, (*effects, *outputs), (*builder.effects, *results), inputs)
    inside = set(collect(results, inputs)[1])
    for old, new in zip(outputs, results, strict=True):
        # A new node may read the value that it replaces (a part of it, say): those uses stay.
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside)
    for dead in (*effects, *(old for old in outputs if not old.users)):
        # Dead code elimination keeps calls that may draw random numbers, such as attention with a dropout.
        graph.erase_node(dead)
    return site


def make_site(
    graph_module: GraphModule, outputs: Sequence[Node], results: Sequence[Node], inputs: Sequence[Node]
) -> Site:
    """Weights among `inputs` may have any value; others that either form reads keep theirs."""
    leaves = list(inputs)
    for ends in (outputs, results):
        leaves += [leaf for leaf in collect(ends, leaves)[0] if leaf not in leaves]
    examples = tuple(leaf.meta["val"] for leaf in leaves)
    fixed = [leaf for leaf in leaves if leaf.op == "get_attr" and leaf not in inputs]
    values = {leaf.name: held(graph_module, str(leaf.target)) for leaf in fixed}
    # A weight without values (on the meta device) may have any.
    constants = {name: value for name, value in values.items() if not value.is_meta}
    parts = [
        structure(outputs, leaves),
        structure(results, leaves),
        signature(examples),
        *map(content, constants.values()),
    ]
    key = hashlib.sha256("\n=>\n".join(parts).encode()).hexdigest()[:16]
    # Sites of equal structure share their forms: of 61 equal layers one is ever extracted.
    known = graph_module.meta.setdefault("sites", {})
    if key not in known:
        known[key] = (extract(outputs, leaves), extract(results, leaves), examples, constants)
    before, after, examples, constants = known[key]
    count = stands_for(outputs[0])
    return Site(outputs[0].name, where(outputs[0]), before, after, examples, constants, key, stands_for=count)


def stands_for(node: Node) -> int:
    """Nodes of the whole model that this one is an example of: 1, or more where equal layers are left out."""
    return int(node.meta.get("stands_for", 1))


def content(tensor: torch.Tensor) -> str:
    """Hash of a tensor's bytes."""
    if tensor.is_meta:
        return "meta"
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()


def collect(ends: Sequence[Node], inputs: Sequence[Node]) -> tuple[list[Node], list[Node]]:
    """(leaves, inner nodes in a valid order) of the sub-graph from `inputs` to `ends`."""
    leaves: list[Node] = []
    inner: list[Node] = []
    seen: set[Node] = set()
    stop = set(inputs)
    stack: list[tuple[Node, bool]] = [(end, False) for end in reversed(ends)]
    while stack:
        node, done = stack.pop()
        if done:
            inner.append(node)
        elif node not in seen:
            seen.add(node)
            if node in stop or node.op in ("placeholder", "get_attr"):
                leaves.append(node)
                continue
            stack.append((node, True))
            stack.extend((arg, False) for arg in reversed(node.all_input_nodes))
    return leaves, inner


def extract(ends: Sequence[Node], leaves: Sequence[Node]) -> GraphModule:
    """The sub-graph from `leaves` to `ends` as a graph of its own; leaves keep their names."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for leaf in leaves:
        copies[leaf] = graph.placeholder(leaf.name.replace(".", "_"))
        copies[leaf].meta = dict(leaf.meta)
    for node in collect(ends, leaves)[1]:
        copies[node] = graph.node_copy(node, lambda n: copies[n])
    graph.output(tuple(copies[end] for end in ends))
    return GraphModule(torch.nn.Module(), graph)


def structure(ends: Sequence[Node], leaves: Sequence[Node]) -> str:
    """Text of the sub-graph from `leaves` to `ends` in which names do not matter."""
    index: dict[Node, int] = {}
    lines = []
    for leaf in leaves:
        index[leaf] = len(index)
        lines.append(leaf.name if leaf.op == "placeholder" and leaf.name in STEP_NAMES else "input")
    for node in collect(ends, leaves)[1]:
        args = map_arg((node.args, node.kwargs), lambda n: f"%{index[n]}")
        index[node] = len(index)
        lines.append(f"{node.target} {args}")
    lines.append(str([index[end] for end in ends]))
    return "\n".join(lines)


def signature(examples: Sequence[Any]) -> str:
    """Shapes and dtypes; symbolic sizes by their order of appearance."""
    symbols: dict[str, str] = {}
    parts = []
    for value in examples:
        if isinstance(value, torch.Tensor):
            dims = [
                str(d) if isinstance(d, int) else symbols.setdefault(str(d), f"s{len(symbols)}")
                for d in value.shape
            ]
            parts.append(f"{value.dtype}[{', '.join(dims)}]")
        else:
            parts.append(type(value).__name__)
    return "; ".join(parts)


# Placeholders whose values must agree with each other, so their role is part of a site's structure.
STEP_NAMES = frozenset((*STEP_INPUTS, "position_ids"))
