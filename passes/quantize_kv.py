"""Pages in the model's dtype  ->  pages of E4M3, or of E2M1 codes beside pages of their block scales.

What a plan says of each attention is done. All writes and reads of its pages get the multipliers: the outer scales of
keys and of values, weights of the graph. Latents share one multiplier; there are no NVFP4 pages of latents.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from octavo.compiler.dims import cache_number, caches_of
from octavo.compiler.errors import OptionError
from octavo.compiler.nvfp4 import BLOCK_ELEMENTS
from octavo.compiler.precision import SMALLEST_MULTIPLIER, PagePrecision, PrecisionPlan
from octavo.compiler.types import FP8, NVFP4, Part
from octavo.passes.rewrite import Builder, Site, new_weight, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
ATTENTIONS = (octavo.paged_attention.default, octavo.paged_mla_attention.default)


def quantize_kv(graph_module: GraphModule, plan: PrecisionPlan) -> PassReport:
    """Placeholders of pages keep their names, of another dtype; those of scales, k_scales_i, follow them."""
    report = PassReport("quantize_kv", "quantizes")
    for attention in [n for n in graph_module.graph.nodes if n.target in ATTENTIONS]:
        caches = caches_of(attention)
        number = cache_number(caches[0])
        precision = plan.pages.get(number)
        if caches[0].meta["val"].dtype in (torch.uint8, torch.float8_e4m3fn):
            continue  # done before
        reason = _refusal(attention, caches, precision)
        if reason is not None:
            report.reject(attention, reason)
            continue
        assert precision is not None
        pages = _make_pages(graph_module, number, caches, precision, attention)
        report.sites.append(_rewrite(graph_module, attention, caches, pages))
        _take_over(graph_module, caches, pages)
    return report


def _refusal(attention: Node, caches: list[Node], precision: PagePrecision | None) -> str | None:
    if precision is None or precision.format == "bf16":
        return "stays as it is" if precision is None else precision.reason
    if len(caches[0].users) != 2:
        return f"expected one write and one read of {caches[0].name}, got {len(caches[0].users)} of both"
    if precision.format == "fp8":
        return None
    if attention.target is octavo.paged_mla_attention.default:
        return (
            "latents have FP8 pages only: a latent is the keys and values of all heads, too much for 4 bits"
        )
    widths = [int(cache.meta["val"].shape[3]) for cache in caches]
    if any(width % BLOCK_ELEMENTS for width in widths):
        return f"NVFP4 has blocks of {BLOCK_ELEMENTS} elements, which rows of {widths} are no multiples of"
    return None


@dataclass(frozen=True)
class _Pages:
    """Placeholders that take over, and what the ops get beside them, by the names of their arguments."""

    caches: list[Node]
    extra: dict[str, Node]


def _make_pages(
    graph_module: GraphModule, number: int, caches: list[Node], precision: PagePrecision, attention: Node
) -> _Pages:
    def behind(last: Node, name: str, like: Node, dtype: torch.dtype, width: int) -> Node:
        with graph_module.graph.inserting_after(last):
            node = graph_module.graph.placeholder(name)
        value = like.meta["val"]
        node.meta["val"] = value.new_empty((*value.shape[:3], width), dtype=dtype)
        return node

    is_packed = precision.format == "nvfp4"
    dtype = torch.uint8 if is_packed else torch.float8_e4m3fn
    made: list[Node] = []
    for cache in caches:
        width = int(cache.meta["val"].shape[3])
        last = made[-1] if made else caches[-1]
        made.append(behind(last, cache.name, cache, dtype, width // 2 if is_packed else width))
    extra: dict[str, Node] = {}
    last = made[-1]
    for cache in caches if is_packed else ():
        kind, width = cache.name[0], int(cache.meta["val"].shape[3]) // BLOCK_ELEMENTS
        last = behind(last, f"{kind}_scales_{number}", cache, torch.float8_e4m3fn, width)
        extra[f"{kind}_scales"] = last
    values = [precision.k_multiplier, precision.v_multiplier][: len(caches)]
    name = "multiplier" if attention.target is octavo.paged_mla_attention.default else "multipliers"
    tensor, shape = _multipliers(number, values), (len(values), int(caches[0].meta["val"].shape[3]))
    part = Part(NVFP4(shape) if is_packed else FP8(shape), "outer", f"pages {number}")
    extra[name] = new_weight(graph_module, f"kv_{name}_{number}", tensor, part=part)
    return _Pages(made, extra)


def _multipliers(number: int, values: list[float]) -> Tensor:
    if not all(SMALLEST_MULTIPLIER <= value < math.inf for value in values):
        raise OptionError(
            f"quantize_kv: multipliers of the pages {number} must be finite and at least 2^-80, got {values}; the "
            "calibration text gave no usable keys or values"
        )
    return torch.tensor(values, dtype=torch.float32)


def _rewrite(graph_module: GraphModule, attention: Node, caches: list[Node], pages: _Pages) -> Site:
    (write,) = [user for user in caches[0].users if user is not attention]
    is_fused = write.target is octavo.rope_kv_write.default
    changed: dict[Any, Node] = dict(zip(caches, pages.caches, strict=True))

    def again(builder: Builder, node: Node) -> Node:
        assert callable(node.target)
        args = [changed.get(arg, arg) for arg in node.args]
        return builder.call(node.target, *args, **{**node.kwargs, **pages.extra})

    def build(builder: Builder) -> list[Node]:
        if not is_fused:
            builder.effects.append(again(builder, write))
            return [again(builder, attention)]
        changed[write] = again(builder, write)
        return [again(builder, attention), changed[write]]

    given = [n for node in (write, attention) for n in node.all_input_nodes if n is not write]
    inputs = [*given, *pages.caches, *pages.extra.values()]
    if is_fused:  # its result is an output beside that of the attention
        return replace(graph_module, [attention, write], build, inputs)
    return replace(graph_module, [attention], build, inputs, effects=[write])


def _take_over(graph_module: GraphModule, caches: list[Node], pages: _Pages) -> None:
    for old, new in zip(caches, pages.caches, strict=True):
        name = old.name
        graph_module.graph.erase_node(old)
        new.name = new.target = name
