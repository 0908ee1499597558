"""What weights alone determine becomes a weight; what inputs or chance determine does not."""

import pytest
import torch
from lowered import LoweredGraph
from stages import BF16, FP32, after, assert_idempotent, assert_same_numbers, before, calls, count

from octavo.compiler.errors import PassError
from octavo.compiler.verify import prove_report
from octavo.passes.fold_constants import constant_name, fold_constants
from octavo.passes.pattern import aten
from octavo.passes.rewrite import held, hold
from octavo.passes.rule import run_pass

octavo = torch.ops.octavo


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", ["llama", "sdpa"])
def test_same_numbers(name: str, dtype: torch.dtype) -> None:
    graph_module, _ = after("fold_constants", name, dtype)
    assert_same_numbers(graph_module, name, dtype)


def test_fires_on_chains_and_keeps_one_weight() -> None:
    graph = LoweredGraph()
    x = graph.tokens("x", (4,), FP32)
    first = graph.weight("block.first.weight", torch.arange(8.0).view(2, 4))
    second = graph.weight("block.second.weight", torch.ones(1, 4))
    joined = graph.function(aten.cat.default, [first, second])
    doubled = graph.function(aten.mul.Tensor, joined, 2.0)
    graph_module = graph.finish(graph.call("linear", x, doubled))
    report = run_pass(fold_constants, graph_module)
    assert report.notes == {"folded": 1}
    (linear,) = calls(graph_module, octavo.linear.default)
    weight = linear.args[1]
    assert isinstance(weight, torch.fx.Node) and weight.op == "get_attr"
    expected = torch.cat([torch.arange(8.0).view(2, 4), torch.ones(1, 4)]) * 2
    assert torch.equal(held(graph_module, str(weight.target)), expected)


def test_names_merged_weights_after_their_parts() -> None:
    names = [name for name, _ in before("").named_buffers() if "self_attn" in name and "layers.0" in name]
    assert any(name.startswith("model.layers.0.self_attn.q_proj_k_proj_v_proj_cat") for name in names)


def test_names_what_is_made_of_a_weight_of_the_model_itself() -> None:
    graph = LoweredGraph()
    x = graph.tokens("x", (4,), FP32)
    row = graph.function(aten.reshape.default, graph.weight("bias", torch.ones(2, 2)), [4])
    graph_module = graph.finish(graph.function(aten.add.Tensor, x, row))
    run_pass(fold_constants, graph_module)
    assert "folded.bias_reshape_default" in dict(graph_module.named_buffers())


def test_two_weights_made_alike_have_two_names() -> None:
    """Where a node's name was used before, in another graph or by a node that is gone, say."""
    names = []
    for owner in ("first", "second"):
        graph = LoweredGraph()
        weight = graph.weight(f"layers.{owner}.weight", torch.arange(8.0).view(2, 4))
        part = graph.function(
            aten.slice.Tensor, graph.function(aten.reshape.default, weight, [4, 2]), 0, 0, 2
        )
        names.append(constant_name(part))
    assert names == ["layers.first_slice_tensor", "layers.second_slice_tensor"]


def test_a_factory_counts_as_a_constant_where_something_is_made_of_it() -> None:
    graph = LoweredGraph()
    x = graph.tokens("x", (4,), FP32)
    steps = graph.function(aten.arange.default, 4)
    halves = graph.function(aten.div.Tensor, steps, 2)
    full = graph.function(aten.full.default, [4], 3.0)
    total = graph.function(aten.add.Tensor, graph.function(aten.mul.Tensor, x, halves), full)
    graph_module = graph.finish(total)
    assert run_pass(fold_constants, graph_module).notes == {"folded": 1}
    assert count(graph_module, aten.arange.default, aten.div.Tensor) == 0
    assert count(graph_module, aten.full.default) == 1  # other passes read its number


def test_leaves_inputs_and_random_numbers_alone() -> None:
    graph = LoweredGraph()
    x = graph.tokens("x", (4,), FP32)
    noise = graph.function(aten.neg.default, graph.function(aten.rand.default, [4]))
    graph_module = graph.finish(graph.function(aten.add.Tensor, graph.function(aten.neg.default, x), noise))
    report = run_pass(fold_constants, graph_module)
    assert report.notes == {"folded": 0}
    assert count(graph_module, aten.neg.default, aten.rand.default) == 3


def test_idempotent() -> None:
    assert_idempotent("fold_constants", "sdpa")


def test_every_constant_is_proven_with_its_values() -> None:
    _, report = after("fold_constants", "gpt2")
    assert report.matched == report.notes["folded"] > 0
    prove_report(report, {})
    assert report.proof.sites == report.matched
    site = report.sites[-1]
    site.constants[str(site.table)].view(-1)[3] += 1e-6
    with pytest.raises(
        PassError, match=r"^fold_constants: the rewrite of node .*h\.\d+\..*\.py:\d+ is not equal"
    ):
        prove_report(report, {})


def test_constants_without_values_are_compared_by_shape() -> None:
    graph_module = before("fold_constants", "gpt2")
    for name, weight in [*graph_module.named_buffers()]:
        hold(graph_module, name, weight.to("meta"))
    report = run_pass(fold_constants, graph_module)
    prove_report(report, {})
    assert report.proof.sites == report.matched > 0
