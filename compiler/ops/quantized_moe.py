"""Mixtures of experts with quantised weights.

As octavo::moe, an expert of -1 included, but for E experts, hidden H and intermediate I:

gate_up, down   NVFP4: codes (E, 2 I, H / 2) and (E, H, I / 2) u8, with gate_up_scale and down_scale, the block scales
                E4M3, each expert's in `layout` "linear" (E, rows, columns / 16) or "swizzled_128x4" (E, bytes)
                FP8: E4M3 (E, 2 I, H) and (E, H, I)
interleaved     rows 2 j and 2 j + 1 of an expert's gate_up are gate j and up j; else the gates come before the ups, as
                they do in alphas and biases in either case
x_outer         fp32 (1,), outer scale of x's rows; None: each row's own, as `quantize` has it
hidden_outer    fp32 (E,), outer scales of what the activation makes in each expert; None: each row's own
gate_up_alpha   fp32 (E, 1), (E, 2) or (E, 2 I): what sums are multiplied by, for as many equal parts of the rows: the
                outer scale of the weight, times x_outer where that is given
down_alpha      fp32 (E, 1) or (E, H), likewise with hidden_outer

x and what the activation makes are quantised as `quantize` does it, the latter rounded to x's dtype first; x once for
all its experts. x comes as it is, not as codes: its rows are stored by expert on their way in any case, and are
quantised in passing.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.compiler.ops.moe import gate, over_experts
from octavo.compiler.ops.op import Op, accumulator
from octavo.compiler.ops.quantize import quantize
from octavo.compiler.ops.quantized_linear import decode, finish

# (rows, outer scale or None) -> values of the rows without their outer scales, and those that are their own.
Convert = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Product:
    """One of the two. weight: an expert's (N, K), gates before ups, without outer scale; outer: of its input."""

    weight: Callable[[int], Tensor]
    alpha: Tensor
    bias: Tensor | None
    outer: Tensor | None = None

    def __call__(self, e: int, values: Tensor, own: Tensor | None) -> Tensor:
        w = self.weight(e)
        alpha = self.alpha[e].repeat_interleave(w.shape[0] // self.alpha.shape[1])
        return finish(values @ w.T, alpha, own, None if self.bias is None else self.bias[e])


@dataclass(frozen=True)
class Mix:
    """What all three ops do. convert: what becomes of the rows of either product."""

    gate_up: Product
    down: Product
    convert: Convert
    wide: torch.dtype = torch.float32

    def __call__(
        self, x: Tensor, experts: Tensor, weights: Tensor, activation: str, limit: float, alpha: float
    ) -> Tensor:
        values, own = self.convert(x.flatten(0, -2), self.gate_up.outer)
        outers = self.down.outer

        def of_expert(e: int, rows: Tensor) -> Tensor:
            projected = self.gate_up(e, values[rows], None if own is None else own[rows])
            hidden = gate(projected, activation, limit, alpha).to(x.dtype)
            return self.down(e, *self.convert(hidden, None if outers is None else outers[e]))

        sizes = (len(self.down.alpha), self.down.weight(0).shape[0])
        return over_experts(x, experts, weights, sizes, self.wide, of_expert)


def nvfp4_moe(
    x: Tensor, experts: Tensor, weights: Tensor, x_outer: Tensor | None, gate_up: Tensor, gate_up_scale: Tensor,
    gate_up_alpha: Tensor, gate_up_bias: Tensor | None, hidden_outer: Tensor | None, down: Tensor, down_scale: Tensor,
    down_alpha: Tensor, down_bias: Tensor | None, activation: str, limit: float, alpha: float, layout: str = "linear",
    interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Weights and rows of NVFP4 (see the module); returns (1, T, H) of x's dtype."""

    def convert(rows: Tensor, outer: Tensor | None) -> tuple[Tensor, Tensor | None]:
        codes, scales, *own = quantize(rows, outer, "nvfp4")
        return decode(codes, scales, "linear"), own[0] if own else None

    mix = Mix(
        Product(lambda e: halves(decode(gate_up[e], gate_up_scale[e], layout), interleaved), gate_up_alpha,
                gate_up_bias, x_outer),
        Product(lambda e: decode(down[e], down_scale[e], layout), down_alpha, down_bias, hidden_outer),
        convert,
    )  # fmt: skip
    return mix(x, experts, weights, activation, limit, alpha)


def nvfp4_weight_moe(
    x: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, gate_up_scale: Tensor, gate_up_alpha: Tensor,
    gate_up_bias: Tensor | None, down: Tensor, down_scale: Tensor, down_alpha: Tensor, down_bias: Tensor | None,
    activation: str, limit: float, alpha: float, layout: str = "linear", interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Weights of NVFP4, rows of x's dtype (see the module); returns (1, T, H) of it."""
    wide = accumulator(x)
    mix = Mix(
        Product(lambda e: halves(decode(gate_up[e], gate_up_scale[e], layout).to(wide), interleaved), gate_up_alpha,
                gate_up_bias),
        Product(lambda e: decode(down[e], down_scale[e], layout).to(wide), down_alpha, down_bias),
        lambda rows, outer: (rows.to(wide), None),
        wide,
    )  # fmt: skip
    return mix(x, experts, weights, activation, limit, alpha)


def fp8_moe(
    x: Tensor, experts: Tensor, weights: Tensor, x_outer: Tensor | None, gate_up: Tensor, gate_up_alpha: Tensor,
    gate_up_bias: Tensor | None, hidden_outer: Tensor | None, down: Tensor, down_alpha: Tensor,
    down_bias: Tensor | None, activation: str, limit: float, alpha: float, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """Weights and rows of E4M3 (see the module); returns (1, T, H) of x's dtype."""

    def convert(rows: Tensor, outer: Tensor | None) -> tuple[Tensor, Tensor | None]:
        codes, *own = quantize(rows, outer, "fp8")
        return codes.float(), own[0] if own else None

    mix = Mix(
        Product(lambda e: halves(gate_up[e].float(), interleaved), gate_up_alpha, gate_up_bias, x_outer),
        Product(lambda e: down[e].float(), down_alpha, down_bias, hidden_outer),
        convert,
    )
    return mix(x, experts, weights, activation, limit, alpha)


def halves(rows: Tensor, interleaved: bool) -> Tensor:
    """Rows of gates before those of ups."""
    return torch.cat((rows[0::2], rows[1::2])) if interleaved else rows


def _fake(x: Tensor, width: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], width))


NVFP4_MOE = Op(
    "nvfp4_moe(Tensor x, Tensor experts, Tensor weights, Tensor? x_outer, Tensor gate_up, Tensor gate_up_scale, "
    "Tensor gate_up_alpha, Tensor? gate_up_bias, Tensor? hidden_outer, Tensor down, Tensor down_scale, "
    "Tensor down_alpha, Tensor? down_bias, str activation, float limit, float alpha, str layout='linear', "
    "bool interleaved=False) -> Tensor",
    nvfp4_moe,
    lambda x, experts, weights, x_outer, gate_up, gate_up_scale, gate_up_alpha, gate_up_bias, hidden_outer, down,
    *rest, **options: _fake(x, down.shape[1]),
    "y = sum_k weights_k * nvfp4(activation(nvfp4(x) @ gate_k.T) * (nvfp4(x) @ up_k.T)) @ down_k.T",
)  # fmt: skip
NVFP4_WEIGHT_MOE = Op(
    "nvfp4_weight_moe(Tensor x, Tensor experts, Tensor weights, Tensor gate_up, Tensor gate_up_scale, "
    "Tensor gate_up_alpha, Tensor? gate_up_bias, Tensor down, Tensor down_scale, Tensor down_alpha, "
    "Tensor? down_bias, str activation, float limit, float alpha, str layout='linear', bool interleaved=False) "
    "-> Tensor",
    nvfp4_weight_moe,
    lambda x, experts, weights, gate_up, gate_up_scale, gate_up_alpha, gate_up_bias, down, *rest, **options: _fake(
        x, down.shape[1]
    ),
    "y = sum_k weights_k * (activation(x @ gate_k.T) * (x @ up_k.T)) @ down_k.T, weights of NVFP4",
)  # fmt: skip
FP8_MOE = Op(
    "fp8_moe(Tensor x, Tensor experts, Tensor weights, Tensor? x_outer, Tensor gate_up, Tensor gate_up_alpha, "
    "Tensor? gate_up_bias, Tensor? hidden_outer, Tensor down, Tensor down_alpha, Tensor? down_bias, "
    "str activation, float limit, float alpha, bool interleaved=False) -> Tensor",
    fp8_moe,
    lambda x, experts, weights, x_outer, gate_up, gate_up_alpha, gate_up_bias, hidden_outer, down, *rest, **options:
    _fake(x, down.shape[1]),
    "y = sum_k weights_k * fp8(activation(fp8(x) @ gate_k.T) * (fp8(x) @ up_k.T)) @ down_k.T",
)  # fmt: skip
