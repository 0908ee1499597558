"""Proofs of sites that quantise: right ones hold for every format, layout and rule, and seeded faults are named."""

import contextlib
import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from quantized_sites import LINEAR, MOE, PAGES, Change, graph_of, plan_of, prove, quantized
from stages import BF16, FP32
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler import nvfp4, nvfp4_weights
from octavo.compiler.errors import PassError
from octavo.compiler.ops import paging as paging_ops
from octavo.compiler.ops import quantize as quantize_ops
from octavo.compiler.ops import quantized_linear as linear_ops
from octavo.compiler.pipeline import Step
from octavo.compiler.precision import (
    Format,
    QuantizedWeight,
    WeightRule,
)
from octavo.compiler.quantizing import QuantSettings, quantize
from octavo.passes.rewrite import Builder, held

octavo = torch.ops.octavo


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize("rule", ["nearest", "search", "feedback"])
@pytest.mark.parametrize("scale", [None, 0.01])
def test_products_of_nvfp4_are_proven(scale: float | None, rule: WeightRule, layout: str) -> None:
    dtype = FP32 if layout == "linear" else BF16
    report = prove(LINEAR, "nvfp4", scale, rule, layout, dtype, count=99)
    assert report.proof.sites == report.matched == 9
    assert 0 < report.proof.worst < report.proof.bound < 1e-2


