"""Fresh inputs for a rewrite site: random values, and step inputs that agree with each other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler import ops  # noqa: F401  (registers the ops named below)

octavo, aten = torch.ops.octavo, torch.ops.aten
LINEARS = (octavo.linear.default, aten.linear.default)
LARGE = 257  # rows of a vocabulary are all alike: this many prove as much as all


@dataclass(frozen=True)
class Chunk:
    """A run of tokens of one request: positions start..start + length - 1."""

    request: int
    start: int
    length: int


@dataclass(frozen=True)
class StepInputs:
    """What the runtime hands to a step, for chosen chunks, over pages in shuffled order."""

    tensors: dict[str, Tensor]
    num_pages: int


def step_inputs(
    chunks: list[Chunk], page_size: int, num_requests: int, generator: torch.Generator, max_len: int = 64,
    windows: Sequence[int | None] = (None,),
) -> StepInputs:  # fmt: skip
    """Every request owns pages for max_len tokens; page 0 belongs to nobody, as in the runtime.

    windows  of the page groups, each of which has pages of its own; those that slid out of a window are page 0
    """
    columns = -(-max_len // page_size)
    order = torch.randperm(len(windows) * num_requests * columns, generator=generator) + 1
    positions = [torch.arange(c.start, c.start + c.length) for c in chunks]
    tables: dict[str, Tensor] = {}
    for group, window in enumerate(windows):
        table = order.view(len(windows), num_requests, columns)[group].clone()
        for c in chunks if window is not None else ():
            table[c.request, : max(c.start - (window or 0) + 1, 0) // page_size] = 0
        slots = [
            table[c.request, p // page_size] * page_size + p % page_size
            for c, p in zip(chunks, positions, strict=True)
        ]
        suffix = f"_{group}" if group else ""
        tables[f"slot_mapping{suffix}"] = torch.cat(slots)
        tables[f"page_table{suffix}"] = torch.stack([table[c.request] for c in chunks]).int()
    ends = torch.tensor([c.length for c in chunks]).cumsum(0)
    tensors = {
        "positions": torch.cat(positions)[None],
        **tables,
        "seq_lens": torch.tensor([c.start + c.length for c in chunks]).int(),
        "cu_seqlens_q": torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        "logit_rows": ends - 1,
        "tree": torch.zeros(int(ends[-1]), dtype=torch.int64),
    }
    return StepInputs(tensors, int(order.numel()) + 1)


def whole_sequences(
    sequences: Sequence[Sequence[int]], page_size: int, windows: Sequence[int | None] = (None,)
) -> StepInputs:
    """One step of sequences from their starts, each over pages of its own; logits of every token are wanted."""
    lengths = [len(sequence) for sequence in sequences]
    chunks = [Chunk(i, 0, length) for i, length in enumerate(lengths)]
    generator = torch.Generator().manual_seed(0)
    step = step_inputs(chunks, page_size, len(chunks), generator, max(lengths), windows)
    ids = torch.tensor([[token for sequence in sequences for token in sequence]])
    tokens = {"input_ids": ids, "logit_rows": torch.arange(ids.shape[1])}
    return StepInputs({**step.tensors, **tokens}, step.num_pages)


def empty_pages(cache: Node, num_pages: int) -> Tensor:
    """Zeros in the shape and dtype of a cache's pages."""
    example = cache.meta["val"]
    return torch.zeros((num_pages, *example.shape[1:]), dtype=example.dtype)


def fresh_features(node: Node, tokens: int, seed: int = 0) -> Tensor:
    """What a draft head reads of its target: (1, tokens, F), normal, in the dtype of its input."""
    example = node.meta["val"]
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((1, tokens, example.shape[2]), generator=generator).to(example.dtype)


def is_cache(name: str) -> bool:
    """Whether an input is pages: of keys, values or block scales. Those that take over are k_cache_0_1 in a site."""
    return name.startswith(("k_cache", "v_cache", "k_scales", "v_scales"))


def page_size_of(graph_module: GraphModule, default: int = 4) -> int:
    for node in graph_module.graph.nodes:
        if node.op == "placeholder" and is_cache(node.name):
            return int(node.meta["val"].shape[2])
    return default


