"""Launches by the size of a step  ->  one chain of launches for steps of every size.

Kernels for few rows sum in another order than those for many: they split the context or the weights among more
programs. A token's logits then depend, in their last bits, on how many others share its step. The kernels for many
rows have one tile and one order, in which a row's sums depend on that row alone: alone they serve any number of rows,
a single one more slowly. Kernels of the cpp family are all of that kind.
"""

import re
from dataclasses import replace

from octavo.codegen.kernel import KernelSpec
from octavo.compiler.expression import holds

# A step of which every condition is clear: many requests of many tokens.
MANY = {"T": 2**20, "R": 2**8, "L": 2**20, "P": 2**8, "num_pages": 2**20, "N": 2**20}


def for_any_rows(spec: KernelSpec) -> KernelSpec:
    """Those of a node's launches that serve many rows, under no condition but that there is a row.

    Only L may be 0. The scratch of all launches stays that of the first.
    """
    kept = [launch for launch in spec.launches if holds(launch.when, MANY)]
    assert kept, f"{spec.name}: no launch serves many rows"
    always = [replace(one, when="L > 0" if re.search(r"\bL\b", one.when) else "", also=()) for one in kept]
    return replace(always[0], scratch=spec.scratch, also=tuple(always[1:]))
