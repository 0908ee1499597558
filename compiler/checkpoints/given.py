"""Weights of a lowered graph as a checkpoint has them: the bytes of its files, put together as the passes did.

A weight that passes made of others (q, k and v in one, parts of one) consists of their rows. Which rows is found by
making it of row numbers; that its values are those of the graph's weight is checked.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.checkpoints.checkpoint import Checkpoint
from octavo.compiler.checkpoints.sources import made_rows, modules_of
from octavo.compiler.checkpoints.stored import StoredWeight
from octavo.compiler.errors import CheckpointError
from octavo.compiler.nvfp4 import E4M3_MAX
from octavo.compiler.precision import Format, PagePrecision, PrecisionPlan, ProductPrecision, QuantizedWeight
from octavo.passes.assign_precision import holds
from octavo.passes.products import PAGES, Product, find_pages, find_products, source_weights
from octavo.passes.rewrite import Recipe

# Formats whose inputs are quantised.
SCALED = ("nvfp4", "fp8")


@dataclass(frozen=True)
class GivenWeights:
    """A WeightQuantizer of what the checkpoint holds, and the plan that goes with it.

    dtype    of the model's weights, which the checkpoint was decoded to
    sources  modules of the checkpoint by the model's weight: one, or those of all experts in the order of rows
    """

    checkpoint: Checkpoint
    recipes: Mapping[str, Recipe]
    dtype: torch.dtype
    sources: dict[str, list[str]] = field(default_factory=dict)

    def plan(self, graph_module: GraphModule, layout: str = "linear") -> PrecisionPlan:
        """layout: of block scales, as the target's kernels read them.

        Raises CheckpointError for a product that is quantised in parts or that the target's kernels cannot hold, and
        for a weight that no product takes.
        """
        plan = PrecisionPlan()
        used: set[str] = set()
        for product in find_products(graph_module):
            modules = self._modules_of(product)
            if modules:
                precision = self._precision(product, modules)
                if refusal := holds(product, precision.format, layout):
                    raise CheckpointError(f"{product.name} ({modules[0]}): {precision.format}: {refusal}")
                plan.products[product.name] = precision
                used.update(modules)
            else:
                plan.products[product.name] = ProductPrecision("bf16", reason="plain in the checkpoint")
        left = set(self.checkpoint) - used
        reached = self._reached(graph_module)
        if missed := sorted(left & reached):
            raise CheckpointError(
                f"{missed[0]}: quantised in the checkpoint, and no product of the model reads it alone "
                f"({len(missed)} such); it would be computed with its plain values"
            )
        if left - reached:
            self._note(
                f"{len(left - reached)} quantised weights are of no part of the model: {min(left - reached)}"
            )
        if by_token := [
            one for one in plan.products.values() if one.format in SCALED and not one.input_scale
        ]:
            self._note(f"{len(by_token)} products have no scales of their inputs: each row has its own")
        if self.checkpoint.pages != "bf16":
            self._plan_pages(graph_module, plan)
        return plan

    def _plan_pages(self, graph_module: GraphModule, plan: PrecisionPlan) -> None:
        for pages in find_pages(graph_module):
            if pages.is_latent:
                self._note(
                    f"pages {pages.number}: latents stay as they are; the checkpoint's scales are of keys"
                )
                continue
            attention = next(iter(pages.modules)).removesuffix(f".{PAGES}")
            keys, values = self.checkpoint.multipliers(attention)
            plan.pages[pages.number] = PagePrecision(self.checkpoint.pages, keys, values, "from checkpoint")

    def _modules_of(self, product: Product) -> list[str]:
        """The modules whose weights a product consists of; none where all are plain."""
        leaves = [leaf for name in product.weights for leaf in source_weights(self.recipes, name)]
        found = [self._source(leaf) for leaf in leaves]
        modules = [module for some in found for module in some]
        if modules and not all(found):
            plain = leaves[[bool(some) for some in found].index(False)]
            raise CheckpointError(
                f"{product.name}: {modules[0]} is quantised in the checkpoint and {plain} is not, but both are one "
                "product of the model; quantise both or neither"
            )
        return modules

    def _source(self, leaf: str) -> list[str]:
        """Modules of the checkpoint that a weight of the model is made of, in order; none where it is plain."""
        if leaf not in self.sources:
            self.sources[leaf] = modules_of(leaf, self.checkpoint.groups)
        return self.sources[leaf]

    def _precision(self, product: Product, modules: Sequence[str]) -> ProductPrecision:
        formats: set[tuple[Format, bool]] = {
            (self.checkpoint.groups[m].format, self.checkpoint.groups[m].static_inputs) for m in modules
        }
        if len(formats) > 1:
            raise CheckpointError(
                f"{product.name}: {', '.join(modules[:3])} are one product of the model, and the checkpoint has them "
                f"in {' and '.join(sorted(format for format, _ in formats))}; quantise them alike"
            )
        ((format, static),) = formats
        scales = [
            self._input_scale(source_of, name) if static else None
            for name, source_of in self._by_weight(product, modules)
        ]
        hidden = scales[1] if product.kind == "moe" else None
        return ProductPrecision(format, scales[0], hidden, "from checkpoint")

    def _by_weight(self, product: Product, modules: Sequence[str]) -> list[tuple[str, list[str]]]:
        leaves = {name: source_weights(self.recipes, name) for name in product.weights}
        return [
            (name, [m for m in modules if any(m in self._source(leaf) for leaf in found)])
            for name, found in leaves.items()
        ]

    def _input_scale(self, modules: Sequence[str], name: str) -> float:
        """One outer scale of an input that several weights read: the largest holds all."""
        found = [self.checkpoint.input_scale(module) for module in modules]
        if len(set(found)) > 1:
            self._note(
                f"{name}: scales of its input from {min(found):.4g} to {max(found):.4g} in {len(found)} weights; the "
                "largest is taken"
            )
        return max(found)

    def _note(self, text: str) -> None:
        if text not in self.checkpoint.notes:
            self.checkpoint.notes.append(text)

    def _reached(self, graph_module: GraphModule) -> set[str]:
        """Modules of the checkpoint whose weights the graph holds."""
        nodes = graph_module.graph.find_nodes(op="get_attr")
        leaves = {leaf for node in nodes for leaf in source_weights(self.recipes, str(node.target))}
        return {module for leaf in leaves for module in self._source(leaf)}

    def __call__(self, name: str, weight: Tensor, format: Format) -> QuantizedWeight:
        leaves = source_weights(self.recipes, name)
        stored = [[self.checkpoint.read(module) for module in self._source(leaf)] for leaf in leaves]
        starts: dict[str, int] = {}
        total = 0
        for leaf, parts in zip(leaves, stored, strict=True):
            starts[leaf] = total
            total += sum(_rows(part) for part in parts)
        numbers = {
            leaf: _numbers(starts[leaf], parts, weight.dim())
            for leaf, parts in zip(leaves, stored, strict=True)
        }
        rows = made_rows(name, self.recipes, numbers, total)
        flat = [part for parts in stored for part in parts]
        result = _gather(flat, rows, weight.shape)
        _check_values(name, result, weight, self.dtype)
        return result


def _rows(part: StoredWeight) -> int:
    return part.codes.numel() // part.codes.shape[-1]


def _numbers(start: int, parts: Sequence[StoredWeight], rank: int) -> Tensor:
    """Row numbers in the shape of the model's weight: (N, K), of experts (E, N, K); MXFP4's are stored turned."""
    count, length = sum(map(_rows, parts)), parts[0].shape[-1]
    numbers = torch.arange(start, start + count, dtype=torch.int32)
    if rank == 2:
        return numbers[:, None].expand(count, length)
    experts = parts[0].shape[0] if len(parts[0].shape) == 3 else _count_experts(parts)
    stacked = numbers.view(experts, -1, 1).expand(-1, -1, length)
    return stacked.transpose(1, 2) if parts[0].layout == "mxfp4" else stacked


def _count_experts(parts: Sequence[StoredWeight]) -> int:
    """Parts are those of expert 0, of expert 1, ...: as many as have the first one's last name."""
    last = parts[0].name.rpartition(".")[2]
    return sum(part.name.rpartition(".")[2] == last for part in parts)


