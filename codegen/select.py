"""op node + target -> KernelSpec: the only place that chooses. Rows are tried in order, the first wins."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import fx

from octavo.codegen import (
    mla_cpp,
    mla_rows_triton,
    moe_cpp,
    pages_cpp,
    pages_triton,
    quantized_cpp,
    quantized_moe_cpp,
    quantized_moe_rows_triton,
    quantized_rows_triton,
    rows_cpp,
    rows_triton,
)
from octavo.codegen.kernel import KernelSpec
from octavo.codegen.row import Row, op_name
from octavo.compiler.errors import CodegenError
from octavo.compiler.origin import where
from octavo.compiler.target import Family, Target

TABLE: dict[Family, tuple[Row, ...]] = {
    "cpp": rows_cpp.ROWS
    + pages_cpp.ROWS
    + moe_cpp.ROWS
    + mla_cpp.ROWS
    + quantized_cpp.ROWS
    + quantized_moe_cpp.ROWS,
    "triton": rows_triton.ROWS
    + pages_triton.ROWS
    + mla_rows_triton.ROWS
    + quantized_rows_triton.ROWS
    + quantized_moe_rows_triton.ROWS,
}


@dataclass(frozen=True)
class Selection:
    """What was chosen for a node.

    skipped  (row, why it was not taken) for the rows tried before
    """

    row: str
    spec: KernelSpec
    skipped: tuple[tuple[str, str], ...] = ()


def select(node: fx.Node, target: Target, rows: Mapping[Family, tuple[Row, ...]] = TABLE) -> Selection:
    """The first row of the target's family that serves the node.

    Raises CodegenError if none does, with each row's reason.
    """
    op = op_name(node)
    skipped: list[tuple[str, str]] = []
    for row in rows.get(target.family, ()):
        if row.op != op:
            continue
        reason = row.reject(node, target)
        if reason is None:
            return Selection(row.name, row.spec(node, target), tuple(skipped))
        skipped.append((row.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    raise CodegenError(
        f"select: no {target.name} kernel for {op or node.target} ({where(node)}): "
        f"{reasons or f'no row of the {target.family} table has that op'}"
    )
