"""A static model of a GPU kernel: what the target and the machine code say of its time, without running it.

Made for ranking forms of a kernel and for catching regressions. It was fitted to published figures of one device
(B200) and is within about 15 % of them for streams and matrix products; attention is up to twice as slow as it
says, as waits between the parts of a kernel are left out.

    time  = START + max(memory, matrix, copies, issue)
    floor = max(bytes / bandwidth, flops / rate of the tensor core)
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.compiler.errors import ArtifactError, OptionError
from octavo.compiler.expression import evaluate, holds
from octavo.compiler.target import Target

# Fitted to published times of matrix-vector products on B200: 4 us by themselves, from a cold cache. Inside a graph of
# launches that overlap, 1 to 2 us are an estimate.
START_ALONE_S = 4.0e-6
START_IN_GRAPH_S = 1.5e-6
# Share of the stated bandwidth that streams reach, from the same fit.
MEMORY_SHARE = 0.85
# From asking for a byte to having it in shared memory. With 8 TB/s and 148 multiprocessors: 48 KiB each in flight.
MEMORY_LATENCY_S = 0.9e-6
# Bytes that a multiprocessor takes from L2 in a clock. Why a 128 x 256 tile of FP4 ends near 5 PFLOP/s.
COPY_BYTES_PER_CLOCK = 64
# Instructions of a warp in a clock, on each of the four partitions of a multiprocessor (tables of Hopper; MUFU and
# shared memory are confirmed unchanged). One instruction of any pipe can be issued in a clock.
PARTITIONS = 4
PIPE_RATE = {
    "fma": 1.0, "alu": 0.5, "cvt": 0.5, "uniform": 0.5, "lsu": 0.25, "mufu": 0.125, "mma": 0.125, "tmem": 0.125,
    "control": 1.0,
}  # fmt: skip
SLOW_CONVERSION_RATE = 0.125  # F2F, which packed conversions avoid
REGISTER_UNIT = 256  # registers are handed to a warp in such pieces
SHARED_RESERVED = 1024  # bytes of shared memory that every program costs besides its own
THREADS_PER_PROGRAM = 64  # a multiprocessor holds a program for each so many threads that it can hold

_NEEDED = (
    "sm_count", "clock_mhz", "hbm_bytes_per_s", "smem_bytes", "registers_per_sm", "threads_per_sm",
)  # fmt: skip


@dataclass(frozen=True)
class Figures:
    """What is known of a built kernel.

    num_warps    of a program as launched; own_warps: without those that warp specialisation added
    num_stages   tiles in flight and in use
    rate         name of the target's FLOP rate that serves it: "nvfp4", "fp8", "bf16", "fp32"
    turn_bytes   bytes that a turn of the innermost loop brings into shared memory; 0 where unknown
    turn_flops   operations of the tensor core in a turn, padding included; 0 where unknown
    body, loops  pipe -> instructions of the whole machine code, and of each innermost loop
    bytes, flops, iterations, tiles, grid are expressions in the step's sizes; iterations and tiles may be empty
    """

    registers: int
    num_warps: int
    own_warps: int
    num_stages: int
    shared_bytes: int
    tmem_columns: int
    rate: str
    turn_bytes: int
    turn_flops: int
    body: Mapping[str, int]
    loops: Sequence[Mapping[str, Any]]
    bytes: str
    flops: str
    iterations: str
    tiles: str
    grid: tuple[str, ...]
    when: str = ""


@dataclass(frozen=True)
class Occupancy:
    """Programs that a multiprocessor holds at once, and what does not let it hold more."""

    programs: int
    limit: str


@dataclass(frozen=True)
class Estimate:
    """A launch at one point. Times in seconds.

    bound      the greatest part of the time: start (of the launch), memory, "in flight" (too few bytes asked for
               at once), matrix, copies (into shared memory) or issue (of instructions)
    in_flight  bytes on their way into a multiprocessor; 0 where nothing is loaded ahead
    """

    programs: int
    bytes: int
    flops: int
    in_flight: int
    floor_s: float
    predicted_s: float
    bound: str

    @property
    def intensity(self) -> float:
        """Operations for each byte of memory."""
        return self.flops / self.bytes if self.bytes else 0.0

    @property
    def fraction(self) -> float:
        """How much of the predicted time the floor is."""
        return self.floor_s / self.predicted_s


@dataclass(frozen=True)
class Point:
    """Sizes of a step. S: context tokens of all requests, P: columns of the page table."""

    label: str
    dims: Mapping[str, int]


def decode_point(requests: int, context: int, page_size: int) -> Point:
    """A token for each request, each with a context of so many tokens."""
    pages = -(-context // page_size)
    label = f"decode {requests} at {_thousands(context)}"
    return Point(label, step_dims(requests, requests, requests, requests * context, pages))


def prefill_point(tokens: int, page_size: int) -> Point:
    """One request with a prompt of so many tokens."""
    return Point(f"prefill {_thousands(tokens)}", step_dims(tokens, 1, 1, tokens, -(-tokens // page_size)))


def step_dims(tokens: int, requests: int, logit_rows: int, context: int, pages: int) -> dict[str, int]:
    return {
        "T": tokens, "R": requests, "L": logit_rows, "S": context, "P": pages, "num_pages": requests * pages,
        "N": tokens,
    }  # fmt: skip


def default_points(page_size: int) -> tuple[Point, ...]:
    """Decode of 1, 16 and 64 requests at 1K and 8K of context, prefill of 512 and 4096 tokens."""
    decode = [decode_point(n, context, page_size) for context in (1024, 8192) for n in (1, 16, 64)]
    return (*decode, *(prefill_point(tokens, page_size) for tokens in (512, 4096)))


def _thousands(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else str(count)


def figures_of(record: Mapping[str, Any], where: str) -> Figures:
    """The figures in a kernel's metadata. Raises ArtifactError for metadata of an older version."""
    try:
        launch, evidence, work = record["launch"], record["evidence"], record["work"]
        return Figures(
            registers=evidence["registers"], num_warps=launch["num_warps"], own_warps=work["num_warps"],
            num_stages=work["num_stages"], shared_bytes=launch["shared_bytes"],
            tmem_columns=launch["tmem_columns"], rate=work["rate"], turn_bytes=work["turn_bytes"],
            turn_flops=work["turn_flops"], body=evidence["pipes"], loops=evidence["loops"],
            bytes=work["bytes"], flops=work["flops"], iterations=work["iterations"], tiles=work["tiles"],
            grid=tuple(work["grid"]), when=work["when"],
        )  # fmt: skip
    except (KeyError, TypeError) as error:
        raise ArtifactError(
            f"{where}: expected a kernel's work and loops, got none of {error}; compile the model again"
        ) from None


