"""What every rank of a mesh holds, sends and has room for: figures of its program, built for weights without values.

All are counted in the program that a rank would run: its buffers, its collective steps and its workspace. Only where
tokens go is an assumption: that they choose uniformly among the experts that their router allows.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch.fx import GraphModule, Node

from octavo.codegen.emit import emit
from octavo.compiler.build import select_all
from octavo.compiler.dims import makes_logits
from octavo.compiler.errors import OptionError
from octavo.compiler.expression import evaluate
from octavo.compiler.graph_model import copy_graph
from octavo.compiler.legality import named_arguments, op
from octavo.compiler.options import Parallel, QuantConfig
from octavo.compiler.parallelize import parallelize
from octavo.compiler.placement_rules import EXPERT_OPS
from octavo.compiler.program import Program
from octavo.compiler.target import Target
from octavo.passes.group_pages import group_pages
from octavo.passes.plan_memory import plan_memory
from octavo.passes.rule import run_pass
from octavo.passes.sharding import whole_weights
from octavo.runtime.cuda_runner import DEFAULT_MAX_REQUESTS, PAGE_MEMORY_SHARE
from octavo.runtime.model_runner import num_bytes, page_bytes
from octavo.runtime.wire import row_bytes

LINEARS = frozenset(
    "octavo::" + name for name in ("linear", "nvfp4_linear", "nvfp4_weight_linear", "fp8_linear")
)
ACTIVATIONS = frozenset("octavo::" + name for name in ("act_mul", "act_mul_quantize", "pointwise"))
THROUGH = frozenset(("getitem", "aten::reshape", "octavo::quantize"))
KINDS: tuple[str, ...] = ("experts", "attention", "FFNs", "embeddings and logits", "other")
ID_BYTES, WEIGHT_BYTES, OUTER_BYTES = 4, 4, 4  # beside a row: of each slot, and its outer scale if it has one


@dataclass(frozen=True)
class Exchange:
    """Collective steps that are alike.

    count         of them in a step of the model
    rows          what they are counted by: "T", tokens of the rank, or "L", rows of logits
    row_bytes     of one row to one rank
    destinations  other ranks that a row goes to, on average; most: the largest number
    """

    kernel: str
    axis: str
    count: int
    rows: str
    row_bytes: int
    destinations: float
    most: float

    @property
    def sent(self) -> float:
        """Bytes that leave a rank for each row, on average."""
        return self.row_bytes * self.destinations


@dataclass(frozen=True)
class Routing:
    """What a router allows: top_k of the experts of top_groups of the groups."""

    experts: int
    top_k: int
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class RankPlan:
    """weights: bytes by kind; experts: (logical, a rank's places, of all places those that hold a copy or nothing).

    tokens, workspace, logits  of the largest step: tokens of a rank, bytes of scratch memory and of logits
    kv_token_bytes  of a token whose keys no window forgets
    kv_tokens       that fit into the share of the rest that the runtime takes for pages
    memory          of the device, bytes; None: the target does not say
    """

    parallel: Parallel
    weights: Mapping[str, int]
    experts: tuple[int, int, int]
    tokens: int
    workspace: int
    logits: int
    kv_token_bytes: int
    kv_tokens: int | None
    memory: int | None
    exchanges: tuple[Exchange, ...]

    @property
    def used(self) -> int:
        return sum(self.weights.values()) + self.workspace + self.logits

    @property
    def as_row(self) -> dict[str, Any]:
        """As JSON holds it."""
        sent = {"exchanges": [{**asdict(one), "sent": one.sent} for one in self.exchanges]}
        fits = None if self.memory is None else bool(self.kv_tokens)
        return {**asdict(self), "ranks": self.parallel.world, "used": self.used, "fits": fits, **sent}


def plan_ranks(
    graph_module: GraphModule, parallel: Parallel, target: Target, page_size: int, max_model_len: int,
    max_batch_tokens: int,
) -> RankPlan:  # fmt: skip
    """Plan the ranks of a lowered graph, which stays as it is. Nothing is proven: weights may have no values.

    Raises as parallelize does, and CodegenError for an op without a kernel.
    """
    ranks = copy_graph(graph_module)
    parallelize(ranks, parallel, page_size, whole=None)
    run_pass(group_pages, ranks)
    specs = {node: selection.spec for node, selection in select_all(ranks, target).items()}
    program = emit(ranks, specs, plan_memory(ranks.graph), page_size)
    requests = min(max_batch_tokens, DEFAULT_MAX_REQUESTS)
    dims = {
        "T": max_batch_tokens, "R": requests, "L": requests, "P": -(-max_model_len // page_size), "num_pages": 1,
        "N": max_batch_tokens * parallel.mesh.dp,
    }  # fmt: skip
    return _figures(ranks, program, parallel, target.hbm_bytes, dims)


def _figures(
    ranks: GraphModule, program: Program, parallel: Parallel, memory: int | None, dims: Mapping[str, int]
) -> RankPlan:
    weights = _weights(ranks, program)
    workspace = evaluate(program.workspace, dims)
    logits = sum(num_bytes(buffer, dims) for buffer in program.of_kind("output"))
    # Of a long context each group without a window has pages, which all are of one size.
    growing = sum(window is None for window in program.page_windows) or len(program.page_windows)
    kv_token_bytes = page_bytes(program) * growing // program.page_size
    rest = None if memory is None else memory - sum(weights.values()) - workspace - logits
    tokens = None if rest is None else max(int(rest * PAGE_MEMORY_SHARE), 0) // max(kv_token_bytes, 1)
    return RankPlan(
        parallel, weights, _experts(ranks, parallel), dims["T"], workspace, logits, kv_token_bytes,
        None if tokens is None else tokens // program.page_size * program.page_size, memory,
        tuple(_exchanges(ranks, program, parallel)),
    )  # fmt: skip


def _weights(ranks: GraphModule, program: Program) -> dict[str, int]:
    kinds = {str(node.target): _kind(node) for node in ranks.graph.find_nodes(op="get_attr")}
    found = dict.fromkeys(KINDS, 0)
    for buffer in program.of_kind("weight"):
        found[kinds[buffer.name]] += num_bytes(buffer, {})
    return found


def _kind(weight: Node) -> str:
    """What a weight is for, by who reads it."""
    kinds = [_kind_of_reader(user) for user in weight.users]
    return min(kinds, key=KINDS.index, default="other")


def _kind_of_reader(node: Node) -> str:
    if op(node) in EXPERT_OPS:
        return "experts"
    if op(node) == "octavo::embedding":
        return "embeddings and logits" if named_arguments(node)["ids"].name == "input_ids" else "other"
    if op(node) in LINEARS and makes_logits(node):
        return "embeddings and logits"
    if op(node) == "octavo::head_linear":
        return "attention"
    if op(node) not in LINEARS or any(op(user) == "octavo::router" for user in _users(node)):
        return "other"
    beside = [*_users(node), _source(node.all_input_nodes[0])]
    return "FFNs" if any(op(one) in ACTIVATIONS for one in beside) else "attention"


def _users(node: Node) -> Iterator[Node]:
    """Who reads a value, beyond what only shows it in another form."""
    for user in node.users:
        if op(user) in THROUGH:
            yield from _users(user)
        else:
            yield user


def _source(node: Node) -> Node:
    while node.op == "call_function" and op(node) in THROUGH:
        node = node.all_input_nodes[0]
    return node


def _experts(ranks: GraphModule, parallel: Parallel) -> tuple[int, int, int]:
    for node in ranks.graph.nodes:
        if op(node) in EXPERT_OPS:
            local = int(named_arguments(node)["down"].meta["val"].shape[0])
            table = named_arguments(node)["experts"]
            logical = _routing(_map_of(table)).experts if parallel.ep > 1 else local
            return logical, local, local * parallel.world - logical if parallel.ep > 1 else 0
    return 0, 0, 0


def _map_of(value: Node) -> Node:
    """The map_experts behind the experts that a mixture or a dispatch reads."""
    while op(value) != "octavo::map_experts":
        if op(value) == "octavo::dispatch":
            value = named_arguments(value)["experts"]
        else:
            value = value.all_input_nodes[0]
    return value


def _routing(mapped: Node) -> Routing:
    given = named_arguments(mapped)
    table, source = given["table"], _source(given["experts"])
    experts, top_k = int(table.meta["val"].shape[0]), int(mapped.meta["val"].shape[-1])
    if op(source) != "octavo::router":
        return Routing(experts, top_k)
    router = named_arguments(source)
    groups = router["num_groups"]
    return Routing(experts, top_k, groups, router["top_groups"] if groups > 1 else 1)


def _exchanges(ranks: GraphModule, program: Program, parallel: Parallel) -> Iterator[Exchange]:
    """Of the collective steps those that are alike as one, in the order of the program."""
    nodes = [node for node in ranks.graph.nodes if op(node).removeprefix("octavo::") in _COLLECTIVES]
    steps = [step for step in program.collectives if step.kernel in _COLLECTIVES]
    found: dict[Exchange, int] = {}
    for node, step in zip(nodes, steps, strict=True):
        one = _COLLECTIVES[step.kernel](ranks, node, parallel)
        found[one] = found.get(one, 0) + 1
    for one, count in found.items():
        yield Exchange(**{**asdict(one), "count": count})


def _dispatch(ranks: GraphModule, node: Node, parallel: Parallel) -> Exchange:
    given = named_arguments(node)
    x, wire = given["x"].meta["val"], given["wire"]
    own = OUTER_BYTES if wire != "model" and given["outer"] is None else 0
    beside = (ID_BYTES + WEIGHT_BYTES) * int(given["experts"].meta["val"].shape[-1]) + own
    row = row_bytes(wire, int(x.shape[-1]), x.dtype) + beside
    return Exchange(
        "dispatch", "dp", 0, "T", row, *_destinations(ranks, given["experts"], given["num_local"], parallel)
    )


def _combine(ranks: GraphModule, node: Node, parallel: Parallel) -> Exchange:
    given = named_arguments(node)
    parts = given["parts"].meta["val"]
    row = int(parts.shape[-1]) * parts.dtype.itemsize
    return Exchange(
        "combine", "dp", 0, "T", row, *_destinations(ranks, given["experts"], given["num_local"], parallel)
    )


def _of_all(ranks: GraphModule, node: Node, parallel: Parallel) -> Exchange:
    """Sums in two phases, parts to all others and sums to all others, and joins."""
    given, kernel = named_arguments(node), op(node).removeprefix("octavo::")
    x, size = given["x"].meta["val"], parallel.mesh.size(given["axis"])
    row = math.prod(int(d) for d in x.shape[2:]) * x.dtype.itemsize
    others = {
        "all_reduce": 2 * (size - 1) / size,
        "reduce_scatter": (size - 1) / size,
        "all_gather": size - 1.0,
    }
    rows = "L" if makes_logits(node) or any(makes_logits(n) for n in node.all_input_nodes) else "T"
    return Exchange(kernel, given["axis"], 0, rows, row, others[kernel], others[kernel])


_COLLECTIVES = {
    "dispatch": _dispatch, "combine": _combine, "all_reduce": _of_all, "all_gather": _of_all, "reduce_scatter": _of_all,
}  # fmt: skip


def _destinations(
    ranks: GraphModule, experts: Node, num_local: int, parallel: Parallel
) -> tuple[float, float]:
    mapped = _map_of(experts)
    name, routing, mesh = str(named_arguments(mapped)["table"].target), _routing(mapped), parallel.mesh
    tables = whole_weights(ranks)[name].view(mesh.world, routing.experts).tolist()
    own = tuple(mesh.coordinates(rank)["dp"] for rank in range(mesh.world))
    owners = tuple(tuple(-1 if e < 0 else e // num_local for e in table) for table in tables)
    return spread_of(owners, own, routing)


@functools.cache
def spread_of(owners: Sequence[Sequence[int]], own: Sequence[int], routing: Routing) -> tuple[float, float]:
    """To how many other ranks a token goes: on average over ranks and over what their routers allow, and at most.

    owners  of each rank, where it finds each expert: a coordinate, or -1 if another rank answers; own: of each rank
    """
    size = routing.experts // routing.groups
    subsets = list(itertools.combinations(range(routing.groups), routing.top_groups))
    allowed = size * routing.top_groups
    total, most = 0.0, 0
    for table, here in zip(owners, own, strict=True):
        held: dict[int, list[int]] = {}
        for expert, owner in enumerate(table):
            if owner not in (-1, here):
                held.setdefault(owner, [0] * routing.groups)[expert // size] += 1
        for subset in subsets:
            counts = [count for groups in held.values() if (count := sum(groups[g] for g in subset))]
            total += sum(chance_of_any(count, allowed, routing.top_k) for count in counts)
            most = max(most, min(len(counts), routing.top_k))
    return total / (len(owners) * len(subsets)), float(most)


@functools.cache
def chance_of_any(count: int, of: int, drawn: int) -> float:
    """That of `drawn` different ones out of `of` at least one is among `count`."""
    return 1.0 - math.comb(of - count, drawn) / math.comb(of, drawn)


def check_planned(config: QuantConfig) -> None:
    """Raises OptionError for formats that are not known without values."""
    if config.is_auto:
        raise OptionError(
            f"quantize: mode {config.mode!r} chooses formats by what weights do, and a plan does not look at values; "
            "choose nvfp4, nvfp4_weight_only or fp8"
        )