class Sizes:
    """Concrete values for the symbolic sizes of a site; unbound symbols are the number of tokens."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.values: dict[str, int] = {}

    def bind(self, shape: Any, concrete: Any) -> None:
        for symbol, size in zip(shape, concrete, strict=True):
            if not isinstance(symbol, int):
                self.values[str(symbol)] = int(size)

    def concrete(self, shape: Any) -> list[int]:
        return [d if isinstance(d, int) else self._number(d) for d in shape]

    def _number(self, size: torch.SymInt) -> int:
        """A symbol, or an expression such as 2 * T."""
        expression = size.node.expr
        known = {s: self.values.get(str(s), self.tokens) for s in expression.free_symbols}
        return int(expression.subs(known))


def fresh_inputs(
    graph_module: GraphModule, examples: tuple[Any, ...], tokens: int, seed: int,
    constants: Mapping[str, Tensor] | None = None,
) -> list[Any]:  # fmt: skip
    """One value a placeholder. Floats are normal, weights scaled by 1 / sqrt(fan-in), a few rows tiny."""
    generator = torch.Generator().manual_seed(seed)
    names = [n.name for n in graph_module.graph.nodes if n.op == "placeholder"]
    first = tokens // 3
    chunks = [Chunk(0, 2, first), Chunk(1, 0, tokens - first)]
    step = step_inputs(chunks, page_size_of(graph_module), 2, generator)
    sizes = Sizes(tokens)
    for name, example in zip(names, examples, strict=True):
        if name in step.tensors:
            sizes.bind(example.shape, step.tensors[name].shape)
        elif is_cache(name):
            sizes.bind(example.shape, (step.num_pages, *example.shape[1:]))
    fixed = constants or {}
    return [
        fixed[name] if name in fixed else _value(graph_module, name, example, step, sizes, generator)
        for name, example in zip(names, examples, strict=True)
    ]


def _value(
    graph_module: GraphModule,
    name: str,
    example: Any,
    step: StepInputs,
    sizes: Sizes,
    generator: torch.Generator,
) -> Any:
    if not isinstance(example, Tensor):
        return sizes.concrete([example])[0] if isinstance(example, int | torch.SymInt) else sizes.tokens
    if name in step.tensors:
        return step.tensors[name].clone()
    shape = sizes.concrete(example.shape)
    if len(shape) == 2 and shape[0] > LARGE and _rows_are_free(graph_module, name):
        shape[0] = LARGE
    if name == "position_ids":
        return torch.arange(shape[-1]).expand(shape).clone()
    if example.dtype.is_floating_point and _is_ranked(graph_module, name):
        return distinct_floats(shape, example.dtype, generator)
    if example.dtype.is_floating_point:
        return random_floats(shape, example.dtype, generator)
    if example.dtype.is_complex:
        parts = [random_floats(shape, example.dtype.to_real(), generator) for _ in range(2)]
        return torch.complex(*parts)
    if example.dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = _num_experts(graph_module, name)
    if count:
        return torch.rand((*shape[:-1], count), generator=generator).argsort(-1)[..., : shape[-1]]
    return torch.randint(0, _rows(graph_module, name), shape, generator=generator).to(example.dtype)


def _rows_are_free(graph_module: GraphModule, name: str) -> bool:
    """Whether no other size depends on the rows of a weight: an embedding's, or a last product's."""
    last = (octavo.gather_logits.default, "output")
    for node in graph_module.graph.nodes:
        if not any(n.op == "placeholder" and n.name == name for n in node.all_input_nodes):
            continue
        is_table = node.target is octavo.embedding.default and node.args[1].name == name
        is_weight = node.target in LINEARS and node.args[1].name == name and len(node.args) == 2
        if not is_table and not (is_weight and all(u.target in last for u in node.users)):
            return False
    return True


def _is_ranked(graph_module: GraphModule, name: str) -> bool:
    """Whether an input's order decides what comes out: the logits of a router, the operand of a top-k."""
    ranking = (octavo.router.default, aten.topk.default)
    return any(n.target in ranking and _unshaped(n.args[0]).name == name for n in graph_module.graph.nodes)


def _num_experts(graph_module: GraphModule, name: str) -> int:
    """Of the experts that an input selects from, no token one of them twice; 0: it selects none."""
    for node in graph_module.graph.nodes:
        if node.target is octavo.moe.default and _unshaped(node.args[1]).name == name:
            return int(node.args[3].meta["val"].shape[0])
    return 0


def _unshaped(node: Any) -> Node:
    while node.target is aten.reshape.default:
        node = node.args[0]
    result: Node = node
    return result


def distinct_floats(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Along the last axis no two are equal, nor sums of two of their sigmoids; in bf16 neither."""
    width = shape[-1]
    ranks = torch.rand(shape, generator=generator).argsort(-1) + 1
    step = 2.0 ** (3 - math.ceil(math.log2(width)))
    return (ranks * -step).to(dtype)


def random_floats(shape: list[int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    value = torch.randn(shape, generator=generator)
    if len(shape) == 2 and shape[0] > 1:
        value = value / shape[-1] ** 0.5
    elif len(shape) > 2 and shape[1] > 1:
        # A row this small makes the eps of a norm matter.
        value[:, 1] *= 1e-3
    return value.to(dtype)


def _rows(graph_module: GraphModule, name: str) -> int:
    """Ids must stay below the rows of the table that they index."""
    limits = [8]  # also where the table is named by an op of the framework
    for node in graph_module.graph.nodes:
        if node.target is octavo.embedding.default and getattr(node.args[0], "name", "") == name:
            limits.append(min(int(node.args[1].meta["val"].shape[0]), LARGE))
    return min(limits)
