"""Graphs as text: Python that reads like the model and runs; `dump_load` makes the same graph of it again."""

import itertools
import json
import math
import operator
import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.graph import _Namespace

from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.origin import module_path, source_code, source_line
from octavo.compiler.type_rules import declared

SHORT = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.float8_e4m3fn: "f8e4m3", torch.float8_e5m2: "f8e5m2", torch.float8_e8m0fnu: "f8e8m0",
    torch.complex128: "c128", torch.complex64: "c64", torch.bool: "b8",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8",
    torch.uint64: "u64", torch.uint32: "u32", torch.uint16: "u16", torch.uint8: "u8",
}  # fmt: skip
LONG = {short: dtype for dtype, short in SHORT.items()}
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in SHORT}
CONSTANTS = {
    **DTYPE_NAMES, "strided": torch.strided, "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format, "channels_last": torch.channels_last,
}  # fmt: skip
# Besides ops: items of tuples, and arithmetic on sizes.
CALLS: dict[str, Any] = {
    f"operator.{f.__name__}": f
    for f in (
        operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv,
        operator.mod, operator.neg, operator.pow, operator.abs, operator.eq, operator.ne, operator.lt,
        operator.le, operator.gt, operator.ge, operator.and_, operator.or_, operator.not_,
    )
}  # fmt: skip
CALLS |= {f"math.{f.__name__}": f for f in (math.ceil, math.floor, math.trunc)}
CALLS |= {
    f"torch.{f.__name__}": f
    for f in (
        torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_ite, torch.sym_sum,
    )
}  # fmt: skip
CALL_NAMES = {function: name for name, function in CALLS.items()}
NAMESPACES = ("aten", "octavo")
NO_SOURCE = "no source"
# model.norm | modeling.py:212  return x
ORIGIN = re.compile(r"(?:(?P<path>.*?) \| )?(?P<line>\S+:\d+)(?:  (?P<code>.*))?")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")
PREAMBLE = '''"""{header}"""

import math
import operator

import torch

import octavo.compiler.ops  # noqa: F401

inf, nan, device = math.inf, math.nan, torch.device
aten, octavo = torch.ops.aten, torch.ops.octavo
'''


def print_graph(graph_module: GraphModule, header: str = "") -> str:
    """A Python module: WEIGHTS (name -> type) and forward(w, inputs...), grouped by the user's lines.

    Behind a weight that holds a part of a quantised value stands which.
    """
    names = _Symbols()
    nodes = list(graph_module.graph.nodes)
    weights = {n.target: _type(n.meta["val"], names) for n in nodes if n.op == "get_attr"}
    lines = [PREAMBLE.format(header=_docstring(header)), "WEIGHTS = {"]
    parts = {name: f"  # {part}" for name, part in declared(graph_module).items()}
    lines += [f'    {json.dumps(name)}: "{kind}",{parts.get(name, "")}' for name, kind in weights.items()]
    lines += ["}", "", "", "def forward(", "    w,"]
    lines += [f'    {n.name}: "{_type(n.meta["val"], names)}",' for n in nodes if n.op == "placeholder"]
    lines.append("):")
    place = NO_SOURCE
    for node in nodes:
        if node.op == "call_function":
            origin = _origin(node)
            if origin != place:
                place = origin
                lines.append(f"    # {origin}")
            lines.append(f"    {node.name} = {_call(node)}  # {_type(node.meta.get('val'), names)}")
        elif node.op == "output":
            lines.append(f"    return {_argument(tuple(node.args[0]))}")
    return "\n".join(lines) + "\n"


def settle(graph_module: GraphModule) -> None:
    """Give the graph the order and the names that its text loads with, so that going on from either is the same.

    Weights come first, each once, then inputs, then calls; names that were given up may be given again.
    """
    graph = graph_module.graph
    kinds: dict[str, list[Node]] = {op: [] for op in ("get_attr", "placeholder", "call_function", "output")}
    weights: dict[Any, Node] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and weights.setdefault(node.target, node) is not node:
            node.replace_all_uses_with(weights[node.target])
        else:
            kinds[node.op].append(node)
    for node in [n for n in graph.nodes if n.op == "get_attr" and weights[n.target] is not n]:
        graph.erase_node(node)
    ordered = [node for nodes in kinds.values() for node in nodes]
    for first, second in itertools.pairwise(ordered):
        if first.next is not second:
            first.append(second)
    if graph._root.next is not ordered[0]:
        graph._root.append(ordered[0])
    names = _Namespace()
    for node in ordered:
        wanted = graph._target_to_str(node.target) if node.op == "get_attr" else node.name
        node.name = names.create_name(wanted, node)
    graph._graph_namespace = names


class _Symbols:
    """Readable names for symbolic sizes: the first input's length is T, others are numbered."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}

    def name(self, size: Any) -> str:
        if isinstance(size, int):
            return str(size)
        text = str(size)
        if not re.fullmatch(r"[a-z]+\d*", text):
            return re.sub(r"[a-z]+\d+", lambda m: self.name(m.group()), text)
        return self.names.setdefault(text, "T" if not self.names else f"D{len(self.names)}")


def _type(value: Any, names: _Symbols) -> str:
    if isinstance(value, Tensor):
        return f"{SHORT.get(value.dtype, str(value.dtype))}[{', '.join(names.name(d) for d in value.shape)}]"
    if isinstance(value, tuple | list):
        return ", ".join(_type(v, names) for v in value)
    return "size" if isinstance(value, torch.SymInt) else type(value).__name__


def _origin(node: Node) -> str:
    line = "  ".join(part for part in (source_line(node), source_code(node)) if part)
    return _comment(" | ".join(part for part in (module_path(node), line) if part)) or NO_SOURCE


def _docstring(text: str) -> str:
    text = _comment(text).replace('"""', "'''")
    return f"{text} " if text.endswith('"') else text


def _comment(text: str) -> str:
    """On one line whatever it holds, and without what would end a string."""
    return UNPRINTABLE.sub(" ", text).replace("\\", "/").strip()


def _call(node: Node) -> str:
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{_target(node.target)}({', '.join(arguments)})"


def _target(target: Any) -> str:
    if target in CALL_NAMES:
        return CALL_NAMES[target]
    if isinstance(target, torch._ops.OpOverload) and target.namespace in NAMESPACES:
        return str(target)
    raise IllegalGraphError(f"dump: {target} is not an op that has a name in the text form")


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return f"w[{json.dumps(value.target)}]" if value.op == "get_attr" else value.name
    if isinstance(value, list):
        return f"[{', '.join(map(_argument, value))}]"
    if isinstance(value, tuple):
        return f"({', '.join(map(_argument, value))}{',' if value else ''})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_argument(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({', '.join(map(_argument, (value.start, value.stop, value.step)))})"
    if isinstance(value, torch.device):
        return f'device("{value}")'
    return str(value) if isinstance(value, torch.dtype | float) else repr(value)
