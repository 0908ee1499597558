"""Experts over ranks against a dense fp64 oracle: every dispatcher, wire and dtype, on awkward routings.

    torchrun --nproc-per-node 4 benchmarks/check_expert_parallel.py 1 2 3
    python benchmarks/check_expert_parallel.py --launch 1 2 3

The numbers are seeds. --launch starts torchrun for 1, 2, 3, 4 and 8 ranks, one after another, and prints one table. A
cell is the worst error over its bound, of all seeds, dispatchers and dtypes; bounds follow from the formats alone.
Results that differ in a bit between dispatchers or repeats are a miss too. Exits 1 on a miss.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.compiler.expert_placement import balanced_placement, contiguous_placement, expert_tables
from octavo.compiler.mesh import Mesh
from octavo.runtime.collectives import all_reduce, combine, dispatch
from octavo.runtime.dispatchers import DISPATCHERS
from octavo.runtime.process_group import AxisGroup, Ranks

WORLDS = (1, 2, 3, 4, 8)
HIDDEN, WIDTH, EXPERTS, TOP_K = 64, 48, 11, 3  # no world divides 11 experts
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
HALF_STEP = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}  # relative
WIRES = ("model", "fp8", "nvfp4", "nvfp4, outer scale given")
ADDED = "same tokens, partial sums added"
SILU_SLOPE = 1.1  # the largest of silu


@dataclass(frozen=True)
class Weights:
    """Of all experts, fp64: gate and up (E, WIDTH, HIDDEN), down (E, HIDDEN, WIDTH)."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class Case:
    """choose: experts (T, K) of a rank's tokens, -1 for none. redundant: replicas beside one of each expert."""

    name: str
    counts: tuple[int, ...]
    choose: Callable[[int, torch.Generator], Tensor]
    redundant: int = 0


def distinct(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, EXPERTS, generator=generator).argsort(-1)[:, :TOP_K]


def some_padded(count: int, generator: torch.Generator) -> Tensor:
    chosen = distinct(count, generator)
    return chosen.masked_fill(torch.rand(chosen.shape, generator=generator) < 0.4, -1)


def one_hot(count: int, generator: torch.Generator) -> Tensor:
    chosen = torch.full((count, TOP_K), -1)
    chosen[:, 0] = 7
    return chosen


def of_few(chosen: Sequence[int], count: int, generator: torch.Generator) -> Tensor:
    order = torch.rand(count, len(chosen), generator=generator).argsort(-1)[:, :TOP_K]
    found = torch.tensor(list(chosen))[order]
    return torch.nn.functional.pad(found, (0, TOP_K - found.shape[1]), value=-1)


def cases(world: int, seed: int) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(seed)
    uneven = tuple(torch.randint(0, 9, (world,), generator=generator).tolist())
    last = contiguous_placement(EXPERTS, world).experts[world - 1]
    first = contiguous_placement(EXPERTS, world).experts[0]
    yield Case("uneven tokens", uneven, distinct)
    yield Case("all tokens on one rank", (*[0] * (world - 1), 9), distinct)
    yield Case("no tokens at all", (0,) * world, distinct)
    yield Case("one hot expert", (5,) * world, one_hot)
    yield Case("all experts of one rank", uneven, functools.partial(of_few, last))
    yield Case("half of the ranks idle", (4,) * world, functools.partial(of_few, first))
    yield Case("padded ids", uneven, some_padded)
    for redundant in (1, 4):
        if redundant <= EXPERTS * (world - 1):
            yield Case(f"{redundant} redundant experts", uneven, some_padded, redundant)


