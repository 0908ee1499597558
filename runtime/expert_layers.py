"""Experts that are spread over ranks: how many tokens each got, and which pieces of the weights a rank holds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.compiler.artifact import Artifact
from octavo.compiler.errors import ExecutionError
from octavo.compiler.expert_placement import ExpertPlacement, expert_tables
from octavo.compiler.program import Program

MAP_EXPERTS = (
    "map_experts"  # kernels' names begin with it; they read ids and a table, and write the ids' numbers
)


class ExpertLoads:
    """Counts the tokens that a rank answers for, by layer and logical expert: those of all ranks are all tokens.

    counts  (layers, E) i64, where layers differ padded with zeros
    """

    def __init__(self, program: Program) -> None:
        sizes = {buffer.name: buffer.shape[0] for buffer in program.of_kind("weight")}
        tables = {layer.table: place for place, layer in enumerate(program.experts)}
        self.counts = np.zeros((len(tables), max((int(sizes[t]) for t in tables), default=0)), np.int64)
        # By segment: (layer, table, the numbers that experts of tokens have by it).
        self._numbers: dict[int, list[tuple[int, str, str]]] = {}
        for segment, steps in enumerate(program.segments):
            for step in steps:
                if step.kernel.startswith(MAP_EXPERTS):
                    _, table, numbers = map(str, step.args[:3])
                    self._numbers.setdefault(segment, []).append((tables[table], table, numbers))

    def see(self, segment: int, read: Callable[[str], NDArray[Any]]) -> None:
        """Count what a segment that has just run made of the experts of tokens. read: a buffer by its name."""
        for layer, table, numbers in self._numbers.get(segment, ()):
            places, found = read(table), read(numbers).reshape(-1)
            here = np.flatnonzero(places >= 0)
            tokens = np.bincount(found[found >= 0], minlength=int(places.max(initial=0)) + 1)
            self.counts[layer, here] += tokens[places[here]]


class CountsExperts:
    """Of a runner of a rank: the tokens that its experts get, counted where that is asked."""

    program: Program
    _loads: ExpertLoads | None = None

    def count_experts(self, is_on: bool = True) -> None:
        """Count from now on how many tokens each expert gets, or stop."""
        self._loads = ExpertLoads(self.program) if is_on else None

    def expert_loads(self) -> NDArray[np.int64]:
        """Tokens of each layer's experts since count_experts (layers, E), as this rank answers for them."""
        if self._loads is None:
            raise ExecutionError("expert_loads: expected count_experts before the steps, got none")
        return self._loads.counts.copy()


def placed_weights(
    artifact: Artifact, rank: int, placements: Sequence[ExpertPlacement], loads: NDArray[Any] | None
) -> dict[str, NDArray[Any]]:
    """What a rank holds of the experts' weights, and its tables, where experts lie as `placements` say, by layer.

    loads  (layers, E), by which ranks share the tokens of an expert that several hold; None: equally
    Raises ExecutionError for a placement that the program has no room for.
    """
    program = artifact.program
    if len(placements) != len(program.experts):
        raise ExecutionError(
            f"placement: expected one for each of {len(program.experts)} layers of experts, got {len(placements)}"
        )
    shapes = {buffer.name: buffer.shape for buffer in program.of_kind("weight")}
    found: dict[str, NDArray[Any]] = {}
    for number, (layer, placement) in enumerate(zip(program.experts, placements, strict=True)):
        (num_experts,), room = shapes[layer.table], shapes[layer.weights[0]][0]
        expected = (program.mesh.world, num_experts, room)
        got = (placement.num_ranks, placement.num_experts, placement.num_local)
        if got != expected:
            raise ExecutionError(
                f"placement of layer {number}: expected one of {expected[1]} experts over {expected[0]} ranks with "
                f"{expected[2]} on the fullest, as compiled, got {got[1]}, {got[0]} and {got[2]}"
            )
        shares = () if loads is None else loads[number, : placement.num_experts].tolist()
        found[layer.table] = np.array(expert_tables(placement, program.mesh, shares)[rank], np.int64)
        for name in layer.weights:
            whole = artifact.weights[name].array
            found[name] = np.concatenate([whole[start:stop] for start, stop in placement.pieces(rank)])
    return found
