"""`octavo targets`: the machines of compiler/targets."""

import json
from dataclasses import asdict

from rich.console import Console

from octavo.compiler.device_target import automatic_target
from octavo.compiler.report import plain_table, size_text
from octavo.compiler.target import load_target, target_names

FAMILIES = {"cpp": "C++", "triton": "Triton"}


def show_targets(as_json: bool) -> None:
    """A line for each; "-" where a figure depends on the machine. Below it, which one "auto" takes here, and why."""
    known = [load_target(name) for name in target_names()]
    automatic = automatic_target()
    if as_json:
        rows = [
            {**asdict(target), "flops": dict(target.flops), "is_auto": target == automatic.target}
            for target in known
        ]
        print(json.dumps(rows, indent=1))
        return
    table = plain_table("name", "kernels", "arch", "page", "SMs", "memory", "TB/s", left=("name", "kernels"))
    for target in known:
        memory = None if target.hbm_bytes is None else size_text(target.hbm_bytes)
        rate = None if target.hbm_bytes_per_s is None else f"{target.hbm_bytes_per_s / 1e12:.1f}"
        figures = (target.arch and f"sm_{target.arch}", target.page_size, target.sm_count, memory, rate)
        table.add_row(target.name, FAMILIES[target.family], *("-" if f is None else str(f) for f in figures))
    Console(highlight=False).print(table)
    print(f"\nauto: {automatic.target.name}, as {automatic.reason}")
