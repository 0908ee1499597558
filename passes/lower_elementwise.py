"""Elementwise arithmetic that no fusion took  ->  octavo.pointwise, one for each connected piece.

A value with one reader is computed inside its reader, so a chain is one trip through memory. A piece that is only a
sum of two tensors is octavo.add. Not matched: operands of other shapes than the result's, a vector over its last axis
or one value for each of its rows, and pieces that read more than four tensors.
"""

import math
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Node

from octavo.compiler.ops.pointwise import DTYPES
from octavo.compiler.pointwise import MAX_DEPTH, MAX_LENGTH, NAMES
from octavo.passes.pattern import aten
from octavo.passes.rewrite import Builder, held, replace
from octavo.passes.rule import PassReport

octavo = torch.ops.octavo
NAMES_OF = {dtype: name for name, dtype in DTYPES.items()}
BINARY: dict[Any, str] = {
    aten.add.Tensor: "({} + {})", aten.sub.Tensor: "({} - {})", aten.mul.Tensor: "({} * {})",
    aten.div.Tensor: "({} / {})", aten.add.Scalar: "({} + {})", aten.sub.Scalar: "({} - {})",
    aten.mul.Scalar: "({} * {})", aten.div.Scalar: "({} / {})",
}  # fmt: skip
UNARY: dict[Any, str] = {
    aten.neg.default: "(-{})", aten.exp.default: "exp({})", aten.tanh.default: "tanh({})",
    aten.sigmoid.default: "sigmoid({})", aten.silu.default: "silu({})", aten.relu.default: "relu({})",
    aten.rsqrt.default: "rsqrt({})", aten.sqrt.default: "sqrt({})", aten._to_copy.default: "{}",
}  # fmt: skip
POWERS = {2: "({0} * {0})", 3: "({0} * {0} * {0})"}


class _Unsupported(Exception):
    """Why a node is not elementwise arithmetic of the grammar."""


@dataclass
class _Piece:
    """An expression over tensors; `leaves` in the order of their names, depth in levels of its syntax tree."""

    text: str
    leaves: list[Node] = field(default_factory=list)
    depth: int = 1

    @property
    def fits(self) -> bool:
        return len(self.leaves) <= len(NAMES) and len(self.text) <= MAX_LENGTH and self.depth <= MAX_DEPTH


def lower_elementwise(graph_module: GraphModule) -> PassReport:
    report = PassReport("lower_elementwise", "reassociates")
    pieces: dict[Node, _Piece] = {}
    for node in list(graph_module.graph.nodes):
        try:
            pieces[node] = _piece(graph_module, node, pieces)
        except _Unsupported as reason:
            if node.target in BINARY or node.target in UNARY:
                report.reject(node, str(reason))
    for node, piece in reversed(pieces.items()):  # readers first: a piece names the values that it reads
        if not all(_takes_in(pieces, user, node) for user in node.users):
            report.sites.append(_replace(graph_module, node, piece))
    return report


def _takes_in(pieces: dict[Node, _Piece], user: Node, node: Node) -> bool:
    """Whether the reader computes the value itself."""
    return user in pieces and node not in pieces[user].leaves


def _piece(graph_module: GraphModule, node: Node, pieces: dict[Node, _Piece]) -> _Piece:
    form, operands = _form(node)
    if len(operands) > 2 or node.kwargs.get("alpha", 1) != 1:
        raise _Unsupported("scaled sums are not in the grammar")
    shape = tuple(node.meta["val"].shape)
    if node.meta["val"].dtype not in NAMES_OF:
        raise _Unsupported(f"the result is {node.meta['val'].dtype}")
    merged = _merged(form, [_operand(graph_module, operand, shape, pieces) for operand in operands], shape)
    return (
        merged
        if merged.fits
        else _merged(form, [_operand(graph_module, o, shape, {}) for o in operands], shape)
    )


