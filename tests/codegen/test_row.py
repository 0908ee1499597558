"""What rows of the selection table read off a node."""

from typing import Any

import torch
from torch import fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import octavo.compiler.ops  # noqa: F401  (registers the op)
from octavo.codegen.row import row_count, token_count


def node_of_shape(*sizes: int) -> fx.Node:
    """rms_norm of a tensor whose axis 1 is the symbolic T."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    dynamic = [DimDynamic.STATIC, DimDynamic.DYNAMIC]
    context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
    ids = mode.from_tensor(
        torch.zeros(1, 7, dtype=torch.int64), source=ConstantSource("input_ids"), symbolic_context=context
    )
    graph = fx.Graph()
    graph.placeholder("input_ids").meta["val"] = ids
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.octavo.rms_norm.default, (x, x, 1e-6))
    with mode:
        x.meta["val"] = node.meta["val"] = torch.empty(1, ids.shape[1], *sizes)
    return node


def test_rows_of_a_norm_over_the_hidden_axis_are_tokens() -> None:
    assert row_count(node_of_shape(64)) == "T"


def test_rows_of_a_norm_over_each_head_are_tokens_times_heads() -> None:
    node = node_of_shape(4, 16)
    assert row_count(node) in ("4*T", "T*4")
    assert token_count(node) == "T"
