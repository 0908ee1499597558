"""What each stage allows, and what the checker says of the first node that it does not."""

import pytest
import torch
from lowered import LoweredGraph
from stages import FP32, before
from torch import fx

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.legality import ILLEGAL, LEGAL, Stage, check, op
from octavo.passes.pattern import aten

SDPA = aten.scaled_dot_product_attention.default


def graph_of(target: object, *args: object) -> fx.GraphModule:
    g = LoweredGraph()
    x = g.tokens("x", (8,), FP32)
    inputs = (x, x, x) if target is SDPA else (x, *args)
    root = g.function(target, *inputs)
    root.meta["nn_module_stack"] = {"k": ("layers.1.mlp", torch.nn.Module)}
    root.meta["stack_trace"] = '  File "/home/me/model.py", line 9, in forward\n    y = x'
    return g.finish(root)


@pytest.mark.parametrize(
    ("target", "args", "first"),
    [
        (aten.transpose.int, (1, 2), "canonical"),
        (aten.softmax.int, (-1,), "lowered"),  # a router's: its last axis is a number of experts
        (SDPA, (), "fused"),
        (aten.neg.default, (), "lowered"),
        (aten.reshape.default, ([-1, 8],), None),
        (aten.reshape.default, ([1, 2, -1],), "lowered"),  # mixes tokens
    ],
)
def test_stages_forbid_what_a_pass_has_removed(
    target: object, args: tuple[object, ...], first: Stage | None
) -> None:
    stages: list[Stage] = ["captured", "canonical", "fused", "paged", "lowered"]
    allowed = stages[: stages.index(first)] if first else stages
    for stage in stages:
        if stage in allowed:
            check(graph_of(target, *args), stage, "test")
        else:
            with pytest.raises(IllegalGraphError):
                check(graph_of(target, *args), stage, "test")


def test_softmax_over_keys_must_be_fused() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (8,), FP32)
    scores = g.function(aten.matmul.default, x, g.function(aten.permute.default, x, [0, 2, 1]))
    graph_module = g.finish(g.function(aten.softmax.int, scores, -1))
    check(graph_module, "canonical", "test")
    with pytest.raises(IllegalGraphError, match="aten::softmax is not legal in a fused graph"):
        check(graph_module, "fused", "test")


def test_reshapes_keep_tokens_apart() -> None:
    with pytest.raises(IllegalGraphError, match="aten::reshape joins or splits the token axis"):
        check(graph_of(aten.reshape.default, [1, -1, 4]), "lowered", "test")


def test_error_names_op_stage_node_module_line_and_what_exists() -> None:
    with pytest.raises(IllegalGraphError) as raised:
        check(graph_of(aten.neg.default), "lowered", "some_pass")
    assert str(raised.value).startswith(
        "some_pass: aten::neg is not legal in a lowered graph (node neg_default, layers.1.mlp, "
        "model.py:9); kernels exist for act_mul, add, "
    )


def test_error_advises_at_earlier_stages() -> None:
    with pytest.raises(IllegalGraphError, match="a pass before this stage should have replaced it"):
        check(graph_of(aten.alias.default), "canonical", "x")


def test_a_call_without_shape_is_illegal() -> None:
    graph_module = graph_of(aten.neg.default)
    for node in graph_module.graph.nodes:
        node.meta.pop("val", None)
    with pytest.raises(
        IllegalGraphError, match=r"node neg_default, layers.1.mlp, model.py:9 has no inferred shape"
    ):
        check(graph_module, "captured", "x")


def test_a_call_of_a_module_is_illegal() -> None:
    graph = fx.Graph()
    graph.output((graph.call_module("layer", (graph.placeholder("x"),)),))
    root = torch.nn.Module()
    root.add_module("layer", torch.nn.Identity())
    with pytest.raises(IllegalGraphError, match="call_module layer is not a call of an op"):
        check(fx.GraphModule(root, graph), "captured", "x")


def test_real_graphs_are_legal_at_their_stages() -> None:
    assert set(LEGAL) == set(ILLEGAL)
    check(before("canonicalize"), "captured", "x")
    check(before("fuse_rope"), "canonical", "x")
    check(before("insert_paged_kv"), "fused", "x")
    check(before("merge_qkv"), "paged", "x")
    check(before(""), "lowered", "x")


def test_names_of_ops() -> None:
    names = {op(n) for n in before("").graph.nodes if n.op == "call_function"}
    assert {"octavo::linear", "octavo::paged_attention", "aten::reshape", "getitem"} <= names
