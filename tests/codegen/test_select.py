"""Selection: the first row that serves a node wins, and the others say why not."""

import pytest
import torch
from lowered import LoweredGraph
from torch import fx

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.row import Row, op_name
from octavo.codegen.select import TABLE, select
from octavo.compiler.errors import CodegenError
from octavo.compiler.legality import named_arguments
from octavo.compiler.ops import OPS
from octavo.compiler.origin import where
from octavo.compiler.program import COLLECTIVES
from octavo.compiler.target import load_target

CPU = load_target("cpu")


def spec_named(name: str) -> KernelSpec:
    return KernelSpec("rms_norm", f"cpp/{name}.cpp.jinja", (), ())


def row(name: str, reason: str | None = None, op: str = "rms_norm") -> Row:
    return Row(name, op, lambda node, target: reason, lambda node, target: spec_named(name))


@pytest.fixture
def node() -> fx.Node:
    graph = LoweredGraph()
    graph.input("input_ids")
    x = graph.tokens("x", (32,), torch.float32)
    return graph.call("rms_norm", x, graph.weight("w", torch.zeros(32)), 1e-5)


def test_first_row_that_fits_wins(node: fx.Node) -> None:
    rows = (
        row("other", op="linear"),
        row("wide", "hidden is 32, not a multiple of 64"),
        row("plain"),
        row("later"),
    )
    selection = select(node, CPU, {"cpp": rows})
    assert (selection.row, selection.spec) == ("plain", spec_named("plain"))
    assert selection.skipped == (("wide", "hidden is 32, not a multiple of 64"),)


def test_no_row_names_node_module_and_reasons(node: fx.Node) -> None:
    node.meta["nn_module_stack"] = {
        "L0": ("model.layers.0", "Layer"),
        "L1": ("model.layers.0.norm", "RMSNorm"),
    }
    node.meta["stack_trace"] = '  File "modeling.py", line 212, in forward\n    return self.norm(x)'
    with pytest.raises(CodegenError) as error:
        select(node, CPU, {"cpp": (row("wide", "hidden is 32"), row("tall", "hidden is not 7"))})
    assert str(error.value) == (
        f"select: no cpu kernel for rms_norm (node {node.name}, model.layers.0.norm, "
        "modeling.py:212): wide: hidden is 32; tall: hidden is not 7"
    )
    with pytest.raises(CodegenError, match="no row of the cpp table has that op"):
        select(node, CPU, {})


def test_arguments_have_names_and_defaults(node: fx.Node) -> None:
    given = named_arguments(node)
    assert list(given) == ["x", "weight", "eps", "offset"]
    assert (given["eps"], given["offset"]) == (1e-5, 0.0)
    assert op_name(node) == "rms_norm" and op_name(given["x"]) is None
    assert where(given["x"]) == "node x"


@pytest.mark.parametrize("family", ["cpp", "triton"])
def test_every_family_serves_every_lowered_op(family: str) -> None:
    replaced = {"attention", "gated_mlp", "mla_attention", "latent_attention"}
    lowered = {op.name for op in OPS} - replaced - set(COLLECTIVES)
    assert {row.op for row in TABLE[family]} == lowered  # type: ignore[index]
