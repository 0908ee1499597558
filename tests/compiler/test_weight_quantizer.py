"""Each method's parts beside NumPy written from the rules, what they lose, and what is refused by name."""

import ml_dtypes
import numpy as np
import nvfp4 as book
import pytest
import torch
from torch import Tensor

from octavo.compiler.errors import OptionError
from octavo.compiler.observed import Observed, ObservedInput
from octavo.compiler.options import WeightMethod
from octavo.compiler.precision import Format, QuantizedWeight
from octavo.compiler.weight_quantizer import MethodQuantizer

METHODS: tuple[WeightMethod, ...] = ("nearest", "search", "gptq")
K = 64


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


def inputs() -> Tensor:
    """Rows of which columns go together and differ a hundredfold in size; two columns are never used."""
    generator = torch.Generator().manual_seed(9)
    x = torch.randn(400, K, generator=generator) @ torch.randn(K, K, generator=generator)
    x = x * torch.logspace(-1, 1, K)
    x[:, 3:5] = 0.0
    return x


def observed(*names: str) -> Observed:
    x = inputs()
    moments = x.T @ x / len(x)
    seen = ObservedInput(len(x), float(x.abs().max()), (0, 0, 0), moments.diagonal().clone(), moments)
    return Observed(dict.fromkeys(names, seen))


def decoded(parts: QuantizedWeight) -> Tensor:
    """fp64 values of a matrix."""
    outer = parts.outer.double()
    if parts.scales is None:
        return parts.codes.double() * outer[:, None]
    return torch.from_numpy(np.asarray(book.dequantize(parts.codes, parts.scales, float(outer))))


def loss(parts: QuantizedWeight, weight: Tensor) -> float:
    """Of what the product computes."""
    return float(((decoded(parts) - weight) @ inputs().double().T).square().mean())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nearest_is_the_rule_to_the_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.compiler.weight_quantizer.CHUNK_ELEMENTS", 7 * K)
    weight = weights(24, K).to(dtype)
    weight[3, 16:32] = 0.0
    parts = MethodQuantizer("nearest")("w", weight, "nvfp4")
    outer = np.float32(float(weight.abs().max())) / np.float32(2688)
    codes, scales = book.quantize(weight.float(), float(outer))
    assert float(parts.outer) == outer and (parts.rule, parts.e4m3_max) == ("nearest", 448)
    assert parts.scales is not None
    assert torch.equal(parts.codes, codes)
    assert torch.equal(parts.scales.view(torch.uint8), scales.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_rows_are_the_rule_to_the_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.compiler.weight_quantizer.CHUNK_ELEMENTS", 7 * K)
    weight = (weights(24, K) * torch.logspace(-3, 3, 24)[:, None]).to(dtype)
    weight[5] = 0.0
    parts = MethodQuantizer("search")("w", weight, "fp8")
    wide = weight.float().numpy()
    amax = np.abs(wide).max(1)
    outer = np.where(amax == 0, np.float32(1), amax / np.float32(448))
    codes = (wide / outer[:, None]).astype(ml_dtypes.float8_e4m3fn)
    assert parts.scales is None and np.array_equal(parts.outer.numpy(), outer)
    assert np.array_equal(parts.codes.view(torch.uint8).numpy(), codes.view(np.uint8))


def test_each_method_loses_less_than_the_one_before() -> None:
    weight = weights(40, K)
    losses = [loss(MethodQuantizer(m, observed("w"))("w", weight, "nvfp4"), weight) for m in METHODS]
    losses.insert(1, loss(MethodQuantizer("search")("w", weight, "nvfp4"), weight))
    assert losses[0] > losses[1] > losses[2] > losses[3]


def test_weights_alone_are_quantised_alike() -> None:
    quantizer = MethodQuantizer("search", observed("w"))
    both, alone = (quantizer("w", weights(8, K), format) for format in ("nvfp4", "nvfp4_weight_only"))
    assert torch.equal(both.codes, alone.codes) and torch.equal(both.outer, alone.outer)


def test_the_method_and_what_it_weighed_by_are_told() -> None:
    seen = observed("w").products["w"]
    for method, rule in (("search", "search"), ("gptq", "feedback")):
        parts = MethodQuantizer(method, observed("w"))("w", weights(8, K), "nvfp4")  # type: ignore[arg-type]
        assert (parts.rule, parts.e4m3_max, parts.recipe) == (rule, 256, "octavo-v1")
        if rule == "feedback":
            assert parts.seen is not None and torch.equal(parts.seen, seen.moments)  # type: ignore[arg-type]
        else:
            mean = seen.second_moments.mean()
            assert parts.seen is not None and torch.equal(parts.seen[3:5], mean.expand(2))
            assert torch.equal(parts.seen[5:], seen.second_moments[5:])
    assert MethodQuantizer("search")("w", weights(8, K), "nvfp4").seen is None


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
@pytest.mark.parametrize("method", METHODS)
def test_experts_are_quantised_one_by_one(method: WeightMethod, format: Format) -> None:
    experts = weights(3, 24, K)
    quantizer = MethodQuantizer(method, observed("experts", "one"))
    parts = quantizer("experts", experts, format)
    for e, expert in enumerate(experts):
        one = quantizer("one", expert, format)
        assert torch.equal(parts.codes[e].view(torch.uint8), one.codes.view(torch.uint8))
        assert torch.equal(parts.outer[e], one.outer)
        if one.scales is not None and parts.scales is not None:
            assert torch.equal(parts.scales[e].view(torch.uint8), one.scales.view(torch.uint8))
    assert (parts.scales is None) is (format == "fp8")
    assert parts.rule == quantizer("one", experts[0], format).rule


@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
@pytest.mark.parametrize("method", METHODS)
def test_zero_weights_stand_for_zero(method: WeightMethod, format: Format) -> None:
    parts = MethodQuantizer(method, observed("w"))("w", torch.zeros(4, K), format)
    assert decoded(parts).eq(0).all() and parts.outer.eq(1).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("format", ["nvfp4", "fp8"])
def test_weights_that_are_not_finite_are_refused_by_name(format: Format, value: float) -> None:
    weight = torch.ones(2, 4, K)
    weight[1, 2, 5] = value
    for method in METHODS:
        quantizer = MethodQuantizer(method, observed("layers.7.up"))
        with pytest.raises(
            OptionError, match=rf"^{format}: layers\.7\.up, expert 1 holds .*elements that are"
        ):
            quantizer("layers.7.up", weight, format)
        with pytest.raises(OptionError, match=rf"^{format}: layers\.7\.up holds .*elements that are not"):
            quantizer("layers.7.up", weight[1], format)


def test_gptq_wants_moments() -> None:
    for quantizer in (MethodQuantizer("gptq"), MethodQuantizer("gptq", observed("other"))):
        with pytest.raises(OptionError, match=r'^weights="gptq": calibration saw no input of layers\.7\.up'):
            quantizer("layers.7.up", weights(4, K), "nvfp4")


def test_rows_must_be_whole_blocks() -> None:
    with pytest.raises(OptionError, match=r"rows of whole blocks of 16 elements, got w of \(2, 24\)"):
        MethodQuantizer("search")("w", torch.ones(2, 24), "nvfp4")
