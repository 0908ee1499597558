"""Which rank holds which experts of an MoE layer, and which rank answers for them.

Replicas of the most loaded experts and their packing follow DeepSeek's expert parallelism load balancer (EPLB, MIT
licence; DeepSeek-V3, arXiv 2412.19437, section 3.4), in our own code.
"""

import heapq
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from octavo.compiler.errors import OptionError
from octavo.compiler.mesh import Mesh

Table = tuple[int, ...]


@dataclass(frozen=True)
class ExpertPlacement:
    """experts: of every rank the logical experts that it holds, ascending. One on several ranks has replicas."""

    experts: tuple[tuple[int, ...], ...]

    @property
    def num_ranks(self) -> int:
        return len(self.experts)

    @property
    def num_experts(self) -> int:
        """Logical ones; each is somewhere."""
        return 1 + max(max(held, default=-1) for held in self.experts)

    @property
    def num_local(self) -> int:
        """Experts in every rank's weights."""
        return max(map(len, self.experts))

    def local(self, rank: int) -> tuple[int, ...]:
        """The logical expert in each of a rank's `num_local` places; behind what it holds repeats, in no table."""
        held = self.experts[rank]
        return held + (held[-1] if held else 0,) * (self.num_local - len(held))

    def pieces(self, rank: int) -> tuple[tuple[int, int], ...]:
        """`local` as ranges [start, stop) of the experts in the whole weights, in order."""
        found: list[tuple[int, int]] = []
        for expert in self.local(rank):
            if found and found[-1][1] == expert:
                found[-1] = (found[-1][0], expert + 1)
            else:
                found.append((expert, expert + 1))
        return tuple(found)

    def replicas(self) -> tuple[tuple[int, ...], ...]:
        """Of every logical expert the ranks that hold it, ascending."""
        ranks: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, held in enumerate(self.experts):
            for expert in held:
                ranks[expert].append(rank)
        return tuple(map(tuple, ranks))


def contiguous_placement(num_experts: int, num_ranks: int, redundant: int = 0) -> ExpertPlacement:
    """Experts in order, one more on the first ranks if they do not divide; `redundant` as in balanced_placement."""
    if redundant:
        return balanced_placement([1.0] * num_experts, num_ranks, redundant)
    size, longer = divmod(num_experts, num_ranks)
    starts = [rank * size + min(rank, longer) for rank in range(num_ranks + 1)]
    return ExpertPlacement(tuple(tuple(range(*bounds)) for bounds in pairwise(starts)))


