"""Which channels are scaled and by how much, that no bit of the logits moves, and what is left alone."""

from collections.abc import Collection

import pytest
import torch
from stages import BF16, FP32, before, calls, logits, tokens
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.errors import PassError
from octavo.compiler.precision import PrecisionPlan, ProductPrecision
from octavo.compiler.verify import prove_report
from octavo.compiler.weight_quantizer import MethodQuantizer
from octavo.passes.balance_channels import Balance, balance_channels
from octavo.passes.quantize_linear import quantize_linear
from octavo.passes.rewrite import exchange, held
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
INPUTS = {"llama": 6, "gemma3": 10}  # products that are balanced; q, k and v are one, or three


def names(graph_module: GraphModule) -> list[str]:
    """All weights of products but that of the logits."""
    found = [str(n.all_input_nodes[1].target) for n in calls(graph_module, octavo.linear.default)]
    return [name for name in dict.fromkeys(found) if "layers" in name]


def balanced(
    graph_module: GraphModule, left_out: Collection[str] = ()
) -> tuple[PassReport, Balance, list[str]]:
    """By moments from 2^-30 to 2^30."""
    chosen = [name for name in names(graph_module) if name not in left_out]
    widths = {name: held(graph_module, name).shape[1] for name in chosen}
    moments = {name: torch.exp2(torch.linspace(-30, 30, width)) for name, width in widths.items()}
    return *balance_channels(graph_module, chosen, moments), chosen


def scaled(graph_module: GraphModule, balance: Balance) -> GraphModule:
    """With every weight as it would be quantised."""
    balance.scale_norms(graph_module)
    for name in {*balance.inputs, *balance.rows}:
        exchange(graph_module, name, balance.weight(name, held(graph_module, name)))
    graph_module.recompile()
    return graph_module


@pytest.mark.parametrize(("name", "dtype"), [("llama", FP32), ("llama", BF16), ("gemma3", FP32)])
def test_no_bit_of_the_logits_moves(name: str, dtype: torch.dtype) -> None:
    graph_module = before("", name, dtype)
    expected = logits(graph_module, tokens(9))
    _, balance, chosen = balanced(graph_module)
    assert (len(balance.inputs), len(balance.rows), len(balance.norms)) == (INPUTS[name], 2, 4)
    weights = {name: held(graph_module, name).clone() for name in chosen}
    result = logits(scaled(graph_module, balance), tokens(9))
    assert torch.equal(result, expected)
    changed = [name for name, weight in weights.items() if not torch.equal(held(graph_module, name), weight)]
    assert {*changed} == {*balance.inputs, *balance.rows}


def test_the_scales_are_powers_of_two_by_the_second_moments() -> None:
    graph_module = before("")
    (name, *rest) = names(graph_module)
    width = held(graph_module, name).shape[1]
    moments = torch.ones(width)
    moments[:4] = torch.tensor([2.0**10, 2.0**-10, 0.0, 2.0**100])
    all_moments = {one: torch.ones(held(graph_module, one).shape[1]) for one in rest}
    _, balance = balance_channels(graph_module, [name, *rest], {name: moments, **all_moments})
    expected = torch.ones(width)
    expected[:4] = torch.tensor([0.25, 4.0, 1.0, 2.0**-6])  # 2^(-0.2 * 10); never used; as far as it goes
    assert torch.equal(balance.inputs[name], expected)
    x = torch.rand(3, width)
    assert torch.equal(balance.input(name, x), x * expected)
    assert all(bool((scale == 1).all()) for one, scale in balance.inputs.items() if one != name)


def test_both_forms_are_proven_for_any_weights() -> None:
    report, _, _ = balanced(before(""))
    nodes = len(before("").graph.nodes)
    assert report.matched == 6
    prove_report(report, {})
    assert 2 <= report.proof.sites <= 4 and report.proof.worst < report.proof.bound
    graph_module = before("")
    balanced(graph_module)
    assert len(graph_module.graph.nodes) == nodes and not hasattr(graph_module.balance, "shift")


def test_a_form_that_does_not_divide_is_refuted() -> None:
    report, _, _ = balanced(before(""))
    site = report.sites[0]
    (divided,) = site.after.graph.find_nodes(op="call_function", target=torch.ops.aten.div.Tensor)
    divided.replace_all_uses_with(divided.args[0])
    site.after.recompile()
    with pytest.raises(PassError, match="balance_channels: the rewrite"):
        prove_report(report, {})


def test_what_is_left_alone() -> None:
    graph_module = before("")
    down = next(name for name in names(graph_module) if "down" in name)
    gates = next(name for name in names(graph_module) if "gate" in name)
    report, balance, _ = balanced(graph_module, [gates])
    assert gates not in balance.rows and down not in balance.inputs
    assert "the product in front of the activation stays as it is" in [r.reason for r in report.rejected]
    assert any("not made by a norm or a gated activation" in r.reason for r in report.rejected)


def test_a_value_that_others_read_stays() -> None:
    graph_module = before("")
    first = calls(graph_module, octavo.linear.default)[0]
    with graph_module.graph.inserting_after(first):
        x = first.all_input_nodes[0]
        twin = graph_module.graph.call_function(octavo.add.default, (x, x))
    twin.meta = dict(x.meta)
    report, balance, _ = balanced(graph_module)
    assert str(first.all_input_nodes[1].target) not in balance.inputs
    assert report.rejected[0].reason == "its input is also read by what is not in NVFP4"


def test_norms_with_an_offset_stay() -> None:
    graph_module = before("")
    norm = next(n for n in graph_module.graph.nodes if n.target is octavo.rms_norm.default)
    norm.args = (*norm.args, 1.0)
    report, balance, _ = balanced(graph_module)
    assert len(balance.norms) == 3
    assert report.rejected[0].reason.startswith("the norm adds 1.0 to its weight")


def test_a_plan_that_leaves_a_scaled_weight_is_refused() -> None:
    graph_module = before("")
    _, balance, chosen = balanced(graph_module)
    plan = PrecisionPlan(
        {name: ProductPrecision("nvfp4", 0.01) for name in chosen if name not in balance.rows}
    )
    with pytest.raises(PassError, match="is to be scaled, but the plan leaves it as it is"):
        quantize_linear(graph_module, plan, MethodQuantizer("nearest"), balance=balance)


def test_weights_are_scaled_before_they_are_quantised() -> None:
    graph_module = before("")
    _, balance, chosen = balanced(graph_module)
    expected = {name: balance.weight(name, held(graph_module, name)) for name in chosen}
    given: dict[str, Tensor] = {}

    def quantizer(name: str, weight: Tensor, format: str) -> object:
        given[name] = weight
        return MethodQuantizer("nearest")(name, weight, format)  # type: ignore[arg-type]

    plan = PrecisionPlan({name: ProductPrecision("nvfp4", 0.01) for name in chosen})
    quantize_linear(graph_module, plan, quantizer, balance=balance)  # type: ignore[arg-type]
    assert all(torch.equal(given[name], expected[name]) for name in chosen)
    assert sum(str(n.target).endswith("_balanced") for n in graph_module.graph.find_nodes(op="get_attr")) == 4
