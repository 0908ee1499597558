"""Prove sites of quantised experts: every weight by its format's rules, the mixture by what its codes stand for.

What the activation makes is quantised inside the op, so its codes are not to be seen. The reference quantises what fp64
makes of it instead; where fp32 may be off so far that another code or scale follows, the result has as much more room.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from octavo.compiler.legality import named_arguments
from octavo.compiler.ops.moe import gate
from octavo.compiler.precision import QuantizedWeight
from octavo.compiler.quantized_forms import (
    ROWS,
    UNIT,
    Recorder,
    fresh_rows,
    product,
    quantized_weight,
    within,
)
from octavo.compiler.quantized_values import SLACK, quantize_wide
from octavo.compiler.verify import Evidence
from octavo.passes.rewrite import Site

octavo = torch.ops.octavo
FORMATS: dict[Any, str] = {
    octavo.nvfp4_moe.default: "nvfp4", octavo.nvfp4_weight_moe.default: "", octavo.fp8_moe.default: "fp8",
}  # fmt: skip
EXPERTS = tuple(FORMATS)


def prove_experts(site: Site, call: Node, weights: Sequence[QuantizedWeight]) -> Evidence:
    """weights: of gate and up, and of down. Raises Deviation."""
    names = [n.name for n in site.before.graph.nodes if n.op == "placeholder"]
    examples = dict(zip(names, site.examples, strict=True))
    (plain,) = [n for n in site.before.graph.nodes if n.op == "call_function"]
    recorder = Recorder(site.before)
    recorder.env = {n: n.name for n in site.before.graph.nodes if n.op == "placeholder"}
    name_of = recorder.given(plain)
    count = len(site.constants[name_of["gate_up"]])
    slots = examples[name_of["experts"]].shape[-1]
    generator = torch.Generator().manual_seed(0)
    outer = _constant(site, call, "x_outer")
    x = fresh_rows(examples[name_of["x"]], outer, FORMATS[call.target])
    chosen = ((torch.arange(ROWS)[:, None] + torch.arange(slots)) % count)[None]
    shares = torch.rand(1, ROWS, slots, generator=generator) + 0.1
    values = {**site.constants, name_of["x"]: x, name_of["experts"]: chosen, name_of["weights"]: shares}
    after = Recorder(site.after)
    (result,) = after.run(*(values[name] for name in names))
    # What is not quantised is as the plain form has it.
    kept = {name: values.get(value, value) for name, value in name_of.items() if name not in PARTS}
    given = {**after.given(call), **kept}
    plain_weights = [site.constants[name_of[part]] for part in ("gate_up", "down")]
    total = torch.zeros(ROWS, plain_weights[1].shape[1], dtype=torch.float64)
    room = torch.zeros_like(total)
    for expert in range(count):
        both = [
            _weight(p, given, part, expert, w)
            for p, part, w in zip(plain_weights, PARTS, weights, strict=True)
        ]
        rows, columns = torch.where(chosen[0] == expert)
        if len(rows):
            made, off = _expert(x[0, rows], both, given, expert, FORMATS[call.target])
            share = shares[0, rows, columns, None].double()
            total.index_add_(0, rows, made * share)
            room.index_add_(0, rows, (off + made.abs() * 2 * slots * UNIT) * share)
    return within(total, result[0], room)


PARTS = ("gate_up", "down")


def _constant(site: Site, call: Node, argument: str) -> Tensor | None:
    node = named_arguments(call).get(argument)
    return site.constants[node.name] if isinstance(node, Node) else None


def _weight(
    plain: Tensor, given: Mapping[str, Any], part: str, expert: int, weight: QuantizedWeight
) -> Tensor:
    """What the codes of one expert stand for, its gates before its ups."""
    codes, scales = given[part][expert], given.get(f"{part}_scale")
    wanted, outer = plain[expert], _outer(given, part, expert)
    alpha = given[f"{part}_alpha"][expert].double() / (1.0 if outer is None else float(outer))
    rows = alpha.repeat_interleave(len(wanted) // len(alpha)) if len(alpha) > 1 else alpha
    turned = part == "gate_up" and bool(given["interleaved"])
    if turned:
        wanted, rows = _in_turn(wanted), _in_turn(rows) if len(rows) > 1 else rows
    layout = str(given.get("layout"))
    decoded = quantized_weight(
        wanted, codes, None if scales is None else scales[expert], layout, rows, weight.rule, weight.seen
    )
    made = decoded(slice(None))
    return torch.cat((made[0::2], made[1::2])) if turned else made


def _in_turn(rows: Tensor) -> Tensor:
    """Gates and ups, in halves, in turn."""
    return torch.stack(rows.chunk(2), 1).flatten(0, 1)


def _outer(given: Mapping[str, Any], part: str, expert: int) -> Tensor | None:
    outer = given.get("x_outer" if part == "gate_up" else "hidden_outer")
    if outer is None:
        return None
    value: Tensor = outer if part == "gate_up" else outer[expert]
    return value


def _expert(
    x: Tensor, both: Sequence[Tensor], given: Mapping[str, Any], expert: int, format: str
) -> tuple[Tensor, Tensor]:
    """What one expert makes of its rows (R, H), and how far fp32 and its roundings may be off."""

    def bias(part: str) -> Tensor | None:
        value = given[f"{part}_bias"]
        return None if value is None else value[expert]

    exact = x.double()
    left, unsure = _quantized(
        exact * (1 - SLACK), exact * (1 + SLACK), _outer(given, "gate_up", expert), format
    )
    projected, room = product(left, both[0], bias("gate_up"))
    low, high = _gated(projected, room + unsure @ both[0].abs().T, given, x.dtype)
    hidden, unsure = _quantized(low, high, _outer(given, "down", expert), format)
    made, room = product(hidden, both[1], bias("down"))
    return made, room + unsure @ both[1].abs().T


def _gated(
    projected: Tensor, room: Tensor, given: Mapping[str, Any], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Least and largest of what the activation may make, rounded to dtype: over the corners of gate and up."""
    half = projected.shape[-1] // 2
    corners = []
    for first in (-1.0, 1.0):
        for second in (-1.0, 1.0):
            shift = torch.cat((room[:, :half] * first, room[:, half:] * second), -1)
            corners.append(gate(projected + shift, given["activation"], given["limit"], given["alpha"]))
    several = torch.stack(corners)
    off = several.abs().amax(0) * 16 * UNIT  # the exponential's and the products' own roundings
    return (several.amin(0) - off).to(dtype).double(), (several.amax(0) + off).to(dtype).double()


def _quantized(low: Tensor, high: Tensor, outer: Tensor | None, format: str) -> tuple[Tensor, Tensor]:
    """The middle of what values between low and high are quantised to, and how far it may be off."""
    if not format:
        return (low + high) / 2, (high - low).abs() / 2
    made = torch.stack([quantize_wide(x, like, outer, format) for x in (low, high) for like in (low, high)])
    return (made.amin(0) + made.amax(0)) / 2, (made.amax(0) - made.amin(0)) / 2
