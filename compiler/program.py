"""The launch program of an artifact: buffers, kernels in order, sizes as expressions. Plain data, no torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from octavo.compiler.mesh import ONE_RANK, Mesh

Dim = int | str
BufferKind = Literal["input", "weight", "cache", "workspace", "output"]

# fp8 is E4M3; u8 holds two E2M1 codes, the first in the low nibble.
ITEM_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1, "u8": 1, "i32": 4, "i64": 8}

# The symbolic sizes of a step. T tokens, R requests, L rows whose logits are wanted, P page-table columns;
# num_pages is chosen when the pool is made; N tokens of all ranks that share experts by all-to-all.
DIMS = ("T", "R", "L", "P", "num_pages", "N")

# Of each token of a step, which of its request's tokens in it are seen.
TREE = "tree"

# What the runtime fills in for every step: dtype and shape.
STEP_INPUTS: dict[str, tuple[str, tuple[Dim, ...]]] = {
    "input_ids": ("i64", ("T",)),
    "positions": ("i64", ("T",)),
    "slot_mapping": ("i64", ("T",)),
    "page_table": ("i32", ("R", "P")),
    "seq_lens": ("i32", ("R",)),
    "cu_seqlens_q": ("i32", ("R + 1",)),
    "logit_rows": ("i64", ("L",)),
    "row_ranks": ("i64", ("N",)),
    TREE: ("i64", ("T",)),
}
# What a draft head reads of its target for every token, (T, F): dtype and F are the program's own. What it, or a
# target, makes of them are the outputs behind the logits: features_0, features_1, ...
FEATURES = "features"
# Of each collective how many buffers it reads and fills, and the types of its options.
COLLECTIVES: Mapping[str, tuple[int, tuple[type, ...]]] = {
    "all_reduce": (2, ()), "all_gather": (2, (int, int)), "reduce_scatter": (2, (int, int)),
    "dispatch": (9, (int, str)), "arrived": (4, ()), "combine": (4, (int,)),
}  # fmt: skip
# Page groups from the second on have tables of their own: page_table_1, slot_mapping_1, ...
_OF_GROUP = re.compile(r"(page_table|slot_mapping)_([1-9][0-9]{0,4})")


def input_and_group(name: str) -> tuple[str, int]:
    """The name in STEP_INPUTS, and the page group: "page_table_2" is ("page_table", 2)."""
    found = _OF_GROUP.fullmatch(name)
    return (found[1], int(found[2])) if found else (name, 0)


def step_input(name: str) -> tuple[str, tuple[Dim, ...]] | None:
    """Dtype and shape of what the runtime fills in under this name; None: nothing."""
    return STEP_INPUTS.get(input_and_group(name)[0])


@dataclass(frozen=True)
class Buffer:
    """A piece of memory that steps read or write.

    dtype   a name of ITEM_BYTES
    shape   ints, or expressions in DIMS
    offset  workspace only: bytes from its start, an expression in DIMS
    """

    name: str
    kind: BufferKind
    dtype: str
    shape: tuple[Dim, ...]
    offset: Dim | None = None


@dataclass(frozen=True)
class Step:
    """One kernel launch: arguments are buffer names (pointers) or expressions and numbers (scalars), in call order.

    when  condition in DIMS under which the launch happens; empty means always
    axis  of a collective, the mesh axis whose ranks take part: `kernel` is then one of COLLECTIVES, args are the
          buffers that it reads and then those that it fills ("" for an input that there is not), options its other
          arguments
    """

    kernel: str
    args: tuple[str | int | float, ...]
    grid: tuple[Dim, Dim, Dim] = (1, 1, 1)
    when: str = ""
    axis: str = ""
    options: tuple[int | str, ...] = ()


@dataclass(frozen=True)
class Shard:
    """What each rank holds of a weight: ranges [start, stop) of axis `dim`, in order; pieces[rank]."""

    dim: int
    pieces: tuple[tuple[tuple[int, int], ...], ...]

    def length(self, rank: int) -> int:
        return sum(stop - start for start, stop in self.pieces[rank])


@dataclass(frozen=True)
class ExpertLayer:
    """A mixture whose experts are spread over ranks: its weights, by experts, and the table that finds them.

    table    weight (ranks * experts,) i64, of which each rank has its part: where a rank that asks finds each expert
    weights  those with an axis of experts in front
    """

    table: str
    weights: tuple[str, ...]


@dataclass(frozen=True)
class Program:
    """What runs in one step, in order.

    workspace     bytes of scratch memory, an expression in DIMS
    page_size     tokens per KV page
    page_windows  of each page group, how many keys a query of its layers sees, itself included; None: all
    mesh          of the ranks that run the program, each on other pieces of the weights
    shards        of weights that ranks hold pieces of: buffers have the shape of a piece, the artifact has all
    experts       of each mixture that is spread over ranks, in the order of the layers
    """

    buffers: tuple[Buffer, ...]
    steps: tuple[Step, ...]
    workspace: Dim
    page_size: int
    page_windows: tuple[int | None, ...] = (None,)
    mesh: Mesh = ONE_RANK
    shards: Mapping[str, Shard] = field(default_factory=dict)
    experts: tuple[ExpertLayer, ...] = ()

    @property
    def segments(self) -> tuple[tuple[Step, ...], ...]:
        """The launches before, between and behind the collectives; one more than there are of these."""
        segments: list[list[Step]] = [[]]
        for step in self.steps:
            if step.axis:
                segments.append([])
            else:
                segments[-1].append(step)
        return tuple(map(tuple, segments))

    @property
    def logits(self) -> Buffer:
        return self.of_kind("output")[0]

    @property
    def hidden_states(self) -> tuple[Buffer, ...]:
        """The outputs (T, width) behind the logits, in the order that was asked for."""
        return self.of_kind("output")[1:]

    @property
    def collectives(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.axis)

    def of_kind(self, kind: BufferKind) -> tuple[Buffer, ...]:
        return tuple(b for b in self.buffers if b.kind == kind)
