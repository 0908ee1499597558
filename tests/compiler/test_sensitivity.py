"""What quantising one product costs: measured numbers against whole quantised graphs, NumPy and plain torch."""

from functools import cache

import ml_dtypes
import numpy as np
import pytest
import torch
from calibrated import lowered, observed, quantizer, sequences
from numpy.typing import NDArray
from stages import SETTINGS, calls, logits
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler.options import QuantConfig
from octavo.compiler.precision import PrecisionPlan, ProductPrecision
from octavo.compiler.quality import held_out
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.compiler.replay import Replay, evaluate
from octavo.compiler.sensitivity import (
    PROBE_LENGTH,
    PROBE_TOKENS,
    Sensitivity,
    fake,
    measure,
    module_of,
    probe,
    underflow,
)
from octavo.passes.assign_precision import Choice, precision_of, quantisable

octavo = torch.ops.octavo
AUTO = QuantConfig("auto")


@cache
def rows(name: str = "llama") -> list[Sensitivity]:
    return measure(lowered(name), AUTO, observed(name), quantizer, sequences(), SETTINGS.page_size)


def replay_of(graph_module: GraphModule) -> tuple[Replay, list[Node]]:
    products = [node for one in quantisable(graph_module, AUTO) for node in one.nodes]
    return Replay(graph_module, sequences(), SETTINGS.page_size, products), products


def test_a_run_gives_the_logits_of_every_sequence() -> None:
    graph_module = lowered()
    found = Replay(graph_module, sequences(), SETTINGS.page_size).reference()
    expected = torch.cat([logits(graph_module, torch.tensor([one])) for one in sequences()])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_run_from_a_product_on_is_that_of_the_whole_graph(name: str) -> None:
    replay, products = replay_of(lowered(name))
    reference = replay.reference()
    changed = [
        replay.again(node, {node: lambda *args, node=node: 1.5 * evaluate(node, args)})
        for node in reversed(products)
    ]
    for node, found in zip(reversed(products), changed, strict=True):
        assert torch.equal(
            found, replay.again(None, {node: lambda *args, node=node: 1.5 * evaluate(node, args)})
        )
        assert not torch.equal(found, reference)
    assert torch.equal(replay.again(None, {}), reference)


def mean_kl(exact: Tensor, other: Tensor) -> float:
    """In fp64 NumPy."""

    def logs(values: Tensor) -> NDArray[np.float64]:
        wide = values.double().numpy()
        shifted = wide - wide.max(-1, keepdims=True)
        result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return result

    p, q = logs(exact), logs(other)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("index", [0, 3, 6])
def test_kl_is_that_of_the_graph_with_this_product_quantised(index: int) -> None:
    row = rows()[index]
    graph_module = lowered()
    product = next(one for one in quantisable(graph_module, AUTO) if one.name == row.name)
    plan = PrecisionPlan({one.name: ProductPrecision("bf16") for one in quantisable(graph_module, AUTO)})
    plan.products[row.name] = precision_of(product, Choice("nvfp4", ""), AUTO, observed())
    pieces = probe(sequences())
    exact = torch.cat([logits(graph_module, torch.tensor([one])) for one in pieces])
    quantize(graph_module, QuantSettings(plan, quantizer, "linear"))
    assert len(calls(graph_module, octavo.nvfp4_linear.default)) == 1
    other = torch.cat([logits(graph_module, torch.tensor([one])) for one in pieces])
    assert row.kl["nvfp4"] == pytest.approx(mean_kl(exact, other), rel=1e-3)


def test_kl_of_fp8_goes_by_the_error_of_the_result() -> None:
    for row in rows():
        ratio = 10 ** ((row.sqnr_output["nvfp4"] - row.sqnr_output["fp8"]) / 10)
        assert row.kl["fp8"] == pytest.approx(row.kl["nvfp4"] * ratio)
        assert ratio < 0.1


def test_rows_are_in_the_order_of_the_graph_and_say_whose_weights() -> None:
    assert [row.module for row in rows()[:4]] == [
        "model.layers.0.self_attn.q_proj+k_proj+v_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate_proj+up_proj",
        "model.layers.0.mlp.down_proj",
    ]
    assert [row.elements for row in rows()[:4]] == [128 * 64, 64 * 64, 192 * 64, 64 * 96]
    assert len({row.input for row in rows()}) == len(rows()) == 8