def check_target(target: Target) -> None:
    """Raises OptionError for a target whose file lacks a figure that the model needs."""
    missing = [name for name in _NEEDED if getattr(target, name) is None]
    if missing or not target.flops:
        names = ", ".join(missing + ["flops"] * (not target.flops))
        raise OptionError(
            f"target: {target.name} states no {names}, of which the times of its kernels are made; add them to "
            f"compiler/targets/{target.name}.toml or choose a GPU"
        )


def occupancy(figures: Figures, target: Target) -> Occupancy:
    """How many programs of a kernel fit on a multiprocessor. Of equal limits, the first in this order is named."""
    check_target(target)
    assert target.registers_per_sm and target.smem_bytes and target.threads_per_sm
    of_warp = -(-figures.registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    room = target.smem_bytes + SHARED_RESERVED
    limits = {
        "registers": target.registers_per_sm // max(of_warp * figures.num_warps, 1),
        "shared memory": room // (figures.shared_bytes + SHARED_RESERVED),
        "warps": target.threads_per_sm // 32 // figures.num_warps,
        "programs": target.threads_per_sm // THREADS_PER_PROGRAM,
    }
    if figures.tmem_columns:
        limits["tensor memory"] = (target.tmem_columns or 0) // figures.tmem_columns
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limit], limit)


def is_launched(figures: Figures, dims: Mapping[str, int]) -> bool:
    return holds(figures.when, dims)


