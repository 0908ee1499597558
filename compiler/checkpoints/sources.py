"""Which rows of which of the model's own weights a weight of a lowered graph consists of, and whose files hold them.

Passes join rows of weights, cut and turn them. What they did is found by doing it to row numbers.
"""

from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from octavo.compiler.errors import CheckpointError
from octavo.compiler.precision import QuantizedWeight
from octavo.passes.products import PAGES, Product, find_pages, find_products, source_weights
from octavo.passes.rewrite import Recipe, recipes

# Modules of experts that a model stacks in one parameter, as files name them: gates and ups, or downs.
STACKED = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}


def modules_of(leaf: str, known: Container[str]) -> list[str]:
    """The modules of files that a weight of the model is made of, in the order of its rows; none of `known`: []."""
    module = leaf.removesuffix(".weight")
    if module in known:
        return [module]
    prefix, _, name = leaf.rpartition(".")
    for parent in (prefix, prefix.replace(".mlp.", ".block_sparse_moe.")):
        for ends in STACKED.get(name, ()):
            found: list[str] = []
            while f"{parent}.{len(found) // len(ends)}.{ends[0]}" in known:
                expert = len(found) // len(ends)
                found += [f"{parent}.{expert}.{end}" for end in ends]
            if found:
                return found
    return []


def made_rows(name: str, known: Mapping[str, Recipe], numbers: Mapping[str, Tensor], total: int) -> Tensor:
    """The row numbers (rows,) that a made weight has, of all experts one after another.

    numbers  of the rows of each source, in its shape; total: of all of them
    Raises CheckpointError where passes did anything else than choose rows.
    """
    made = _made(name, known, numbers)
    rows = made[..., :1]
    if not bool((made == rows).all()) or not bool(((rows >= 0) & (rows < total)).all()):
        raise CheckpointError(
            f"{name}: the passes made this weight of others in another way than row by row, so the checkpoint's codes "
            "cannot be kept"
        )
    return rows.long().reshape(-1)


def _made(name: str, known: Mapping[str, Recipe], numbers: Mapping[str, Tensor]) -> Tensor:
    recipe = known.get(name)
    if recipe is None:
        return numbers[name]
    return recipe.make([_made(source, known, numbers) for source in recipe.sources])


class Sources:
    """What a lowered graph's products consist of: made before they are quantised, asked afterwards.

    shapes  of the model's own weights
    """

    def __init__(self, graph_module: GraphModule, shapes: Mapping[str, Sequence[int]]) -> None:
        self.recipes = dict(recipes(graph_module))
        self.shapes = shapes
        self.products: list[Product] = find_products(graph_module)
        self.pages = {
            one.number: min(one.modules).removesuffix(f".{PAGES}") for one in find_pages(graph_module)
        }

    def as_dict(self, plan: Mapping[str, Any]) -> dict[str, Any]:
        """As the manifest has it, beside the plan.

        weights  of every quantised weight its product, and its rows in order as [weight, first row, rows, step]; none
                 where passes did more than choose rows
        pages    the module of their attention
        """
        quantised = [one for one in self.products if plan["products"][one.name]["format"] != "bf16"]
        return {
            "weights": {
                name: {"product": one.name, "rows": self._rows(name)}
                for one in quantised
                for name in one.weights
            },
            "pages": {str(number): module for number, module in self.pages.items()},
        }

    def _rows(self, name: str) -> list[list[Any]]:
        leaves = source_weights(self.recipes, name)
        if not all(leaf in self.shapes and len(self.shapes[leaf]) in (2, 3) for leaf in leaves):
            return []
        numbers, starts, total = {}, [], 0
        for leaf in leaves:
            *rows, length = self.shapes[leaf]
            count = int(torch.Size(rows).numel())
            first = torch.arange(total, total + count, dtype=torch.int32)
            numbers[leaf] = first.view(*rows, 1).expand(*rows, length)
            starts.append(total)
            total += count
        try:
            return _runs(made_rows(name, self.recipes, numbers, total), leaves, starts)
        except CheckpointError:
            return []


def _runs(rows: Tensor, leaves: Sequence[str], starts: Sequence[int]) -> list[list[Any]]:
    """Rows of one leaf that follow each other at one distance, together."""
    owners = torch.searchsorted(torch.tensor(starts), rows, right=True) - 1
    ends = ((rows.diff() != 1) | (owners.diff() != 0)).nonzero().reshape(-1) + 1
    if len(ends) < len(rows) // 4:  # none are turned
        bounds = [0, *ends.tolist(), len(rows)]
        firsts = [(int(owners[start]), int(rows[start])) for start in bounds[:-1]]
        return [
            [leaves[owner], row - starts[owner], end - start, 1]
            for (owner, row), start, end in zip(firsts, bounds, bounds[1:], strict=False)
        ]
    runs: list[list[Any]] = []
    for number, owner in zip(rows.tolist(), owners.tolist(), strict=True):
        leaf, row = leaves[owner], number - starts[owner]
        last: list[Any] = runs[-1] if runs else ["", 0, 0, 1]
        if last[0] == leaf and last[2] == 1 and row > last[1]:
            last[2:] = [2, row - last[1]]
        elif last[0] == leaf and last[2] > 1 and row == last[1] + last[2] * last[3]:
            last[2] += 1
        else:
            runs.append([leaf, row, 1, 1])
    return runs


def outer_runs(weight: QuantizedWeight) -> list[list[float]]:
    """Outer scales of the rows, of all experts one after another: [rows, scale] of those that follow each other."""
    rows = weight.codes.numel() // weight.codes.shape[-1]
    values, counts = weight.outer.reshape(-1).float().unique_consecutive(return_counts=True)
    each = rows // weight.outer.numel()
    return [[count * each, value] for count, value in zip(counts.tolist(), values.tolist(), strict=True)]
