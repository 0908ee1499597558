"""What proofs of quantising sites share: running a form with everything it made kept, fresh rows, parts, comparison."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from octavo.compiler.legality import named_arguments
from octavo.compiler.precision import WeightRule
from octavo.compiler.quantized_values import Deviation, blocks, check_fp8, check_nvfp4, fp8_values
from octavo.compiler.verify import Evidence

T = TypeVar("T")
ROWS = 6
PRODUCT_ELEMENTS = 1 << 20  # of a weight that are decoded to fp64 at a time
LIMITS = {"nvfp4": 2688.0, "fp8": 448.0}
UNIT = 2.0**-24  # of fp32's roundings
# Roundings of a result beside those of its sum: alpha, row_scale, bias, and the two outer scales that alpha rounds.
EXTRA_ROUNDINGS = 8


class Recorder(Interpreter):
    """Runs a form and keeps what every node gave."""

    def __init__(self, form: GraphModule) -> None:
        super().__init__(form, garbage_collect_values=False)

    def given(self, node: Node) -> dict[str, Any]:
        """The arguments of a call by name; of nodes, their values."""
        values = named_arguments(node)
        return {name: self.env[v] if isinstance(v, Node) else v for name, v in values.items()}


def fresh_rows(example: Tensor, outer: Tensor | None, format: str) -> Tensor:
    """Rows that are normal, tiny, zero, with one outlier, beyond what the outer scale carries, and half zero."""
    width = int(example.shape[-1])
    rows = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(width))
    rows[1] *= 1e-3
    rows[2] = 0.0
    rows[3, width // 2] *= 50.0
    rows[4] *= 8.0
    rows[5, : width // 2] = 0.0
    if outer is not None:
        rows *= float(outer) * LIMITS[format] / 8.0
    return rows.to(example.dtype).reshape(*(1 for _ in example.shape[:-2]), ROWS, width)


def quantized_weight(
    plain: Tensor, codes: Tensor, scales: Tensor | None, layout: str, outer: Tensor, rule: WeightRule,
    seen: Tensor | None,
) -> Callable[[slice], Tensor]:  # fmt: skip
    """What the codes of rows of a weight (N, K) stand for in fp64, once they are those of the plain one by its rule.

    outer  fp64, one or one a row; scales None: FP8
    """
    if outer.numel() not in (1, len(plain)) or not bool((outer.isfinite() & (outer > 0)).all()):
        raise Deviation(
            f"alpha has no outer scale of {tuple(plain.shape)} in it: {outer.flatten()[:4].tolist()}, ..."
        )
    if scales is None:
        if rule != "given":
            checked("the weight", check_fp8, plain, codes, outer, False)
        steps = outer.reshape(-1, 1).expand(len(codes), 1)
        return lambda rows: fp8_values(codes[rows]) * steps[rows]
    quantized = checked("the weight", blocks, codes, scales, layout, outer)
    checked("the weight", check_nvfp4, plain, quantized, rule, seen)
    return lambda rows: quantized.rows(rows).decoded()


def checked(what: str, check: Callable[..., T], *arguments: Any) -> T:
    """What the check of these arguments returns; its Deviation names `what`."""
    try:
        return check(*arguments)
    except Deviation as failure:
        raise Deviation(f"{what}: {failure}") from None


def product(left: Tensor, right: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """left @ right.T + bias in fp64, and how far fp32 may be off: K roundings of the magnitudes' sum, in any order."""
    expected = left @ right.T
    room = (left.abs() @ right.abs().T) * ((left.shape[1] + EXTRA_ROUNDINGS) * UNIT)
    if bias is not None:
        expected = expected + bias.double()
        room = room + bias.double().abs() * 2 * UNIT
    return expected, room + expected.abs() * 2 * UNIT


def product_by_rows(
    left: Tensor, weight: Callable[[slice], Tensor], count: int, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As `product`, with a weight of `count` rows of which a few are decoded at a time."""
    step = max(1, PRODUCT_ELEMENTS // left.shape[1])
    parts = [slice(start, start + step) for start in range(0, count, step)]
    pairs = [product(left, weight(rows), None if bias is None else bias[rows]) for rows in parts]
    expected, room = (torch.cat(values, dim=1) for values in zip(*pairs, strict=True))
    return expected, room


def within(expected: Tensor, got: Tensor, room: Tensor) -> Evidence:
    """Every element of a result within its room and the rounding to its dtype."""
    if got.shape != expected.shape:
        raise Deviation(f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}")
    difference = (got.double() - expected).abs()
    tiny = torch.finfo(torch.float32).tiny
    room = room + expected.abs() * torch.finfo(got.dtype).eps / 2 + tiny
    largest = expected.abs().max().clamp_min(tiny)
    share = difference / room
    if not bool((difference <= room).all()):
        worst = int(share.nan_to_num(float("inf")).argmax())
        raise Deviation(
            f"results are not the products of what the codes stand for: one is {got.flatten()[worst]:.6g}, expected "
            f"{expected.flatten()[worst]:.6g} within {room.flatten()[worst]:.1e}"
        )
    at = int(share.argmax())
    return Evidence(float(difference.flatten()[at] / largest), float(room.flatten()[at] / largest))
