"""The command of `octavo` that places experts by their loads."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.compiler.cli_app import Json, Trace, exit_codes, starting
from octavo.compiler.options import parallel_of


def balance(
    loads: Annotated[
        Path, typer.Argument(metavar="LOADS", help="A .npy of (layers, experts): ModelRunner.expert_loads.")
    ],
    parallel: Annotated[
        str,
        typer.Option(metavar="SIZES", help="ep=N,dp=N,tp=N,redundant_experts=N, as for `octavo compile`."),
    ],
    nodes: Annotated[
        int, typer.Option(help="Ranks lie in so many nodes; a group of experts stays within one.")
    ] = 1,
    groups: Annotated[int, typer.Option(help="Groups of experts that the router chooses by.")] = 1,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the placement as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw loads of ranks: .svg or .png.")
    ] = None,
    as_json: Json = False,
    traceback: Trace = False,
) -> None:
    """Place the experts of every layer on ranks, by what each had to do; replicate the most loaded.

    Example: octavo balance loads.npy --parallel ep=32,dp=32,redundant_experts=32 -o placement.json

    Balance is the mean load of ranks over the largest: 1 is best. Without dp one rank answers for an expert, so
    redundant ones take no load off it. ModelRunner.place_experts takes the placements, while a model serves.
    """
    with exit_codes(traceback), starting():
        from octavo.compiler.commands.balance import run
    with exit_codes(traceback):
        run(loads, parallel_of(parallel), nodes, groups, output, plot, as_json)