def _merged(form: str, parts: list[_Piece], shape: tuple[Any, ...]) -> _Piece:
    """The parts' expressions in one; tensors of the result's shape come first."""
    leaves = list(dict.fromkeys(leaf for part in parts for leaf in part.leaves))
    leaves.sort(key=lambda leaf: tuple(leaf.meta["val"].shape) != shape)
    if not leaves or tuple(leaves[0].meta["val"].shape) != shape:
        raise _Unsupported(f"no operand has the result's shape {shape}")
    text = form.format(*(_renamed(part, leaves) for part in parts))
    return _Piece(
        text, leaves, 2 + max(part.depth for part in parts)
    )  # two levels are the most that a form adds


def _form(node: Node) -> tuple[str, list[Any]]:
    if node.target in BINARY:
        return BINARY[node.target], list(node.args)
    if node.target in UNARY:
        return UNARY[node.target], [node.args[0]]
    if node.target is aten.gelu.default:
        tanh = node.kwargs.get("approximate", "none") == "tanh"
        return ("gelu_tanh({})" if tanh else "gelu({})"), [node.args[0]]
    if node.target is aten.pow.Tensor_Scalar and node.args[1] in POWERS:
        return POWERS[int(node.args[1])], [node.args[0]]  # type: ignore[arg-type]
    raise _Unsupported("not arithmetic of the grammar")


def _operand(
    graph_module: GraphModule, operand: Any, shape: tuple[Any, ...], pieces: dict[Node, _Piece]
) -> _Piece:
    if isinstance(operand, int | float):
        return _number(float(operand))
    if not isinstance(operand, Node) or not isinstance(operand.meta.get("val"), torch.Tensor):
        raise _Unsupported(f"{operand} is neither a number nor a tensor")
    value = operand.meta["val"]
    if value.dtype not in NAMES_OF:
        raise _Unsupported(f"{operand.name} is {value.dtype}, expected fp32 or bf16")
    if (
        operand.op == "get_attr"
        and value.numel() == 1
        and not held(graph_module, str(operand.target)).is_meta
    ):
        return _number(float(held(graph_module, str(operand.target))))
    if operand in pieces and len(operand.users) == 1 and tuple(value.shape) == shape:
        return pieces[operand]
    wanted = (shape, shape[-1:], (*shape[:-1], 1))
    if tuple(value.shape) not in wanted:
        raise _Unsupported(
            f"{operand.name} has shape {tuple(value.shape)}, expected {', '.join(map(str, wanted[:2]))} or {wanted[2]}"
        )
    return _Piece(NAMES[0], [operand])


def _number(value: float) -> _Piece:
    if not math.isfinite(value):
        raise _Unsupported(f"{value} is not in the grammar")
    return _Piece(repr(value), depth=2)  # a sign is a level


def _renamed(part: _Piece, leaves: list[Node]) -> str:
    """The part's text with its names replaced by those of the whole."""
    names = {NAMES[i]: f"\0{leaves.index(leaf)}" for i, leaf in enumerate(part.leaves)}
    words = re.split(r"([A-Za-z_][A-Za-z_0-9]*|\d[\d.]*(?:e[-+]?\d+)?)", part.text)
    text = "".join(names.get(word, word) for word in words)
    for i in reversed(range(len(leaves))):
        text = text.replace(f"\0{i}", NAMES[i] if i < len(NAMES) else f"x{i}")
    return text


def _replace(graph_module: GraphModule, node: Node, piece: _Piece) -> Any:
    def build(b: Builder) -> list[Node]:
        x, *rest = piece.leaves
        values = [leaf.meta["val"] for leaf in piece.leaves]
        if (
            piece.text == "(a + b)"
            and values[0].shape == values[1].shape
            and values[0].dtype == values[1].dtype
        ):
            return [b.call(octavo.add.default, x, rest[0])]
        padded = [*rest, *[None] * (len(NAMES) - 1 - len(rest))]
        return [b.call(octavo.pointwise.default, x, *padded, piece.text, NAMES_OF[node.meta["val"].dtype])]

    return replace(graph_module, [node], build, piece.leaves)
