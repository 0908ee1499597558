"""Kernels that work on whole rows, against the dialect's references in fp64."""

from collections.abc import Callable

import pytest
import torch

from octavo.codegen.kernel import KernelSpec
from octavo.codegen.specs_triton import act_mul_spec, add_spec, gather_rows_spec, rms_norm_spec
from octavo.compiler.ops.mlp import act_mul
from octavo.compiler.ops.norm import add_rms_norm, rms_norm
from octavo.compiler.ops.rows import embedding, gather_logits
from octavo.compiler.pointwise import ACTIVATIONS

Launch = Callable[[KernelSpec, dict[str, torch.Tensor], dict[str, int]], list[str]]
Check = Callable[..., None]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def normal(*shape: int, dtype: str = "bf16") -> torch.Tensor:
    return torch.randn(shape).to(DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 3, 17])
def test_embedding(launch: Launch, dtype: str, tokens: int) -> None:
    weight = normal(50, 576, dtype=dtype)
    ids = torch.arange(tokens) * 2 % 50
    out = torch.full((tokens, 576), float("nan"), dtype=weight.dtype)
    spec = gather_rows_spec("embedding", "ids", "weight", "T", 576, dtype)
    launch(spec, {"ids": ids, "weight": weight, "out": out}, {"T": tokens})
    assert torch.equal(out, embedding(ids, weight))


def test_gather_logits_reads_only_the_rows_named(launch: Launch) -> None:
    hidden = normal(5, 100)
    hidden[[0, 1, 3]] = float("nan")
    out = torch.empty(2, 100, dtype=torch.bfloat16)
    rows = torch.tensor([4, 2])
    spec = gather_rows_spec("gather_logits", "logit_rows", "hidden", "L", 100, "bf16")
    launch(spec, {"logit_rows": rows, "hidden": hidden, "out": out}, {"T": 5, "L": 2})
    assert torch.equal(out, gather_logits(hidden[None], rows)[0])


def test_an_id_outside_the_table_is_caught(launch: Launch) -> None:
    spec = gather_rows_spec("embedding", "ids", "weight", "T", 64, "bf16")
    tensors = {"ids": torch.tensor([50]), "weight": normal(50, 64), "out": normal(1, 64)}
    with pytest.raises(Exception, match="lie outside of every tensor"):
        launch(spec, tensors, {"T": 1})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 576), (3, 7), (17, 576)])
def test_add(launch: Launch, dtype: str, tokens: int, width: int) -> None:
    x, y = normal(tokens, width, dtype=dtype), normal(tokens, width, dtype=dtype)
    out = torch.full_like(x, float("nan"))
    launch(add_spec("T", width, dtype), {"x": x, "y": y, "out": out}, {"T": tokens})
    assert torch.equal(out, x + y)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden", "offset"), [(1, 576, 0.0), (3, 64, 1.0), (17, 100, 0.0)])
def test_rms_norm(
    launch: Launch, assert_rounds_to: Check, dtype: str, tokens: int, hidden: int, offset: float
) -> None:
    x, weight = normal(tokens, hidden, dtype=dtype), normal(hidden, dtype=dtype)
    out = torch.full_like(x, float("nan"))
    spec = rms_norm_spec("T", hidden, dtype, 1e-3, offset, residual=False)
    launch(spec, {"x": x, "weight": weight, "out": out}, {"T": tokens})
    assert_rounds_to(out, rms_norm(x.double(), weight.double(), 1e-3, offset))


def test_rms_norm_with_weights_kept_in_fp32(launch: Launch, assert_rounds_to: Check) -> None:
    x, weight = normal(3, 64, dtype="bf16"), normal(64, dtype="fp32")
    out = torch.full_like(x, float("nan"))
    spec = rms_norm_spec("T", 64, "bf16", 1e-3, 0.0, residual=False, weight_dtype="fp32")
    launch(spec, {"x": x, "weight": weight, "out": out}, {"T": 3})
    assert_rounds_to(out, rms_norm(x.double(), weight.double(), 1e-3, 0.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_normalises_the_rounded_sum(launch: Launch, assert_rounds_to: Check, dtype: str) -> None:
    x, residual, weight = normal(3, 576, dtype=dtype), normal(3, 576, dtype=dtype), normal(576, dtype=dtype)
    out, total = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    spec = rms_norm_spec("T", 576, dtype, 1e-5, 0.0, residual=True)
    tensors = {"x": x, "residual": residual, "weight": weight, "out_0": out, "out_1": total}
    launch(spec, tensors, {"T": 3})
    assert torch.equal(total, add_rms_norm(x, residual, weight, 1e-5)[1])
    assert_rounds_to(out, rms_norm(total.double(), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_mul(launch: Launch, assert_rounds_to: Check, dtype: str, activation: str) -> None:
    gate_up = normal(3, 2 * 1536, dtype=dtype) * 4
    out = torch.full((3, 1536), float("nan"), dtype=gate_up.dtype)
    launch(act_mul_spec("T", 1536, dtype, activation), {"gate_up": gate_up, "out": out}, {"T": 3})
    # the tail of 1 + erf cancels
    assert_rounds_to(out, act_mul(gate_up.double(), activation), sums=0.01)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_act_mul_of_extreme_values(launch: Launch, activation: str) -> None:
    gate = torch.tensor([-1e30, -200.0, 0.0, 200.0, 1e30, float("nan")])
    gate_up = torch.cat((gate, torch.ones(6)))[None]
    out = torch.empty(1, 6)
    launch(act_mul_spec("T", 6, "fp32", activation), {"gate_up": gate_up, "out": out}, {"T": 1})
    expected = act_mul(gate_up.double(), activation).float()
    torch.testing.assert_close(out, expected, equal_nan=True)