@pytest.mark.parametrize(("format", "scale"), [("fp8", None), ("fp8", 0.05), ("nvfp4_weight_only", None)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_products_of_other_formats_are_proven(
    format: Format, scale: float | None, dtype: torch.dtype
) -> None:
    report = prove(LINEAR, format, scale, dtype=dtype, count=99)
    assert report.proof.sites == 9 and 0 < report.proof.worst < report.proof.bound


@pytest.mark.parametrize("layout", ["linear", "swizzled_128x4"])
@pytest.mark.parametrize(
    ("format", "scale"),
    [("nvfp4", None), ("nvfp4", 0.01), ("fp8", None), ("fp8", 0.05), ("nvfp4_weight_only", None)],
)
def test_experts_are_proven(format: Format, scale: float | None, layout: str) -> None:
    report = prove(MOE, format, scale, layout=layout)
    assert report.proof.sites == report.matched == 2
    assert 0 < report.proof.worst < report.proof.bound < 0.2


@pytest.mark.parametrize("format", ["fp8", "nvfp4"])
@pytest.mark.parametrize("model", ["llama", "experts", "fused", "latent"])
def test_pages_are_proven(format: Format, model: str) -> None:
    if (format, model) == ("nvfp4", "latent"):
        return  # there are none
    report = prove(PAGES, format, model=model)
    assert report.proof.sites >= 1 and report.matched >= 1
    assert 0 < report.proof.worst < report.proof.bound < 1e-2


def test_weights_are_let_go_as_soon_as_they_are_proven() -> None:
    graph_module = graph_of("llama")
    plan = plan_of(graph_module, "nvfp4", None, 99)
    alive: list[int] = []

    def quantizer(name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        held = [n for n, _ in graph_module.named_buffers()] + [n for n, _ in graph_module.named_parameters()]
        alive.append(sum(other in held for other in plan.products))
        return quantized(name, weight, format)

    report = quantize(graph_module, QuantSettings(plan, quantizer, "linear"), [LINEAR])[0]
    assert alive == list(range(9, 0, -1))
    assert not any(site.constants for site in report.sites) and graph_module.meta["sites"] == {}


# Faults of weights.


def scaled(factor: float) -> Change:
    """Other block scales under the same codes."""
    return lambda w: replace(w, scales=(w.scales.float() * factor).to(torch.float8_e4m3fn))  # type: ignore[union-attr]


def one_scale_higher(w: QuantizedWeight) -> QuantizedWeight:
    assert w.scales is not None
    raw = w.scales.view(torch.uint8).clone()
    raw[3, 1] += 1
    return replace(w, scales=raw.view(torch.float8_e4m3fn))


def outer_times(factor: float) -> Change:
    return lambda w: replace(w, outer=w.outer * factor)


def other_rows(w: QuantizedWeight) -> QuantizedWeight:
    assert w.scales is not None
    return replace(w, scales=w.scales.view(torch.uint8).roll(1, 0).view(torch.float8_e4m3fn))


def other_blocks(w: QuantizedWeight) -> QuantizedWeight:
    assert w.scales is not None
    return replace(w, scales=w.scales.view(torch.uint8).roll(1, 1).view(torch.float8_e4m3fn))


def swapped_nibbles(w: QuantizedWeight) -> QuantizedWeight:
    return replace(w, codes=w.codes >> 4 | w.codes << 4)


def one_swapped_byte(w: QuantizedWeight) -> QuantizedWeight:
    codes = w.codes.clone()
    row, column = (int(i) for i in ((codes >> 4) != (codes & 15)).nonzero()[7])
    codes[row, column] = (codes[row, column] >> 4) | (codes[row, column] << 4)
    return replace(w, codes=codes)


def one_sign(w: QuantizedWeight) -> QuantizedWeight:
    codes = w.codes.clone()
    row, column = (int(i) for i in ((codes & 7) > 0).nonzero()[-1])
    codes[row, column] ^= 8
    return replace(w, codes=codes)


def already_swizzled(w: QuantizedWeight) -> QuantizedWeight:
    assert w.scales is not None
    return replace(w, scales=nvfp4.swizzle(w.scales).reshape(w.scales.shape))


def shard_with_anothers_outer(w: QuantizedWeight) -> QuantizedWeight:
    """As if the first half of the rows had been quantised apart, and only the other's outer scale kept."""
    outer = w.outer.reshape(-1).expand(len(w.codes)).clone()
    outer[: len(outer) // 2] *= 1.25
    return replace(w, outer=outer)


def rolled_outer(w: QuantizedWeight) -> QuantizedWeight:
    return replace(w, outer=w.outer.roll(1))


def rolled_codes(w: QuantizedWeight) -> QuantizedWeight:
    return replace(w, codes=w.codes.view(torch.uint8).roll(1, 0).view(w.codes.dtype))


def zero_outer(w: QuantizedWeight) -> QuantizedWeight:
    return replace(w, outer=torch.zeros_like(w.outer))


def higher(scales: Tensor, codes: int) -> Tensor:
    """Scales that lie so many codes above."""
    return (scales.view(torch.uint8).long() + codes).clamp(0, 0x7E).to(torch.uint8).view(torch.float8_e4m3fn)


def neighbours(right: Any, cache: Tensor, pages: Tensor, length: int) -> Tensor:
    """Scales of the head beside."""
    found: Tensor = right(cache, pages, length)
    return (
        found.view(torch.uint8).roll(1, 0).view(found.dtype) if found.dtype is torch.float8_e4m3fn else found
    )


def patched(owner: Any, name: str, function: Callable[..., Any]) -> Callable[[], Any]:
    """A function exchanged; it is called with what it replaces first."""
    right = getattr(owner, name)
    return lambda: mock.patch.object(owner, name, functools.partial(function, right))


def call_changed(op: Any, change: Callable[..., tuple[Any, ...]]) -> Callable[[], Any]:
    """Each call of op that a pass makes gets other arguments."""
    original = Builder.call

    def call(builder: Builder, target: Any, *args: Any, **options: Any) -> Node:
        given = change(*args) if target is op else args
        return original(builder, target, *given, **options)

    return lambda: mock.patch.object(Builder, "call", call)


def truncated(right: Any, x: Tensor) -> Tensor:
    """Codes toward zero."""
    magnitude = torch.tensor(nvfp4.MAGNITUDES)
    code = torch.bucketize(x.abs().contiguous(), magnitude, right=True) - 1
    return (code.clamp(0, 7) | torch.signbit(x).long() << 3).to(torch.uint8)


def ties_up(right: Any, x: Tensor) -> Tensor:
    codes: Tensor = right(x * (1 + 2.0**-12))
    return codes


def without_amax(right: Any, x: Tensor, outer: Tensor) -> Tensor:
    """Scales of the mean magnitude."""
    mean = x.float().unflatten(-1, (-1, 16)).abs().mean(-1)
    scales: Tensor = (mean / 6 / outer).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    return scales


def unrounded(right: Any, x: Tensor, outer: Tensor, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Codes of the scale before it was rounded to E4M3."""
    scales = nvfp4.block_scales(x, outer) if scales is None else scales
    wanted = (x.float().unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True) / 6).clamp_min(1e-30)
    codes = nvfp4.pack(nvfp4.encode_e2m1((x.float().unflatten(-1, (-1, 16)) / wanted).flatten(-2)))
    return codes, scales


def halved(w: QuantizedWeight) -> QuantizedWeight:
    """FP8 outer scales half as large; what does not fit is cut off."""
    outer = w.outer / 2
    values = (w.codes.float() * w.outer[:, None] / outer[:, None]).clamp(-448, 448)
    return replace(w, codes=values.to(torch.float8_e4m3fn), outer=outer)


def given(w: QuantizedWeight) -> QuantizedWeight:
    return replace(w, rule="given")


def alpha_of(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], Any]:
    """alpha comes out as `change` of it and of the input's outer scale."""
    module = importlib.import_module("octavo.passes.quantize_linear")

    def hold(right: Any, graph_module: GraphModule, name: str, weight: Any, scale: Node, layout: str) -> Any:
        parts = right(graph_module, name, weight, scale, layout)
        alpha = held(graph_module, str(parts["alpha"].target))
        alpha.copy_(change(alpha, held(graph_module, str(scale.target))))
        return parts

    return patched(module, "_hold", hold)


def with_argument(index: int, value: Any) -> Callable[..., tuple[Any, ...]]:
    return lambda *args: (*args[:index], value, *args[index + 1 :])


def swapped_alphas(args: tuple[Any, ...], first: int, second: int) -> tuple[Any, ...]:
    mixed = list(args)
    mixed[first], mixed[second] = args[second], args[first]
    return tuple(mixed)


def experts_rolled(w: QuantizedWeight) -> QuantizedWeight:
    """(Of one expert:) scales of its other half of rows."""
    assert w.scales is not None
    raw = w.scales.view(torch.uint8)
    return replace(w, scales=raw.roll(len(raw) // 2, 0).view(torch.float8_e4m3fn))


@dataclass(frozen=True)
class Mutant:
    """A fault of a weight's parts (change), or of what the pass or an op calls (patch)."""

    name: str
    said: str
    change: Change | None = None
    patch: Callable[[], Any] | None = None
    step: Step = LINEAR
    format: Format = "nvfp4"
    scale: float | None = 0.01
    rule: WeightRule = "search"
    layout: str = "linear"
    model: str = ""

    def verdict(self) -> str:
        with (self.patch or contextlib.nullcontext)():
            try:
                prove(
                    self.step, self.format, self.scale, self.rule, self.layout, change=self.change, model=self.model
                )  # fmt: skip
            except PassError as error:
                return str(error)
        return "survived"


NVFP4_OP, FP8_OP, MOE_OP = octavo.nvfp4_linear.default, octavo.fp8_linear.default, octavo.nvfp4_moe.default
MUTANTS = [
    Mutant("block scales 1.25x, nearest", "the weight: .* block scales are not those", scaled(1.25), rule="nearest"),
    Mutant("block scales 1.25x, search", "the weight: ", scaled(1.25)),
    Mutant("block scales 1.25x, feedback", "the weight: ", scaled(1.25), rule="feedback"),
    Mutant("block scales 1.25x, weight only", "the weight: ", scaled(1.25), format="nvfp4_weight_only", scale=None),
    Mutant("one block scale a code higher", "the weight: 1 block", one_scale_higher, rule="nearest"),
    Mutant("one block scale a code higher, search", "the weight: ", one_scale_higher),
    Mutant("one block scale a code higher, feedback", "the weight: ", one_scale_higher, rule="feedback"),
    Mutant("scales halved, codes to match", "block scales are not", rule="nearest",
           patch=patched(nvfp4, "block_scales", lambda right, x, o: (right(x, o).float() / 2).to(torch.float8_e4m3fn))),
    Mutant("a search that takes too large scales", "lose more than|block scales",
           patch=patched(nvfp4_weights, "_search_rows", lambda right, w, o, i: higher(right(w, o, i), 3))),
    Mutant("outer 1.25x", "the weight: ", outer_times(1.25)),
    Mutant("outer 0.8x, feedback", "the weight: ", outer_times(0.8), rule="feedback"),
    Mutant("outer zero", "no outer scale", zero_outer),
    Mutant("scales of the next row", "the weight: ", other_rows),
    Mutant("scales of the next block", "the weight: ", other_blocks),
    Mutant("scales of the next row, feedback", "the weight: ", other_rows, rule="feedback"),
    Mutant("nibbles swapped", r"codes of \d+ are not next to their values", swapped_nibbles),
    Mutant("nibbles swapped, feedback", "the weight: ", swapped_nibbles, rule="feedback"),
    Mutant("one byte's nibbles swapped", "[12] codes of", one_swapped_byte),
    Mutant("one byte's nibbles swapped, feedback", "the weight: ", one_swapped_byte, rule="feedback"),
    Mutant("one sign", "1 codes of", one_sign, rule="nearest"),
    Mutant("rows of codes rolled", "the weight: ", rolled_codes),
    Mutant("scales swizzled, read as linear", "the weight: ", already_swizzled),
    Mutant("scales linear, read as swizzled", "the weight: |does not run", layout="swizzled_128x4",
           patch=lambda: mock.patch("octavo.passes.quantize_linear.swizzle", lambda s: s.reshape(-1))),
    Mutant("scales of x in the other layout", "x: |does not run",
           patch=call_changed(octavo.quantize.default, with_argument(3, "swizzled_128x4"))),
    Mutant("a shard with another's outer scale", "the weight: ", shard_with_anothers_outer),
    Mutant("outer scales of other rows, fp8", "the weight: ", rolled_outer, format="fp8", scale=None),
    Mutant("codes truncated", "not next to", rule="nearest",
           patch=patched(nvfp4, "encode_e2m1", truncated)),
    Mutant("values past ties", "not next to", rule="nearest", patch=patched(nvfp4, "encode_e2m1", ties_up)),
    Mutant("codes of the unrounded scale", "not next to", rule="nearest", patch=patched(nvfp4, "quantize", unrounded)),
    Mutant("x: scales of the mean", "x: .*block scales are not those", given,
           patch=patched(nvfp4, "block_scales", without_amax)),
    Mutant("x: codes of the unrounded scale", "x: .*not next to", given, patch=patched(nvfp4, "quantize", unrounded)),
    Mutant("x: outer scales of other rows", "outer scales of x's rows", scale=None,
           patch=patched(quantize_ops, "outer_scales", lambda right, x, f: right(x, f).roll(1, -2))),
    Mutant("x: outer scales left out", "multiplied without them", scale=None,
           patch=call_changed(NVFP4_OP, with_argument(5, None))),
    Mutant("x: outer scales left out, fp8", "multiplied without them", scale=None, format="fp8",
           patch=call_changed(FP8_OP, with_argument(3, None))),
    Mutant("fp8 rows rolled", "the weight: ", rolled_codes, format="fp8", scale=None),
    Mutant("fp8 outer 1.25x", "the weight: ", outer_times(1.25), format="fp8", scale=0.05),
    Mutant("fp8 outer half, saturating", "which E4M3 holds to 448", halved, format="fp8", scale=None),
    Mutant("alpha without the input's scale", "the weight: ", patch=alpha_of(lambda a, x: a / x)),
    Mutant("alpha forgotten", "the weight: ", patch=alpha_of(lambda a, x: torch.ones_like(a))),
    Mutant("alpha without the weight's scale", "the weight: ", patch=alpha_of(lambda a, x: x.expand_as(a))),
    Mutant("alpha forgotten, foreign bytes", "results are not", given,
           patch=patched(linear_ops, "finish", lambda right, s, a, r, b: right(s, torch.ones_like(a), r, b))),
    Mutant("alpha twice", "results are not",
           patch=patched(linear_ops, "finish", lambda right, s, a, r, b: right(s * a, a, r, b))),
    Mutant("sums in bf16", "results are not",
           patch=patched(linear_ops, "finish", lambda right, s, a, r, b: right(s.bfloat16().float(), a, r, b))),
    Mutant("bias dropped", "results are not", model="experts", patch=call_changed(NVFP4_OP, with_argument(6, None))),
    Mutant("experts: scales of other rows", "the weight: ", experts_rolled, step=MOE),
    Mutant("experts: nibbles swapped", "the weight: ", swapped_nibbles, step=MOE),
    Mutant("experts: outer 1.25x", "the weight: ", outer_times(1.25), step=MOE),
    Mutant("experts: gates and ups not in turn", "the weight: |results", step=MOE, layout="swizzled_128x4",
           patch=call_changed(MOE_OP, with_argument(17, False))),
    Mutant("experts: a bias dropped", "results are not", step=MOE, patch=call_changed(MOE_OP, with_argument(12, None))),
    Mutant("experts: another limit", "results are not", step=MOE, patch=call_changed(MOE_OP, with_argument(14, 0.5))),
    Mutant("experts: x quantised by row, alphas by tensor", "the weight: ", step=MOE,
           patch=call_changed(MOE_OP, with_argument(3, None))),
    Mutant("pages: codes truncated", "keys: .*not next to", step=PAGES, patch=patched(nvfp4, "encode_e2m1", truncated)),
    Mutant("pages: codes of the unrounded scale", "keys: .*not next to", step=PAGES,
           patch=patched(nvfp4, "quantize", unrounded)),
    Mutant("pages: scales of the mean", "keys: .*block scales", step=PAGES,
           patch=patched(nvfp4, "block_scales", without_amax)),
    Mutant("pages: read with another multiplier", "results are not", step=PAGES,
           patch=patched(paging_ops, "page_values", lambda right, c, s, m, *rest: right(c, s, m and m * 1.25, *rest))),
    Mutant("pages: read without a multiplier, fp8", "results are not", step=PAGES, format="fp8",
           patch=patched(paging_ops, "page_values", lambda right, c, s, m, *rest: right(c, s, m and m / m, *rest))),
    Mutant("pages: scales of another head", "results are not", step=PAGES,
           patch=patched(paging_ops, "gather_pages", neighbours)),
]  # fmt: skip


def test_every_fault_is_caught(print_at_end: Callable[[str, list[str]], None]) -> None:
    verdicts = {mutant.name: mutant.verdict() for mutant in MUTANTS}
    place = (
        r"quantize_\w+: the rewrite of node \w+, model\.layers\.0\..*\.py:\d+ is not what its formats allow: "
    )
    caught = [m for m in MUTANTS if re.search(f"{place}(.*)({m.said})", verdicts[m.name])]
    rows = [f"{m.name:<48} {verdicts[m.name].partition('allow: ')[2][:90]}" for m in MUTANTS]
    print_at_end(f"faults of quantised sites: caught {len(caught)} / seeded {len(MUTANTS)}", rows)
    assert {m.name: verdicts[m.name] for m in MUTANTS if m not in caught} == {}
