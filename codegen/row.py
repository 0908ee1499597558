"""One row of the selection table, and what rows read off a node. Knows no template and no feature."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

from octavo.codegen.kernel import Arg, KernelSpec, pointer
from octavo.compiler.dims import dim_names, dtype_name, makes_logits, to_dim
from octavo.compiler.errors import CodegenError
from octavo.compiler.legality import named_arguments
from octavo.compiler.origin import where
from octavo.compiler.program import Dim
from octavo.compiler.target import Target


@dataclass(frozen=True)
class Row:
    """A way to compute one op on one target family.

    op      name of the octavo op
    reject  why the row cannot serve this node on this target, with the numbers; None if it can
    spec    the kernel to generate

    How emit binds the arguments of a KernelSpec, by name (an ending `_ptr` or `_desc` is ignored):
    pointer, descriptor  an argument of the op's schema -> that tensor's buffer; `out`, or `out_0`, `out_1`,
                         ... for several results -> the buffer written; a name of the spec's scratch -> that
    scalar               the argument's own `value`, an expression in the step's sizes (see `row_count`)
    """

    name: str
    op: str
    reject: Callable[[fx.Node, Target], str | None]
    spec: Callable[[fx.Node, Target], KernelSpec]


def always(node: fx.Node, target: Target) -> None:
    """The predicate of a row that serves every node."""


def op_name(node: fx.Node) -> str | None:
    """ "linear" for a call of octavo::linear; None for any other node."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and target.namespace == "octavo":
        return str(target._schema.name.split("::")[1])
    return None


def tensor(node: fx.Node, name: str) -> torch.Tensor:
    """The fake tensor of a tensor argument."""
    value = named_arguments(node)[name].meta["val"]
    assert isinstance(value, torch.Tensor), f"argument {name} of {node} is no tensor"
    return value


def dtype_of(node: fx.Node, name: str) -> str:
    """The dtype of a tensor argument, by its name in programs."""
    return dtype_name(tensor(node, name))


def static_size(node: fx.Node, name: str, axis: int) -> int:
    """A size that kernels are specialised on. Raises CodegenError if it is symbolic."""
    size = tensor(node, name).shape[axis]
    if not isinstance(size, int):
        raise CodegenError(
            f"select: axis {axis} of {name} must have a fixed size, got {size} ({where(node)})"
        )
    return size


def result_dtype(node: fx.Node) -> str:
    """The dtype in which the (first) result is stored; logits are handed over in fp32."""
    return "fp32" if makes_logits(node) else dtype_name(first_result(node))


def first_result(node: fx.Node) -> torch.Tensor:
    """The fake tensor of the only or the first result."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, tuple | list) else value
    assert isinstance(first, torch.Tensor), f"{node} has no tensor result"
    return first


def row_count(node: fx.Node) -> Dim:
    """Rows of the (first) result over all axes but the last: "T", "T * 4" for a head each, or "L"."""
    sizes = first_result(node).shape[:-1]
    return to_dim(math.prod(sizes[1:], start=sizes[0]), dim_names(node.graph))


def token_count(node: fx.Node) -> Dim:
    """Axis 1 of the (first) result: "T", or "L" once gather_logits picked rows."""
    return to_dim(first_result(node).shape[1], dim_names(node.graph))


def has_tree(node: fx.Node) -> bool:
    """Whether an attention reads masks of trees of drafts."""
    return named_arguments(node)["tree"] is not None


def tree_argument(node: fx.Node) -> tuple[Arg, ...]:
    return (pointer("tree", "i64"),) if has_tree(node) else ()
