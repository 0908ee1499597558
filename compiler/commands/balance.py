"""`octavo balance`: loads of experts -> a placement, and how even ranks are before and after."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from octavo.compiler.errors import OptionError
from octavo.compiler.expert_placement import (
    ExpertPlacement,
    balanced_placement,
    balancedness,
    contiguous_placement,
    placements_to_json,
    rank_loads,
)
from octavo.compiler.load_plot import draw_rank_loads
from octavo.compiler.options import Parallel
from octavo.compiler.report import plain_table, titled


@dataclass(frozen=True)
class Layer:
    """Of one MoE layer what every rank has to do, with experts in order and as they are placed now."""

    before: list[float]
    after: list[float]
    placement: ExpertPlacement


def run(
    loads: Path,
    parallel: Parallel,
    nodes: int,
    groups: int,
    output: Path | None,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Print the table; write placement and picture where they are asked for."""
    if parallel.ep < 2 or parallel.mesh.world != parallel.ep:
        raise OptionError(
            "parallel: expected ep of 2 or more and a multiple of dp * tp, as experts are on all ranks, got "
            f"ep {parallel.ep}, dp {parallel.dp}, tp {parallel.tp}"
        )
    layers = [place(row.tolist(), parallel, nodes, groups) for row in read_loads(loads)]
    try:
        if output is not None:
            output.write_text(placements_to_json([layer.placement for layer in layers]))
        if plot is not None:
            draw_rank_loads(plot, [layer.before for layer in layers], [layer.after for layer in layers])
    except OSError as error:
        raise OptionError(f"output: expected a file that can be written, got {error}") from None
    if as_json:
        rows = [
            {"before": one.before, "after": one.after, "experts": one.placement.experts} for one in layers
        ]
        print(json.dumps(rows))
    else:
        show(layers)


def read_loads(path: Path) -> NDArray[np.float64]:
    """(layers, experts). Raises OptionError for another file or shape."""
    try:
        loads = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise OptionError(f"loads: expected a .npy file, got {path}: {error}") from None
    if (
        not isinstance(loads, np.ndarray)
        or loads.ndim != 2
        or loads.dtype.kind not in "iuf"
        or not loads.size
    ):
        got = f"{loads.dtype} {loads.shape}" if isinstance(loads, np.ndarray) else "several arrays"
        raise OptionError(f"loads: expected numbers of (layers, experts) in {path}, got {got}")
    return loads.astype(np.float64)


def place(loads: list[float], parallel: Parallel, nodes: int, groups: int) -> Layer:
    mesh = parallel.mesh
    plain = contiguous_placement(len(loads), mesh.world)
    placed = balanced_placement(loads, mesh.world, parallel.redundant_experts, nodes, groups)
    return Layer(rank_loads(plain, mesh, loads), rank_loads(placed, mesh, loads), placed)


def show(layers: Sequence[Layer]) -> None:
    """A row a layer: the mean load of ranks, the largest before and after, and balance."""
    table = plain_table("layer", "mean", "largest", "placed", "balance", "placed", "experts a rank")
    for number, layer in enumerate(layers):
        both = (layer.before, layer.after)
        table.add_row(
            str(number), f"{sum(layer.before) / len(layer.before):,.0f}", *(f"{max(one):,.0f}" for one in both),
            *(f"{balancedness(one):.3f}" for one in both), str(layer.placement.num_local),
        )  # fmt: skip
    before, after = (
        np.mean([balancedness(one) for one in loads])
        for loads in ([x.before for x in layers], [x.after for x in layers])
    )
    console = Console(highlight=False)
    console.print(
        titled(f"loads of {layers[0].placement.num_ranks} ranks, experts in order and placed", table)
    )
    console.print(f"balance of {len(layers)} layers: {before:.3f} -> {after:.3f}")