def estimate(
    figures: Figures, target: Target, dims: Mapping[str, int], start_s: float = START_IN_GRAPH_S
) -> Estimate:
    """Time of one launch at the sizes `dims`, from its floor and from what the machine code can sustain."""
    fit = occupancy(figures, target)
    assert target.sm_count and target.clock_mhz and target.hbm_bytes_per_s
    if figures.rate not in target.flops:
        raise OptionError(
            f"target: {target.name} states no FLOP rate for {figures.rate}, got {', '.join(target.flops)}"
        )
    programs = math.prod(evaluate(size, dims) for size in figures.grid)
    num_bytes, flops = evaluate(figures.bytes, dims), evaluate(figures.flops, dims)
    tiles = evaluate(figures.tiles, dims) if figures.tiles else programs
    turns = evaluate(figures.iterations, dims) if figures.iterations else 0
    resident = min(programs, fit.programs * target.sm_count)
    in_flight = figures.turn_bytes * max(figures.num_stages - 1, 0)
    # tiles that do not divide evenly leave multiprocessors idle in the last round
    busy = tiles / -(-tiles // target.sm_count) if tiles else 1.0
    clocks = busy * target.clock_mhz * 1e6
    rate = target.flops[figures.rate]
    parts = {
        "memory": num_bytes / (MEMORY_SHARE * target.hbm_bytes_per_s),
        "in flight": num_bytes * MEMORY_LATENCY_S / (in_flight * resident) if in_flight and resident else 0.0,
        "matrix": max(flops, turns * figures.turn_flops) / rate * target.sm_count / busy,
        "copies": turns * figures.turn_bytes / COPY_BYTES_PER_CLOCK / clocks,
        "issue": issue_clocks(figures, tiles, turns) / clocks,
    }
    bound = max(parts, key=lambda name: parts[name])
    floor = max(num_bytes / target.hbm_bytes_per_s, flops / rate)
    on_each = -(-resident // target.sm_count) * in_flight
    shown = "start" if parts[bound] < start_s else bound
    return Estimate(programs, num_bytes, flops, on_each, floor, start_s + parts[bound], shown)


def issue_clocks(figures: Figures, tiles: int, turns: int) -> float:
    """Clocks of all multiprocessors together for the instructions of a launch: those of the busiest pipe.

    The loop of a plain kernel takes `turns` turns, the rest of the body is executed once for each tile. The parts
    of a warp-specialised kernel are loops that run side by side: one warp loads, one starts the tensor core,
    the others have the program's own warps, and take a turn for each tile where they store.
    """
    if figures.num_warps > figures.own_warps:
        loads = [
            (loop, tiles if _has(loop, "UTMASTG", "STG") else turns, _warps(loop, figures))
            for loop in figures.loops
        ]
        return _clocks([(_busy(loop), count * warps) for loop, count, warps in loads])
    hot = max(figures.loops, key=_heat, default=None)
    if hot is None:
        return _clocks([(figures.body, tiles * figures.own_warps)])
    rest = {pipe: count - hot["pipes"].get(pipe, 0) for pipe, count in figures.body.items()}
    return _clocks([(_busy(hot), turns * figures.own_warps), (rest, tiles * figures.own_warps)])


def _heat(loop: Mapping[str, Any]) -> tuple[int, int]:
    """The loop with products is the hot one, else the longest."""
    return int(loop["pipes"].get("mma", 0) > 0), loop["instructions"]


def _warps(loop: Mapping[str, Any], figures: Figures) -> int:
    return 1 if "mma" in loop["pipes"] or _has(loop, "UTMALDG") else figures.own_warps


def _has(loop: Mapping[str, Any], *opcodes: str) -> bool:
    return any(name.split(".", 1)[0] in opcodes for name in loop["opcodes"])


def _busy(loop: Mapping[str, Any]) -> dict[str, int]:
    """Instructions by pipe, the slow conversions by themselves."""
    slow = sum(count for name, count in loop["opcodes"].items() if name.split(".", 1)[0] == "F2F")
    pipes = dict(loop["pipes"])
    return {**pipes, "cvt": pipes.get("cvt", 0) - slow, "F2F": slow} if slow else pipes


def _clocks(runs: Sequence[tuple[Mapping[str, int], int]]) -> float:
    """Clocks of the busiest pipe, issue included, for (instructions by pipe, times that a warp executes them)."""
    spent = dict.fromkeys((*PIPE_RATE, "F2F", "issue"), 0.0)
    for pipes, times in runs:
        for pipe, count in pipes.items():
            spent[pipe] += count * times / PIPE_RATE.get(pipe, SLOW_CONVERSION_RATE)
            spent["issue"] += count * times
    return max(spent.values()) / PARTITIONS


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