def balanced_placement(
    loads: Sequence[float], num_ranks: int, redundant: int = 0, nodes: int = 1, groups: int = 1
) -> ExpertPlacement:
    """Placement by loads: `redundant` replicas more, each of the expert whose replicas have the most to do by then;
    then replicas to ranks, the most loaded first, to the rank with the least. No expert is twice on a rank.

    loads   (E,) tokens that each expert got, or anything in that proportion
    nodes   above 1: ranks lie in so many nodes, in order. Each of the router's `groups` of experts stays within a
            node, so that a token of few groups travels to few nodes; each node replicates its own experts
    Raises OptionError where the numbers do not fit.
    """
    _check(loads, num_ranks, redundant, nodes, groups)
    ranks = num_ranks // nodes
    parts = _groups_of_nodes(loads, nodes, groups)
    found: list[tuple[int, ...]] = []
    for experts in parts:
        counts = _counts([loads[e] for e in experts], redundant // nodes, ranks)
        found += _pack(dict(zip(experts, counts, strict=True)), loads, ranks)
    return ExpertPlacement(tuple(found))


def _check(loads: Sequence[float], num_ranks: int, redundant: int, nodes: int, groups: int) -> None:
    most = len(loads) * (num_ranks // nodes - 1)
    if not loads or any(not 0 <= load < float("inf") for load in loads):
        raise OptionError("loads: expected a finite number of at least 0 for every expert")
    for name, value, by, of in (
        ("num_ranks", num_ranks, nodes, "nodes"), ("groups", groups, nodes, "nodes"),
        ("redundant", redundant, nodes, "nodes"), ("experts", len(loads), groups, "groups"),
    ):  # fmt: skip
        if nodes > 1 and value % by:
            raise OptionError(f"{name}: expected a multiple of the {by} {of}, got {value}")
    if not 0 <= redundant <= most:
        raise OptionError(
            f"redundant experts: expected 0 to {most}, as none of {len(loads)} can be twice on one of {num_ranks} ranks"
            f"{f' in {nodes} nodes' if nodes > 1 else ''}, got {redundant}"
        )


def _groups_of_nodes(loads: Sequence[float], nodes: int, groups: int) -> list[list[int]]:
    """The experts of each node: as many groups everywhere, the most loaded first to the node with the least."""
    if nodes == 1:
        return [[*range(len(loads))]]
    size = len(loads) // groups
    members = [range(g * size, (g + 1) * size) for g in range(groups)]
    of_group = [sum(loads[e] for e in member) for member in members]
    chosen: list[list[int]] = [[] for _ in range(nodes)]
    for g in sorted(range(groups), key=lambda g: -of_group[g]):
        free = [n for n in range(nodes) if len(chosen[n]) < groups // nodes]
        chosen[min(free, key=lambda n: sum(of_group[other] for other in chosen[n]))].append(g)
    return [[e for g in sorted(node) for e in members[g]] for node in chosen]


def _counts(loads: Sequence[float], redundant: int, num_ranks: int) -> list[int]:
    """Replicas of each expert, at most one a rank."""
    counts = [1] * len(loads)
    waiting = [(-load, e) for e, load in enumerate(loads)]
    heapq.heapify(waiting)
    for _ in range(redundant):
        while counts[waiting[0][1]] == num_ranks:
            heapq.heappop(waiting)
        e = waiting[0][1]
        counts[e] += 1
        heapq.heapreplace(waiting, (-loads[e] / counts[e], e))
    return counts


def _pack(counts: dict[int, int], loads: Sequence[float], num_ranks: int) -> list[tuple[int, ...]]:
    """Replicas {expert: how many} on ranks: equally many on each as far as they divide, by load."""
    share = {e: loads[e] / count for e, count in counts.items()}
    most = -(-sum(counts.values()) // num_ranks)
    held: list[set[int]] = [set() for _ in range(num_ranks)]
    totals = [0.0] * num_ranks
    for e in sorted(counts, key=lambda e: (-share[e], e)):
        for _ in range(counts[e]):
            others = [r for r in range(num_ranks) if e not in held[r]]
            free = [r for r in others if len(held[r]) < most]
            place = min(free or others, key=lambda r: (totals[r], len(held[r]), r))
            held[place].add(e)
            totals[place] += share[e]
    return [tuple(sorted(one)) for one in held]


def expert_tables(placement: ExpertPlacement, mesh: Mesh, loads: Sequence[float] = ()) -> tuple[Table, ...]:
    """Of each rank the (E,) table that octavo.map_experts takes. Of all ranks exactly one answers a token's expert.

    Without dp all ranks see the same tokens: the place of the expert in the rank's weights, or -1 where another rank
    answers. With dp: dp coordinate of the rank that answers * num_local + place there, or -1 where that rank differs on
    another axis. A token's replica depends on its dp coordinate only: the one that a rank there has itself, else of
    those with the least to do by `loads` (E,), which stand for all coordinates; equal without them.
    So without dp replicas take no load off a rank: they let a later table choose another.
    """
    assert mesh.world == placement.num_ranks, "one rank of the mesh for each of the placement"
    local = [{e: place for place, e in enumerate(held)} for held in placement.experts]
    tables = [[-1] * placement.num_experts for _ in range(mesh.world)]
    for d, expert, answering in _answers(placement, mesh, loads):
        own = mesh.coordinates(answering)
        place = local[answering][expert] + (own["dp"] * placement.num_local if mesh.dp > 1 else 0)
        tables[mesh.rank(d, own["ep"], own["tp"])][expert] = place
    return tuple(map(tuple, tables))


def _answers(
    placement: ExpertPlacement, mesh: Mesh, loads: Sequence[float]
) -> Iterator[tuple[int, int, int]]:
    """(dp coordinate of the tokens, expert, rank that answers)."""
    wanted = [load / mesh.dp for load in loads] or [1.0] * placement.num_experts
    replicas = placement.replicas()
    totals = [0.0] * mesh.world
    for expert in sorted(range(placement.num_experts), key=lambda e: (len(replicas[e]), -wanted[e], e)):
        answered = dict.fromkeys(replicas[expert], 0)
        near = {d: [r for r in answered if mesh.coordinates(r)["dp"] == d] for d in range(mesh.dp)}
        for d in near:
            rank = min(near[d] or answered, key=lambda r: (totals[r], answered[r], r))
            answered[rank] += 1
            totals[rank] += wanted[expert]
            yield d, expert, rank


def rank_loads(placement: ExpertPlacement, mesh: Mesh, loads: Sequence[float]) -> list[float]:
    """What every rank has to do where the experts get these loads, as the tables by these loads lead it there."""
    totals = [0.0] * mesh.world
    for _, expert, rank in _answers(placement, mesh, loads):
        totals[rank] += loads[expert] / mesh.dp
    return totals


def balancedness(loads: Sequence[float]) -> float:
    """Mean over largest load of ranks: 1 is best, 1 / ranks where one does all. 1 without load."""
    largest = max(loads)
    return sum(loads) / len(loads) / largest if largest else 1.0


def placements_to_json(placements: Sequence[ExpertPlacement]) -> str:
    """Of the MoE layers in order, a line each: of each rank its experts."""
    lines = ",\n  ".join(json.dumps(one.experts) for one in placements)
    return f'{{"layers": [\n  {lines}\n]}}\n'


def placements_from_json(text: str) -> list[ExpertPlacement]:
    """Raises OptionError for anything that placements_to_json does not write."""
    try:
        layers = json.loads(text)["layers"]
        found = [ExpertPlacement(tuple(tuple(map(int, held)) for held in layer)) for layer in layers]
        for layer, one in enumerate(found):
            _check_held(layer, one)
    except (ValueError, TypeError, KeyError) as error:
        raise OptionError(f"placement: expected what `octavo balance` writes, got {error!r}") from None
    return found


def _check_held(layer: int, placement: ExpertPlacement) -> None:
    missing = [e for e, ranks in enumerate(placement.replicas()) if not ranks]
    if missing or placement.num_experts < 1:
        raise ValueError(
            f"layer {layer}: expected every expert on a rank, expert {[*missing, 0][0]} is on none"
        )
    if any(held != tuple(sorted({*held})) or held[:1] < (0,) for held in placement.experts if held):
        raise ValueError(f"layer {layer}: expected each rank's experts once and ascending")
