"""When channels are balanced, and what calibration sees of it."""

import torch
from models import VOCAB
from stages import before
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.balance_model import balance_model
from octavo.compiler.calibration import calibrate
from octavo.compiler.options import Mode, QuantConfig, WeightMethod
from octavo.compiler.progress import progress_bars
from octavo.compiler.quantize_model import quantize_model
from octavo.compiler.verify_quantized import prove_quantized
from octavo.passes.balance_channels import Balance
from octavo.passes.rewrite import held, hold

PAGE_SIZE = 4
NORM = "model.layers.0.input_layernorm.weight"


def sequences() -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in (40, 48, 30)]


def balance_of(graph_module: GraphModule, mode: Mode, weights: WeightMethod = "search") -> Balance:
    with progress_bars(False) as bars:
        config = QuantConfig(mode, weights=weights)
        given = sequences()
        return balance_model(graph_module, config, given, PAGE_SIZE, "linear", bars, prove_quantized)[1]


def uneven(graph_module: GraphModule) -> GraphModule:
    """Every eighth channel of the first norm is 64 times the others."""
    weight: Tensor = held(graph_module, NORM).clone()
    weight[::8] *= 64.0
    hold(graph_module, "uneven.weight", weight)
    for node in graph_module.graph.find_nodes(op="get_attr"):
        if node.target == NORM:
            node.target = "uneven.weight"
    graph_module.recompile()
    return graph_module


def test_formats_in_blocks_are_balanced_unless_all_goes_to_nearest() -> None:
    assert (
        balance_of(before(""), "nvfp4").inputs and balance_of(before(""), "nvfp4_weight_only", "gptq").inputs
    )
    for mode, weights in (("nvfp4", "nearest"), ("fp8", "search"), ("bf16", "search"), ("auto", "gptq")):
        assert balance_of(before(""), mode, weights) == Balance()  # type: ignore[arg-type]


def test_calibration_sees_inputs_as_they_will_be() -> None:
    graph_module = uneven(before(""))
    balance = balance_of(graph_module, "nvfp4")
    name = next(one for one in balance.inputs if balance.norms.get("uneven.weight") == one)
    scale = balance.inputs[name]
    assert float(scale[8] / scale[1]) < 1
    plain = calibrate(graph_module, sequences(), PAGE_SIZE, True).products[name]
    seen = calibrate(graph_module, sequences(), PAGE_SIZE, True, balance=balance).products[name]
    torch.testing.assert_close(seen.second_moments, plain.second_moments * scale**2)
    assert plain.moments is not None
    torch.testing.assert_close(seen.moments, plain.moments * scale * scale[:, None])
    assert seen.amax < plain.amax


def test_it_is_told_first() -> None:
    graph_module, config = before(""), QuantConfig()
    with progress_bars(False) as bars:
        reports, *_ = quantize_model(graph_module, config, sequences(), PAGE_SIZE, "linear", bars, None)
    assert (reports[0].name, reports[0].matched) == ("balance_channels", 6)
    assert reports[0].notes["balanced"] == "6 of 8 products"
