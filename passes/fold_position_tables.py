"""What depends on a token's position alone becomes a table, looked up by position.

First `arange(T)` becomes the positions input: in the captured form, one sequence, they are equal, and in the
ragged form the positions are what it meant. The same integer for every token (a kind of segment) is made of positions
too. Then cosines, sines and learned position rows are evaluated for
every position. Refused: values in which one token's row depends on another's position (tables chosen by the
longest position).
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node

from octavo.compiler.errors import PassError
from octavo.compiler.origin import where
from octavo.passes.pattern import arguments, aten, is_constant
from octavo.passes.rewrite import Builder, Recipe, collect, extract, held, new_weight, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
ARANGES = (aten.arange.default, aten.arange.start, aten.arange.start_step)
# What they fill a tensor with; None where it is an argument.
FILLS = {aten.zeros.default: 0, aten.ones.default: 1, aten.full.default: None}
VIEWS = (aten.reshape.default, aten.permute.default, aten.expand.default)


def fold_position_tables(graph_module: GraphModule, max_model_len: int) -> PassReport:
    report = PassReport("fold_position_tables", "bitwise")
    positions = next(
        n for n in graph_module.graph.nodes if n.op == "placeholder" and n.name == "position_ids"
    )
    _replace_aranges(graph_module, positions, report)
    _replace_fills(graph_module, positions, report)
    _require_rows(graph_module, positions, max_model_len)
    for node in _frontier(graph_module, positions):
        if _lacks_values(graph_module, node, positions):
            report.reject(node, "it is made of weights that have no values yet (on the meta device)")
            continue
        table = _table(graph_module, node, positions, max_model_len)
        if table is None:
            report.reject(node, "a row depends on more than its own position")
            continue
        _look_up(graph_module, node, positions, *table, report)
    return report


def _replace_aranges(graph_module: GraphModule, positions: Node, report: PassReport) -> None:
    length = positions.meta["val"].shape[1]
    for node in list(graph_module.graph.nodes):
        if node.target not in ARANGES or not node.users:
            continue
        value = node.meta["val"]
        if value.dtype == torch.int64 and value.shape[0] == length and _starts_at_zero(node):
            report.sites.append(
                replace(
                    graph_module,
                    [node],
                    lambda b: [b.call(aten.reshape.default, positions, [-1])],
                    [positions],
                )
            )


def _require_rows(graph_module: GraphModule, positions: Node, max_model_len: int) -> None:
    """Raise PassError for learned rows that end before the longest sequence: kernels would read past them."""
    for node in graph_module.graph.nodes:
        if _is_lookup(node, positions) and node.args[1].meta["val"].shape[0] < max_model_len:
            raise _too_short(
                node, f"{node.args[1]} has {node.args[1].meta['val'].shape[0]} rows", max_model_len
            )


def _too_short(node: Node, what: str, max_model_len: int) -> PassError:
    return PassError(
        f"fold_position_tables: {what}, fewer than the {max_model_len} positions of the longest sequence "
        f"({where(node)}); pass a max_model_len that the model's positions cover"
    )


def _replace_fills(graph_module: GraphModule, positions: Node, report: PassReport) -> None:
    """zeros (1, T), say, which rows of a table are taken by."""
    sizes = [str(d) for d in positions.meta["val"].shape]
    for node in list(graph_module.graph.nodes):
        if node.target not in FILLS or not node.users or node.meta["val"].dtype is not torch.int64:
            continue
        if [str(d) for d in node.meta["val"].shape] != sizes:
            continue
        number = FILLS[node.target]
        value = node.args[1] if number is None else number

        def build(b: Builder, value: Any = value) -> list[Node]:
            return [b.call(aten.add.Tensor, b.call(aten.mul.Tensor, positions, 0), value)]

        report.sites.append(replace(graph_module, [node], build, [positions]))


def _starts_at_zero(node: Node) -> bool:
    if node.target is aten.arange.default:
        return True
    start, _, step = (*arguments(node), 1)[:3]
    return bool(start == 0 and step == 1)


def _frontier(graph_module: GraphModule, positions: Node) -> Iterable[Node]:
    """The last values that positions and constants alone determine, below any views of them."""
    alone = {positions}
    for node in graph_module.graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "call_function" and all(n in alone or is_constant(n) for n in inputs):
            if any(n in alone for n in inputs):
                alone.add(node)
    found: dict[Node, None] = {}
    for node in [n for n in graph_module.graph.nodes if n in alone]:  # a set has no order that lasts
        if node is not positions and any(user not in alone for user in node.users):
            while _is_view_of_rows(node) and node.all_input_nodes[0] in alone:
                node = node.all_input_nodes[0]
            if node is not positions and not _is_lookup(node, positions):
                found[node] = None
    return list(found)


def _is_lookup(node: Node, positions: Node) -> bool:
    """Rows by position as they are. Positions that are counted from two, say, need a table of their own."""
    if node.target is not octavo.embedding.default:
        return False
    ids = node.args[0]
    while isinstance(ids, Node) and ids.target in VIEWS:
        ids = ids.args[0]
    return ids is positions


def _is_view_of_rows(node: Node) -> bool:
    """A view, unless it is what makes rows of a value that has none."""
    if node.target not in VIEWS or len(node.all_input_nodes) > 1:
        return False
    return _width(node) is None or _width(node.all_input_nodes[0]) is not None


def _lacks_values(graph_module: GraphModule, node: Node, positions: Node) -> bool:
    leaves = collect([node], [positions])[0]
    return any(leaf.op == "get_attr" and held(graph_module, str(leaf.target)).is_meta for leaf in leaves)


def _width(node: Node) -> int | None:
    """Row width of a value with one row for each token and no other axis but axes of size one."""
    shape = node.meta["val"].shape
    if not node.meta["val"].dtype.is_floating_point or not isinstance(shape[-1], int):
        return None
    rest = [d for d in shape[:-1] if not (isinstance(d, int) and d == 1)]
    return shape[-1] if len(rest) == 1 and not isinstance(rest[0], int) else None


def _table(
    graph_module: GraphModule, node: Node, positions: Node, max_model_len: int
) -> tuple[torch.Tensor, Recipe] | None:
    """Rows 0..max_model_len-1 and how to make them, or None where single positions give other rows."""
    width = _width(node)
    if width is None:
        return None
    leaves = [positions, *(leaf for leaf in collect([node], [positions])[0] if leaf is not positions)]
    names = tuple(str(leaf.target) for leaf in leaves[1:])
    weights = [held(graph_module, name) for name in names]
    sub_graph = extract([node], leaves)

    def rows(weights: Sequence[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        (result,) = Interpreter(sub_graph).run(values[None], *weights)
        return result.reshape(len(values), width)  # type: ignore[no-any-return]

    recipe = Recipe(names, lambda sources: rows(sources, torch.arange(max_model_len)).contiguous())
    try:
        table = recipe.make(weights)
    except IndexError as error:
        raise _too_short(node, f"{node.name} takes rows that are not there", max_model_len) from error
    probe = torch.tensor([max_model_len - 1, 0, max_model_len // 2, 1])[: max(1, min(4, max_model_len))]
    alone = torch.cat([rows(weights, p[None]) for p in probe])
    return (table, recipe) if torch.equal(alone, table[probe]) and table.shape[0] == max_model_len else None


def _look_up(
    graph_module: GraphModule, node: Node, positions: Node, table: torch.Tensor, recipe: Recipe,
    report: PassReport,
) -> None:  # fmt: skip
    weight = new_weight(graph_module, f"positions.{node.name}", table, recipe)
    sizes = [d if isinstance(d, int) else -1 for d in node.meta["val"].shape]

    def build(b: Builder) -> list[Node]:
        rows = b.call(octavo.embedding.default, positions, weight)
        return [b.call(aten.reshape.default, rows, sizes)]

    site = replace(graph_module, [node], build, [positions])
    report.sites.append(dataclasses.replace(site, table=weight.name))
    report.notes[str(weight.target)] = f"{tuple(table.shape)} {table.dtype}"
