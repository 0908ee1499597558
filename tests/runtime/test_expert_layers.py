"""Loads of experts, counted from what map_experts wrote, and pieces of weights for other placements."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from octavo.compiler.errors import ExecutionError
from octavo.compiler.expert_placement import ExpertPlacement, contiguous_placement, expert_tables
from octavo.compiler.mesh import Mesh
from octavo.compiler.program import Buffer, ExpertLayer, Program, Step
from octavo.runtime.expert_layers import ExpertLoads, placed_weights

EXPERTS, LAYERS = 5, 2


def program(mesh: Mesh, room: int) -> Program:
    """A table and a weight for each layer; the second layer's numbers come in a later segment."""
    buffers = [
        buffer
        for i in range(LAYERS)
        for buffer in (
            Buffer(f"table{i}", "weight", "i64", (EXPERTS,)),
            Buffer(f"up{i}", "weight", "fp32", (room, 2)),
        )
    ]
    steps = (
        Step("map_experts__e5", ("experts", "table0", "numbers0", "T * 2")),
        Step("all_reduce", ("a", "b"), axis="ep"),
        Step("map_experts__e5", ("experts", "table1", "numbers1", "T * 2")),
        Step("all_reduce", ("a", "b"), axis="ep"),
    )
    layers = tuple(ExpertLayer(f"table{i}", (f"up{i}",)) for i in range(LAYERS))
    return Program(tuple(buffers), steps, 0, 4, mesh=mesh, experts=layers)


@pytest.mark.parametrize("mesh", [Mesh(ep=3), Mesh(dp=3), Mesh(dp=2, ep=2)])
def test_loads_of_all_ranks_are_all_tokens(mesh: Mesh) -> None:
    placement = contiguous_placement(EXPERTS, mesh.world, 2)
    tables = expert_tables(placement, mesh)
    rng = np.random.default_rng(mesh.world)
    routed = [rng.integers(-1, EXPERTS, (LAYERS, 7, 2)) for _ in range(mesh.dp)]  # by dp coordinate
    total = np.zeros((LAYERS, EXPERTS), np.int64)
    for rank in range(mesh.world):
        loads = ExpertLoads(program(mesh, placement.num_local))
        own = routed[mesh.coordinates(rank)["dp"]]
        table = np.array(tables[rank])

        def read(name: str, own: NDArray[Any] = own, table: NDArray[Any] = table) -> NDArray[Any]:
            if name.startswith("table"):
                return table
            experts = own[int(name[-1])]
            return np.where(experts < 0, -1, table[experts])

        loads.see(0, read)
        loads.see(1, read)
        loads.see(2, read)
        total += loads.counts
    for layer in range(LAYERS):
        experts = np.concatenate([each[layer].reshape(-1) for each in routed])
        assert total[layer].tolist() == [int((experts == e).sum()) for e in range(EXPERTS)]


def test_pieces_and_tables_of_another_placement() -> None:
    mesh = Mesh(dp=2)
    placement = ExpertPlacement(((0, 3, 4), (1, 2, 3)))
    whole = {
        f"up{i}": np.arange(EXPERTS * 2, dtype=np.float32).reshape(EXPERTS, 2) + 100 * i
        for i in range(LAYERS)
    }
    artifact: Any = SimpleNamespace(
        program=program(mesh, 3),
        weights={name: SimpleNamespace(array=array) for name, array in whole.items()},
    )
    for rank, held in enumerate(placement.experts):
        found = placed_weights(artifact, rank, [placement, placement], None)
        for i in range(LAYERS):
            assert np.array_equal(found[f"up{i}"], whole[f"up{i}"][list(held)])
            assert found[f"table{i}"].tolist() == list(expert_tables(placement, mesh)[rank])
    with pytest.raises(ExecutionError, match="expected one for each of 2 layers of experts, got 1"):
        placed_weights(artifact, 0, [placement], None)
    with pytest.raises(
        ExecutionError, match=r"layer 1: .* with 3 on the fullest, as compiled, got 5, 2 and 4"
    ):
        placed_weights(artifact, 0, [placement, ExpertPlacement(((0, 1, 2, 3), (4,)))], None)
