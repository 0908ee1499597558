"""Rows on the wire: sizes to the byte, codes those of octavo::quantize, errors within what the formats hold."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from octavo.compiler.errors import ExecutionError
from octavo.compiler.ops.quantize import quantize
from octavo.runtime.wire import WIRES, pack_rows, row_bytes, unpack_rows

OUTERS = [None, torch.tensor(0.0123)]
E2M1 = [0, Fraction(1, 2), 1, Fraction(3, 2), 2, 3, 4, 6]


def rows(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal values of many magnitudes, with rows of zeros and of a single spike."""
    x = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
        * torch.logspace(-6, 3, shape[-2])[:, None]
    )
    x[0], x[1] = 0, 0
    x[1, 3] = -7.0
    return x.to(dtype)


def test_bytes_of_a_token_of_deepseek() -> None:
    assert row_bytes("nvfp4", 7168, torch.bfloat16) == 3584 + 448 == 4032
    assert row_bytes("fp8", 7168, torch.bfloat16) == 7168
    assert row_bytes("model", 7168, torch.bfloat16) == 14336
    payload, outer = pack_rows(rows(0, (3, 7168), torch.bfloat16), "nvfp4", torch.tensor(1.0))
    assert (payload.dtype, payload.shape, outer) == (torch.uint8, (3, 4032), None)


@pytest.mark.parametrize("outer", OUTERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_quantize(dtype: torch.dtype, outer: Tensor | None) -> None:
    x = rows(1, (9, 64), dtype)
    for wire in ("fp8", "nvfp4"):
        payload, own = pack_rows(x, wire, outer)
        codes, *parts = quantize(x, outer, wire)
        scales = parts[:1] if wire == "nvfp4" else []
        assert torch.equal(payload, torch.cat([part.view(torch.uint8) for part in (codes, *scales)], -1))
        assert (own is None) == (outer is not None)
        assert own is None or torch.equal(own, parts[-1])


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_come_back(wire: str, dtype: torch.dtype) -> None:
    x = rows(2, (7, 48), dtype)
    payload, outer = pack_rows(x, wire)
    back = unpack_rows(payload, outer, wire, 48, dtype)
    assert (back.dtype, back.shape) == (dtype, x.shape)
    if wire == "model":
        assert torch.equal(back, x)
        return
    # Half a step of E4M3 is 2^-4 of the value; the widest gap of E2M1, 4 to 6, is a sixth of a block's largest,
    # and the rounding of its scale moves that by 2^-4 more.
    amax = x.abs().reshape(7, 3, 16).amax(-1, keepdim=True).expand(-1, -1, 16).reshape(7, 48)
    bound = x.abs() * 2**-4 if wire == "fp8" else amax * (1 / 6) * (1 + 2**-4) + amax * 2**-4
    floor = x.abs().amax(-1, keepdim=True) * 2**-18  # below the smallest E4M3 of a row
    assert ((back.double() - x.double()).abs() <= (bound * (1 + 2**-7) + floor).double()).all()


def test_a_value_by_hand() -> None:
    # 3 * 0.5 is exact: outer 0.25, block scale 6 / 6 / 0.25 = 4, codes x / (4 * 0.25).
    x = torch.tensor([[6.0, -3.0, 1.5, 0.5] + [0.0] * 12])
    payload, _ = pack_rows(x, "nvfp4", torch.tensor(0.25))
    codes = [E2M1.index(Fraction(abs(v))) | (8 if v < 0 else 0) for v in x[0].tolist()]
    packed = [low | high << 4 for low, high in zip(codes[::2], codes[1::2], strict=True)]
    four = 0b0_1001_000  # E4M3: bias 7, 2^(9 - 7)
    assert payload[0].tolist() == [*packed, four]
    assert torch.equal(unpack_rows(payload, torch.tensor(0.25), "nvfp4", 16, torch.float32), x)


def test_no_rows() -> None:
    for wire in WIRES:
        payload, outer = pack_rows(torch.zeros(0, 32), wire)
        assert payload.shape == (0, row_bytes(wire, 32, torch.float32))
        assert unpack_rows(payload, outer, wire, 32, torch.float32).shape == (0, 32)


def test_refusals() -> None:
    with pytest.raises(ExecutionError, match="multiple of 16 elements, got 40; compile with wire='fp8'"):
        row_bytes("nvfp4", 40, torch.float32)
    with pytest.raises(ExecutionError, match="expected one of model, fp8, nvfp4, got 'int8'"):
        row_bytes("int8", 40, torch.float32)