def _gather(stored: Sequence[StoredWeight], rows: Tensor, shape: Sequence[int]) -> QuantizedWeight:
    """The parts of these rows of all stored weights, one after another."""

    def take(tensors: Iterable[Tensor]) -> Tensor:
        flat = [tensor.reshape(-1, tensor.shape[-1]).view(torch.uint8) for tensor in tensors]
        return torch.cat(flat)[rows].view(*shape[:-1], -1)

    is_fp8 = stored[0].scales is None
    outer = torch.cat([part.outer_rows() for part in stored])[rows].view(*shape[:-1])
    first: Any = outer[..., :1]
    if bool((outer == first).all()):
        outer = outer[..., 0]
    codes = take(part.codes for part in stored)
    if is_fp8:
        return QuantizedWeight(codes.view(torch.float8_e4m3fn), None, outer, rule="given")
    scales = take(part.scales for part in stored if part.scales is not None).view(torch.float8_e4m3fn)
    return QuantizedWeight(codes, scales, outer, recipe=stored[0].layout, e4m3_max=E4M3_MAX, rule="given")


def _check_values(name: str, given: QuantizedWeight, weight: Tensor, dtype: torch.dtype) -> None:
    """What the parts stand for is what the graph's weight holds, to the bit."""
    whole = StoredWeight(name, "octavo", "nvfp4", given.codes, given.scales, given.outer)
    rows, start = weight.reshape(-1, weight.shape[-1]), 0
    for part in whole.values():
        expected = part.to(dtype).to(weight.dtype)
        if not torch.equal(expected, rows[start : start + len(part)]):
            raise CheckpointError(
                f"{name}: the checkpoint's codes stand for other values than the model's weight; the model is not the "
                "one that was loaded from the checkpoint"
            )
        start += len(part)


def values_of(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every tensor of a model by its name in the files, quantised ones decoded: what loads as a plain checkpoint."""
    values = {name: checkpoint.shards[name] for name in checkpoint.plain()}
    for module in checkpoint:
        weight = checkpoint.read(module)
        if weight.layout == "mxfp4":
            values[module] = weight.dequantize(dtype).transpose(-2, -1).contiguous()
        else:
            values[f"{module}.weight"] = weight.dequantize(dtype)
    return values
