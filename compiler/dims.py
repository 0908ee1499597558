"""The memory of a lowered graph: sizes by name, dtypes, which nodes rename memory and which leave it."""

import operator
import re
from typing import Any

import sympy
import torch
from torch import fx

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.program import FEATURES, Dim, step_input

DTYPE_NAMES = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8", torch.uint8: "u8",
    torch.int32: "i32", torch.int64: "i64",
}  # fmt: skip
# What requests keep between steps: keys and values, and of NVFP4 pages the block scales.
CACHE_NAME = re.compile(r"[kv]_(cache|scales)_\d+")


def caches_of(node: fx.Node) -> list[fx.Node]:
    """The pages that a call reads or writes, in the order of its arguments."""
    return [n for n in node.all_input_nodes if n.op == "placeholder" and CACHE_NAME.fullmatch(n.name)]


def cache_number(cache: fx.Node) -> int:
    """Which attention's, counted from the first."""
    return int(cache.name.rpartition("_")[2])


def dtype_name(tensor: torch.Tensor) -> str:
    """ "fp32", "bf16", "fp8" (E4M3), "u8", "i32" or "i64". Raises IllegalGraphError for any other dtype."""
    if tensor.dtype not in DTYPE_NAMES:
        raise IllegalGraphError(f"dtype must be one of {', '.join(DTYPE_NAMES.values())}, got {tensor.dtype}")
    return DTYPE_NAMES[tensor.dtype]


def dim_names(graph: fx.Graph) -> dict[sympy.Symbol, str]:
    """The graph's size symbols -> T, R, L, P, num_pages, read off its step inputs and caches."""
    names: dict[sympy.Symbol, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        shape = node.meta["val"].shape
        if (filled := step_input(node.name)) is not None:
            # Token inputs are (1, T) in the graph and (T,) in the program.
            expected = filled[1]
            pairs = zip(expected, shape[len(shape) - len(expected) :], strict=True)
        elif node.name == FEATURES:
            pairs = zip(("T",), shape[1:2], strict=True)
        elif CACHE_NAME.fullmatch(node.name):
            pairs = zip(("num_pages",), shape[:1], strict=True)
        else:
            continue
        for name, size in pairs:
            symbol = as_expression(size)
            if isinstance(symbol, sympy.Symbol) and str(name).isidentifier():
                names.setdefault(symbol, str(name))
    return names


def as_expression(size: Any) -> sympy.Expr:
    """A torch size as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def to_dim(size: Any, names: dict[sympy.Symbol, str]) -> Dim:
    """A torch size as an int, or as an expression in the names of a step's sizes."""
    expression = as_expression(size)
    if expression.is_Integer:
        return int(expression)
    unknown = expression.free_symbols - set(names)
    if unknown:
        raise IllegalGraphError(f"size {expression} holds {sorted(map(str, unknown))}, known are {names}")
    return str(expression.subs({symbol: sympy.Symbol(name) for symbol, name in names.items()}))


def is_view(node: fx.Node) -> bool:
    """Whether the node only renames memory: a view or a reshape of a contiguous tensor."""
    return node.target in (torch.ops.aten.view.default, torch.ops.aten.reshape.default)


def makes_logits(node: fx.Node) -> bool:
    """Whether the result is the graph's first output, or this rank's part of it: such values are stored in fp32."""
    gathers = [u for u in node.users if u.target is torch.ops.octavo.all_gather.default]
    return any(output_number(one) == 0 for one in (node, *gathers))


def leaves_graph(node: fx.Node) -> bool:
    """Whether the result is an output of the graph, possibly through views: such memory belongs to the caller."""
    return output_number(node) is not None


def output_number(node: fx.Node) -> int | None:
    """Which output of the graph the result is, possibly through views: 0 the logits, then features; None: none."""
    for user in node.users:
        if user.op == "output":
            return list(user.args[0]).index(node)  # type: ignore[arg-type]
        if is_view(user) and (number := output_number(user)) is not None:
            return number
    return None


def output_name(number: int) -> str:
    """Of an output's buffer."""
    return f"{FEATURES}_{number - 1}" if number else "logits"


def leaving_items(node: fx.Node) -> dict[int, int]:
    """Of a call with several results, which of them are outputs of the graph: its index -> the output's number."""
    items = [user for user in node.users if user.target is operator.getitem]
    found = {user.args[1]: output_number(user) for user in items}
    return {index: number for index, number in found.items() if number is not None}  # type: ignore[misc]
