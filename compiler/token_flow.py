"""How a value lies along the tokens, and what rules read off a call. Knows no op; see token_rules."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import sympy
import torch
from torch.fx import Node


class Depends(IntEnum):
    """What a value depends on: nothing, the number of tokens, their positions, or the tokens themselves."""

    NOTHING, LENGTH, POSITIONS, TOKENS = range(4)


@dataclass(frozen=True)
class Flow:
    """Where the axes of the tokens are.

    axis     the axis of the tokens; None where the value has none
    keys     a second axis of tokens: a value for each pair of them, such as scores or a mask
    softmax  the keys have been through a softmax
    lost     the axis was not followed (tokens sorted by expert, say)
    """

    depends: Depends = Depends.NOTHING
    axis: int | None = None
    keys: int | None = None
    softmax: bool = False
    lost: bool = False

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(axis for axis in (self.axis, self.keys) if axis is not None)

    @property
    def is_pair(self) -> bool:
        return self.keys is not None

    @property
    def matters(self) -> bool:
        """Whether mixing it along the tokens is state. Masks and tables are made of positions in any way."""
        return self.depends is Depends.TOKENS and not self.lost

    def at(self, axes: Sequence[int]) -> "Flow":
        """With its axes in other places; with fewer or more of them."""
        if len(axes) > 2:
            return Flow(self.depends, lost=True)
        axis, keys = (*axes, None, None)[:2]
        return replace(self, axis=axis, keys=keys, softmax=self.softmax and keys is not None)

    def moved(self, to: Callable[[int], int | None]) -> "Flow":
        """With its axes renumbered; an axis that goes to None is gone."""
        return self.at([new for new in map(to, self.axes) if new is not None])


CONSTANT = Flow()


class Mixes(Exception):
    """Carries the sentence that says how an op mixes tokens."""


@dataclass(frozen=True)
class Call:
    """One call, the flows of what it reads, and the size of the token axis."""

    node: Node
    flows: dict[Node, Flow]
    length: Any

    @property
    def name(self) -> str:
        """`matmul` of aten::matmul."""
        return op_name(self.node).split("::")[-1]

    def argument(self, name: str) -> Any:
        """An argument by the schema's name, its default where it is not given, None where there is no such."""
        target = self.node.target
        parameters = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else []
        for index, parameter in enumerate(parameters):
            if parameter.name == name and index < len(self.node.args):
                return self.node.args[index]
            if parameter.name == name:
                return self.node.kwargs.get(name, parameter.default_value)
        return None

    def operand(self, index: int = 0) -> Flow:
        value = self.node.args[index] if index < len(self.node.args) else None
        return self.flows[value] if isinstance(value, Node) else CONSTANT

    def rank(self, index: int = 0) -> int:
        return len(sizes(self.node.args[index]))

    def dims(self, name: str = "dim") -> list[int]:
        """Axes of the first operand that an argument names; all of them where it names none."""
        given, rank = self.argument(name), self.rank()
        if given is None or given == []:
            return list(range(rank))
        return [d % rank for d in (given if isinstance(given, list | tuple) else [given])]

    @property
    def depends(self) -> Depends:
        return max((self.flows[n].depends for n in self.node.all_input_nodes), default=Depends.NOTHING)

    @property
    def lost(self) -> Flow:
        return Flow(self.depends, lost=True)

    @property
    def is_integer(self) -> bool:
        """Counts and ids: routing tables, not hidden states."""
        value = self.node.args[0].meta["val"] if isinstance(self.node.args[0], Node) else None
        return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


def op_name(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    return getattr(target, "__name__", str(target))


def sizes(value: Any) -> tuple[Any, ...]:
    """Sizes of a node's tensor, of the first of several."""
    val = value.meta.get("val") if isinstance(value, Node) else value
    val = val[0] if isinstance(val, tuple | list) and val else val
    return tuple(val.shape) if isinstance(val, torch.Tensor) else ()


def is_tensor(node: Node) -> bool:
    """Whether its value is a tensor, or several."""
    value = node.meta.get("val")
    return isinstance(value[0] if isinstance(value, tuple | list) and value else value, torch.Tensor)


def expression(size: Any) -> Any:
    """A size that can be compared without tying the graph to the numbers seen first."""
    return sympy.Integer(size) if isinstance(size, int) else size.node.expr