def nearest(x: NDArray[np.float32], outer: float) -> NDArray[np.float64]:
    """NVFP4 by definition: every element to the nearest of fifteen values times its block's rounded scale."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    blocks = x.reshape(-1, 16)
    wanted = (np.abs(blocks).max(-1) / np.float32(6) / np.float32(outer)).clip(2.0**-9, 448)
    step = wanted.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)[:, None] * outer
    index = np.abs(np.abs(blocks / step)[..., None] - grid).argmin(-1)
    result: NDArray[np.float64] = (np.sign(blocks) * grid[index] * step).reshape(x.shape)
    return result


def test_noise_of_inputs_and_weights_is_that_of_the_definition() -> None:
    graph_module = lowered()
    products = [one.nodes[0] for one in quantisable(graph_module, AUTO)]
    probed = Replay(graph_module, probe(sequences()), SETTINGS.page_size, products)
    probed.reference()
    for row, node in zip(rows(), products, strict=True):
        x, weight = (value.numpy() for value in probed.arguments(node)[:2])
        outer = observed().products[row.name].amax * 1.25 / 2688
        for found, exact, scale in (
            (row.sqnr_input, x, outer), (row.sqnr_weight, weight, np.abs(weight).max() / np.float32(2688)),
        ):  # fmt: skip
            noise = ((exact - nearest(exact, scale)) ** 2).sum()
            assert found["nvfp4"] == pytest.approx(
                10 * np.log10((exact.astype(float) ** 2).sum() / noise), abs=0.01
            )
            assert found["fp8"] > found["nvfp4"] + 8


def test_small_blocks_are_counted() -> None:
    x = torch.zeros(4, 64)
    x[0, 0], x[1, 16], x[2, 32], x[3, 48] = 1.0, 2.0**-5, 2.0**-8, 2.0**-12
    assert underflow(x, 1 / 6) == (0.5, 0.25)
    assert underflow(torch.zeros(1, 16), 1.0) == (0.0, 0.0)


def test_spread_and_growth_come_from_calibration() -> None:
    for row in rows():
        seen = observed().products[row.name]
        assert row.tail == seen.amax / seen.block_amax[0]
        assert row.growth == seen.held_out_amax / seen.amax


def test_experts_are_measured_too() -> None:
    found = [row for row in rows("mixtral") if "experts" in row.name]
    assert len(found) == 2 and found[0].elements == 4 * (192 * 64 + 64 * 96)
    assert all(0 < row.kl["fp8"] < 0.2 * row.kl["nvfp4"] for row in found)
    assert not any("gate" in row.module for row in rows("mixtral"))


def test_probe_and_held_out_tokens_do_not_meet() -> None:
    long = [list(range(start, start + 512)) for start in range(0, 5120, 512)]
    pieces, rest = probe(long), held_out(long)
    assert [len(piece) for piece in pieces] == [PROBE_LENGTH] * (PROBE_TOKENS // PROBE_LENGTH)
    assert sum(map(len, rest)) == 256 and {len(piece) for piece in rest} == {128}
    assert min(min(piece) for piece in rest) == 5120 - 256
    assert max(max(piece) for piece in pieces) < 5120 - 512
    assert probe([[1, 2, 3]]) == [[1, 2, 3]] and held_out([[1, 2, 3]]) == [[1, 2, 3]]


def test_values_without_a_scale_of_their_own_use_each_rows() -> None:
    x = torch.tensor([[1.0] * 16, [1000.0] * 16, [0.0] * 16])
    assert torch.allclose(fake(x, "nvfp4", None), x) and torch.allclose(fake(x, "fp8", None), x)
    assert torch.equal(fake(x, "bf16", None), x)
    assert fake(x, "nvfp4", torch.tensor(1 / 2688))[1, 0] == 1.0


def test_the_name_of_several_modules() -> None:
    graph_module = lowered("mixtral")
    names = [module_of(product) for product in quantisable(graph_module, AUTO)]
    assert "model.layers.1.mlp.experts" in names
