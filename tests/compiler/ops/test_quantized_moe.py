"""Mixtures of quantised experts against loops over tokens in fp64, on rows quantised by the book."""

import itertools
from dataclasses import replace

import pytest
import torch
from experts import Layer, with_holes
from quantized_experts import FP8, SCHEMES, Stack, expected, stack, tokens_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

FP32, BF16 = torch.float32, torch.bfloat16
SILU = Layer(4, 2, 32, 48)
OAI = Layer(3, 3, 48, 16, "swiglu_oai", 1.5, 1.702, has_bias=True)


def assert_close(made: Stack, given: tuple[Tensor, Tensor, Tensor]) -> None:
    got, wanted = made(*given), expected(made, *given)
    assert got.dtype == given[0].dtype
    unit = 2.0**-8 if got.dtype == BF16 else 2.0**-20
    error = (got.double() - wanted).abs()
    assert bool((error <= unit * wanted.abs() + 2.0**-18 * wanted.abs().max()).all()), float(error.max())


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("layer", [SILU, OAI], ids=["silu", "oai"])
@pytest.mark.parametrize("static", [True, False], ids=["static", "by token"])
def test_a_mixture_is_that_of_the_values_of_its_codes(layer: Layer, scheme: str, static: bool) -> None:
    for dtype in (FP32, BF16):
        assert_close(stack(layer, scheme, static, dtype=dtype), tokens_of(layer, 9, dtype))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_alphas_of_gate_and_up_and_of_every_row(scheme: str) -> None:
    for alphas in ((2, 1), (2 * OAI.intermediate, OAI.hidden)):
        assert_close(stack(OAI, scheme, alphas=alphas), tokens_of(OAI, 5, FP32))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_orders_of_rows_and_layouts_of_scales_change_no_bit(scheme: str) -> None:
    given = tokens_of(OAI, 6, BF16)
    results = [
        stack(OAI, scheme, layout=layout, interleaved=interleaved, alphas=(2, 1))(*given)
        for layout, interleaved in itertools.product(("linear", "swizzled_128x4"), (False, True))
    ]
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("static", [True, False], ids=["static", "by token"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_token_does_not_depend_on_those_beside_it(scheme: str, static: bool) -> None:
    made = stack(SILU, scheme, static)
    x, experts, weights = tokens_of(SILU, 7, FP32)
    whole = made(x, experts, weights)
    x[1:] *= 1000.0
    assert torch.equal(made(x, experts, weights)[0], whole[0])


@pytest.mark.parametrize("static", [True, False], ids=["static", "by token"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_slot_without_an_expert_adds_nothing(scheme: str, static: bool) -> None:
    made, (x, experts, weights) = stack(SILU, scheme, static), tokens_of(SILU, 9, FP32)
    experts, weights = with_holes(experts, weights)
    assert_close(made, (x, experts, weights))
    assert not made(x, experts, weights)[[1, -1]].any()
    assert not made(x, torch.full_like(experts, -1), weights).any()
    assert made(x[:0], experts[:0], weights[:0]).shape == (0, SILU.hidden)
    for wrong in (-2, SILU.experts):
        experts[3, 0] = wrong
        with pytest.raises(IndexError, match=f"experts must be 0 to 3, or -1 for none, got .*{wrong}"):
            made(x, experts, weights)


def test_an_expert_has_its_own_scale_of_the_hidden_state() -> None:
    made, given = stack(SILU, "nvfp4"), tokens_of(SILU, 9, FP32)
    made.tensors["hidden_outer"] = made.tensors["hidden_outer"].roll(1)
    assert not torch.allclose(made(*given).double(), expected(made, *given), rtol=1e-2)


def test_the_hidden_state_is_rounded_to_the_models_dtype_before_it_is_quantised() -> None:
    """With a block scale of one, 0.25 + 2^-12 is 0.5 in fp32, and in bf16 a tie, which goes to 0."""
    layer = Layer(1, 1, 16, 16)
    made = stack(layer, "nvfp4")
    one = torch.ones(1, 16, 1)
    both = torch.cat((torch.zeros(16), torch.ones(16)))
    both[0], both[1] = 6.0, 0.25 + 2.0**-12  # of the gate; the first makes the scale of the block
    made.tensors |= {
        "gate_up": torch.zeros(1, 32, 8, dtype=torch.uint8), "gate_up_scale": torch.ones(1, 32, 1).to(FP8),
        "gate_up_alpha": one[:, :1, 0], "gate_up_bias": both[None], "hidden_outer": torch.ones(1),
        "down": torch.full((1, 16, 8), 0x22, dtype=torch.uint8), "down_scale": one.to(FP8), "down_alpha": one[:, :1, 0],
    }  # fmt: skip
    made.layer = replace(layer, activation="relu")
    x, experts, weights = torch.zeros(1, 16), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    assert made(x, experts, weights).unique().tolist() == [6.5]
    assert made(x.bfloat16(), experts, weights).unique().tolist() == [6.0]


def test_shapes_of_fake_results() -> None:
    for scheme in SCHEMES:
        made, given = stack(SILU, scheme), tokens_of(SILU, 7, BF16)
        with FakeTensorMode() as mode:
            made.tensors = {name: mode.from_tensor(value) for name, value in made.tensors.items()}
            result = made(*(mode.from_tensor(value) for value in given))
        assert (tuple(result.shape), result.dtype) == ((7, 32), BF16)
