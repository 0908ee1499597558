"""Quantised experts in every form, what their codes stand for, and what a mixture makes, token by token in fp64.

Written from the rules of the formats (tests/support/nvfp4.py); shares no code with ops or kernels.
"""

from dataclasses import dataclass, field
from typing import Any

import nvfp4
import torch
from experts import Layer
from torch import Tensor

FP8 = torch.float8_e4m3fn
SCHEMES = ("nvfp4", "nvfp4_weight_only", "fp8")
OPS = {"nvfp4": "nvfp4_moe", "nvfp4_weight_only": "nvfp4_weight_moe", "fp8": "fp8_moe"}


@dataclass
class Stack:
    """The experts of a layer as arguments of an op, by the schema's names.

    values  (E, N, K) fp64 of gate_up, gates first, and of down, outer scales included
    """

    layer: Layer
    scheme: str
    x_outer: float | None
    hidden_outer: Tensor | None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """The op on (tokens, hidden), (tokens, K) and (tokens, K)."""
        given = {name: self.tensors.get(name) for name in self.names}
        op = getattr(torch.ops.octavo, OPS[self.scheme])
        numbers = (self.layer.activation, self.layer.limit, self.layer.alpha)
        result: Tensor = op(x[None], experts[None], weights[None], *given.values(), *numbers, **self.options)
        return result[0]

    @property
    def names(self) -> list[str]:
        """Tensors behind x, experts and weights, in the schema's order."""
        schema = getattr(torch.ops.octavo, OPS[self.scheme]).default._schema
        return [a.name for a in schema.arguments[3:] if "Tensor" in str(a.type)]


def stack(
    layer: Layer, scheme: str, static: bool = True, layout: str = "linear", interleaved: bool = False,
    alphas: tuple[int, int] = (1, 1), dtype: torch.dtype = torch.float32,
) -> Stack:  # fmt: skip
    """static: outer scales of the rows are given; alphas: outer scales of an expert's gate_up and of its down."""
    generator = torch.Generator().manual_seed(layer.hidden + layer.intermediate)
    is_nvfp4, given = scheme == "nvfp4", static and scheme != "nvfp4_weight_only"
    hidden_outer = (torch.rand(layer.experts, generator=generator) + 1) * (0.004 if is_nvfp4 else 0.02)
    made = Stack(
        layer, scheme, (0.0015 if is_nvfp4 else 0.01) if given else None, hidden_outer if given else None
    )
    if made.x_outer is not None and made.hidden_outer is not None:
        made.tensors = {"x_outer": torch.tensor([made.x_outer]), "hidden_outer": made.hidden_outer}
    for name, n, k, parts in (
        ("gate_up", 2 * layer.intermediate, layer.hidden, alphas[0]),
        ("down", layer.hidden, layer.intermediate, alphas[1]),
    ):
        codes, scales, values = weight_of(layer.experts, n, k, scheme, generator)
        outer = (torch.rand(layer.experts, parts, generator=generator) + 0.5) / (
            float(values.square().mean().sqrt()) * k**0.5
        )
        of_rows = 1.0 if not given else made.x_outer if name == "gate_up" else hidden_outer[:, None]
        made.values[name] = values * outer.double().repeat_interleave(n // parts, 1)[:, :, None]
        made.tensors[f"{name}_alpha"] = outer * of_rows
        if layer.has_bias:
            made.tensors[f"{name}_bias"] = torch.randn(layer.experts, n, generator=generator).to(dtype)
        order = (
            torch.arange(n).view(2, -1).T.flatten() if interleaved and name == "gate_up" else torch.arange(n)
        )
        made.tensors[name] = codes[:, order].contiguous()
        if scales is not None:
            in_order = scales.view(torch.uint8)[:, order]
            swizzled = [nvfp4.swizzle(part).view(torch.uint8) for part in in_order]
            kept = in_order if layout == "linear" else torch.stack(swizzled)
            made.tensors[f"{name}_scale"] = kept.contiguous().view(FP8)
    made.options = {"interleaved": interleaved} | ({} if scheme == "fp8" else {"layout": layout})
    return made


def weight_of(
    experts: int, n: int, k: int, scheme: str, generator: torch.Generator
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Codes, linear scales of NVFP4, and the values (experts, n, k) in fp64 without outer scales."""
    if scheme == "fp8":
        codes = torch.randn(experts, n, k, generator=generator).mul(50).to(FP8)
        return codes, None, codes.double()
    packed = torch.randint(0, 256, (experts * n, k // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(0x30, 0x50, (experts * n, k // 16), generator=generator, dtype=torch.uint8)
    scales[::7, 0] = 0
    values = nvfp4.dequantize(packed, scales.view(FP8), 1.0)
    parts = packed.view(experts, n, -1), scales.view(FP8).view(experts, n, -1)
    return *parts, values.view(experts, n, k)


def rounded(row: Tensor, scheme: str, outer: float | None) -> Tensor:
    """A row (K) of the model's dtype as its codes have it, in fp64."""
    if scheme == "nvfp4_weight_only":
        return row.double()
    amax, wide = float(row.float().abs().max()), row.float()
    if scheme == "nvfp4":
        step = outer if outer is not None else float(torch.tensor(amax) / 2688) or 1.0
        return nvfp4.dequantize(*nvfp4.quantize(wide[None], step), step)[0]
    step = outer if outer is not None else float(torch.tensor(amax) / 448) or 1.0
    return (wide / torch.tensor(step)).clamp(-448, 448).to(FP8).double() * step


def expected(made: Stack, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """(tokens, hidden) in fp64."""
    layer, half = made.layer, made.layer.intermediate
    result = torch.zeros(x.shape[0], layer.hidden, dtype=torch.float64)
    biases = {
        name: made.tensors.get(f"{name}_bias", torch.zeros(layer.experts, 1)).double()
        for name in ("gate_up", "down")
    }
    for token, row in enumerate(x):
        values = rounded(row, made.scheme, made.x_outer)
        for slot, e in enumerate(experts[token].tolist()):
            if e == -1:
                continue
            both = made.values["gate_up"][e] @ values + biases["gate_up"][e]
            gate, up = both[:half], both[half:]
            if layer.limit:
                gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
            is_oai = layer.activation == "swiglu_oai"
            assert is_oai or layer.activation == "silu"
            inner = gate * torch.sigmoid((layer.alpha if is_oai else 1.0) * gate) * (up + is_oai)
            outer = None if made.hidden_outer is None else float(made.hidden_outer[e])
            inner = rounded(inner.to(x.dtype), made.scheme, outer)
            result[token] += weights[token, slot].double() * (
                made.values["down"][e] @ inner + biases["down"][e]
            )
    return result


def tokens_of(layer: Layer, count: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x, experts and weights; the last expert has no token, the first row of several is zero."""
    generator = torch.Generator().manual_seed(seed + count)
    x = torch.randn(count, layer.hidden, generator=generator)
    x[0] *= count == 1
    experts = torch.randint(0, layer.experts - 1, (count, layer.top_k), generator=generator)
    return x.to(dtype), experts, torch.rand(count, layer.top_k, generator=generator)