def make_weights(seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed + 1000)
    shapes = ((EXPERTS, WIDTH, HIDDEN), (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    return Weights(*(torch.randn(s, generator=generator, dtype=torch.float64) / s[-1] ** 0.5 for s in shapes))


def expert(weights: Weights, e: int, x: Tensor) -> Tensor:
    hidden = torch.nn.functional.silu(x @ weights.gate[e].T) * (x @ weights.up[e].T)
    return hidden @ weights.down[e].T


def mixture(weights: Weights, names: Sequence[int], x: Tensor, experts: Tensor, shares: Tensor) -> Tensor:
    """Sum over slots of share * expert(x), fp64; slot values are places in `names`, -1 adds nothing."""
    total = torch.zeros_like(x, dtype=torch.float64)
    for place in experts[experts >= 0].unique().tolist():
        rows, slots = torch.where(experts == place)
        made = expert(weights, names[place], x[rows].double())
        total.index_add_(0, rows, made * shares[rows, slots, None].double())
    return total


def wire_error(x: Tensor, wire: str, outer: float | None, half_step: float) -> Tensor:
    """How far an element may be off after the wire, from the formats' steps: E4M3 has 3 bits of fraction and multiples
    of 2^-9 below; E2M1 has gaps of 0.5, 1 and 2, and its block scale is E4M3. Then it is rounded to its dtype.
    """
    if wire == "model":
        return torch.zeros_like(x)
    largest = x.abs().amax(-1, keepdim=True)
    if wire == "fp8":
        error = x.abs() * 2**-4 + largest / 448 * 2**-10
    else:
        scale = largest / 2688 if outer is None else torch.tensor(outer, dtype=torch.float64)
        amax = x.abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1)
        least, most = amax / 6 * (1 - 2**-4) - scale * 2**-10, amax / 6 * (1 + 2**-4) + scale * 2**-9
        ratio = x.abs() / least.clamp(min=1e-300)
        error = torch.where(ratio <= 2, 0.25, torch.where(ratio <= 4, 0.5, 1.0)) * most
    return error + (x.abs() + error) * (half_step + 2**-20)


def bounds(
    weights: Weights, x: Tensor, error: Tensor, experts: Tensor, shares: Tensor, half_step: float, world: int
) -> Tensor:
    """How far a mixture may be off where x is off by `error`, by the slopes of every step of it and by rounding."""
    bound = torch.zeros_like(x)
    for e in experts[experts >= 0].unique().tolist():
        rows, slots = torch.where(experts == e)
        own, off, share = x[rows], error[rows], shares[rows, slots, None].double()
        gate, up, down = weights.gate[e].T, weights.up[e].T, weights.down[e].T
        d_gate, d_up = off @ gate.abs(), off @ up.abs()
        d_hidden = SILU_SLOPE * d_gate * ((own @ up).abs() + d_up)
        d_hidden = d_hidden + torch.nn.functional.silu(own @ gate).abs() * d_up
        moved = d_hidden @ down.abs()
        # Products are in fp64, whose order may differ; a part is rounded, parts are added in fp32 (fp64), and rounded.
        summed = (SILU_SLOPE * (own.abs() @ gate.abs()) * (own.abs() @ up.abs())) @ down.abs()
        in_sums = half_step if half_step < 2**-24 else 2**-24
        rounded = (expert(weights, e, own).abs() + moved) * (2.01 * half_step + world * in_sums)
        bound.index_add_(0, rows, (moved + rounded + summed * (HIDDEN + WIDTH) * 2**-51) * share)
    return bound


@dataclass
class Bench:
    """One case on one rank."""

    ranks: Ranks
    case: Case
    weights: Weights
    seed: int

    def __post_init__(self) -> None:
        world = self.ranks.mesh.world
        loads = torch.rand(EXPERTS, generator=torch.Generator().manual_seed(self.seed)).tolist()
        self.placement = (
            balanced_placement(loads, world, self.case.redundant)
            if self.case.redundant
            else contiguous_placement(EXPERTS, world)
        )
        self.names = self.placement.local(self.ranks.rank)

    def tokens(self, rank: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """x (T, H), logical experts (T, K), shares (T, K) of a rank."""
        generator = torch.Generator().manual_seed(self.seed * 100 + rank)
        count = self.case.counts[rank]
        x = torch.randn(count, HIDDEN, generator=generator, dtype=torch.float64)
        x = x * 10 ** torch.randint(-2, 2, (count, 1), generator=generator).double()
        shares = torch.rand(count, TOP_K, generator=generator)
        return x.to(dtype), self.case.choose(count, generator), shares

    def spread(self, dispatcher: str, dtype: torch.dtype, wire: str, outer: float | None) -> Tensor:
        """Tokens travel to their experts and back."""
        peers = self.ranks.axes["dp"]
        x, logical, shares = self.tokens(self.ranks.rank, dtype)
        table = torch.tensor(expert_tables(self.placement, self.ranks.mesh)[self.ranks.rank])
        experts = torch.where(logical < 0, -1, table[logical.clamp(min=0)])
        way = DISPATCHERS[dispatcher](peers)
        scale = None if outer is None else torch.tensor([outer])
        local = self.placement.num_local
        rows, own, weights, source = dispatch(
            way, peers, x, experts, shares, self.case.counts, scale, local, wire
        )
        parts = mixture(self.weights, self.names, rows, own, weights).to(dtype)
        return combine(way, peers, parts, source, experts, local)

    def masked(self, peers: AxisGroup, dtype: torch.dtype) -> Tensor:
        """All ranks have rank 0's tokens, add up what their experts make of them."""
        x, logical, shares = self.tokens(self.case.counts.index(max(self.case.counts)), dtype)
        mesh = Mesh(ep=self.ranks.mesh.world)
        table = torch.tensor(expert_tables(self.placement, mesh)[self.ranks.rank])
        experts = torch.where(logical < 0, -1, table[logical.clamp(min=0)])
        return all_reduce(peers, mixture(self.weights, self.names, x, experts, shares).to(dtype))

    def ratio(self, got: Tensor, rank: int, dtype: torch.dtype, wire: str, outer: float | None) -> float:
        """Worst error over bound."""
        if not got.numel():
            return 0.0
        x, logical, shares = self.tokens(rank, dtype)
        wide, step = x.double(), HALF_STEP[dtype]
        wanted = mixture(self.weights, range(EXPERTS), wide, logical, shares)
        error = wire_error(wide, wire, outer, step)
        bound = bounds(self.weights, wide, error, logical, shares, step, self.ranks.mesh.world)
        off = (got.double() - wanted).abs()
        return float(torch.where(off == 0, 0.0, off / bound).max())

    def run(self) -> dict[str, float]:
        """Worst error over bound by wire; nan where bits differ between dispatchers, repeats or ranks."""
        found: dict[str, float] = dict.fromkeys((*WIRES, ADDED), 0.0)
        for dtype in DTYPES:
            for wire in WIRES:
                if dtype is torch.float64 and wire != "model":
                    continue  # formats are of fp32 values
                outer = 0.02 if wire == WIRES[-1] else None
                name = wire.split(",")[0]
                results = [self.spread(way, dtype, name, outer) for way in (*DISPATCHERS, "all_to_all")]
                worst = self.ratio(results[0], self.ranks.rank, dtype, name, outer)
                is_same = all(torch.equal(each, results[0]) for each in results)
                found[wire] = max(found[wire], worst) if is_same else float("nan")
            rank = self.case.counts.index(max(self.case.counts))
            total = self.masked(self.ranks.all, dtype)
            others = self.ranks.all.all_gather(total)
            is_same = all(torch.equal(each, total) for each in others)
            worst = self.ratio(total, rank, dtype, "model", None)
            found[ADDED] = max(found[ADDED], worst) if is_same else float("nan")
        return found


def check(ranks: Ranks, seeds: Sequence[int]) -> dict[str, dict[str, float]]:
    """Of every case the worst of all ranks and seeds, by wire; the same on every rank."""
    table: dict[str, dict[str, float]] = {}
    for seed in seeds:
        weights = make_weights(seed)
        for case in cases(ranks.mesh.world, seed):
            everywhere = ranks.all.gather_objects(Bench(ranks, case, weights, seed).run())
            row = table.setdefault(case.name, {})
            for wire in (*WIRES, ADDED):
                values = [each[wire] for each in everywhere]
                row[wire] = worst_of([row.get(wire, 0.0), *values])
    return table


def worst_of(values: Sequence[float]) -> float:
    """The largest; nan if one is."""
    return float("nan") if any(value != value for value in values) else max(values)


def show(tables: dict[int, dict[str, dict[str, float]]]) -> bool:
    """Print a line for each case and way, a column for each world. Returns whether all are within their bounds."""
    print(f"{'':<26}{'':<32}" + "".join(f"{f'{world} ranks':>10}" for world in tables))
    is_good = True
    for case in dict.fromkeys(case for table in tables.values() for case in table):
        for wire in (*WIRES, ADDED):
            values = [table.get(case, {}).get(wire) for table in tables.values()]
            cells = ["" if v is None else "bits!" if v != v else f"{v:.3f}" for v in values]
            print(f"{case if wire == WIRES[0] else '':<26}{wire:<32}" + "".join(f"{c:>10}" for c in cells))
            is_good &= all(v is None or v <= 1 for v in values)
    print("worst error / bound; " + ("all within" if is_good else "NOT ALL WITHIN"))
    return is_good


def launch(worlds: Sequence[int], seeds: Sequence[int]) -> dict[int, dict[str, dict[str, float]]]:
    """The table of each world, from processes that torchrun starts."""
    tables = {}
    for world in worlds:
        began = time.perf_counter()
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(world), __file__]
        done = subprocess.run([*command, "--json", *map(str, seeds)], stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{world} ranks: torchrun ended with {done.returncode}")
        tables[world] = json.loads(done.stdout.splitlines()[-1])
        print(f"{world} ranks: {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("seeds", type=int, nargs="+")
    parser.add_argument("--launch", action="store_true", help="start torchrun for every world")
    parser.add_argument("--worlds", type=int, nargs="+", default=WORLDS, help="of --launch")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.launch:
        raise SystemExit(0 if show(launch(options.worlds, options.seeds)) else 1)
    ranks = Ranks(Mesh(dp=int(os.environ.get("WORLD_SIZE", "1"))))
    ranks.meet()
    table = check(ranks, options.seeds)
    if ranks.rank == 0 and options.json:
        print(json.dumps(table))
    elif ranks.rank == 0 and not show({ranks.mesh.world: table}):
        raise SystemExit(1)
    ranks.meet()
    ranks.close()


if __name__ == "__main__":
    main()
