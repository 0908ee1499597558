"""Any course of events in paged memory, compared with a model of what every page must hold; the first error ends it.

python benchmarks/fuzz_pages.py --operations 1000000 --seed 0
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from octavo.compiler.progress import Report, progress_bars

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from page_world import OPERATIONS, play

OPERATIONS_PER_WORLD = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000, help="default: a million")
    parser.add_argument("--seed", type=int, default=0, help="of the first world of a thousand (default: 0)")
    options = parser.parse_args()
    began = time.perf_counter()
    with progress_bars() as bars:
        counts = run(options.operations, options.seed, bars("operations"))
    seconds = time.perf_counter() - began
    for name in OPERATIONS:
        print(f"{name:<14}{counts.pop(name):>10,}")
    print(", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    print(
        f"{options.operations:,} operations in {seconds:.0f} s: {options.operations / seconds:,.0f} a second"
    )


def run(operations: int, seed: int, report: Report) -> Counter[str]:
    """What happened how often. A world that fails says its seed."""
    counts: Counter[str] = Counter()
    for done in range(0, operations, OPERATIONS_PER_WORLD):
        report("operations", done, operations)
        world = seed + done // OPERATIONS_PER_WORLD
        try:
            counts += play(world, min(OPERATIONS_PER_WORLD, operations - done)).counts
        except Exception as error:
            error.add_note(f"page_world.play({world}, {OPERATIONS_PER_WORLD})")
            raise
    return counts


if __name__ == "__main__":
    main()
