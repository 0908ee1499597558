"""Graphs as text: Python that reads like the model, runs, and loads back to the same graph.

The text is parsed, never executed, when it is loaded.
"""

import ast
import operator
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import octavo.compiler.ops  # noqa: F401  (registers the ops that the text names)
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.origin import module_path, source_code, source_line
from octavo.passes.rewrite import held, hold, set_meta

SHORT = {
    torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16", torch.float16: "f16",
    torch.int64: "i64", torch.int32: "i32", torch.bool: "b8", torch.uint8: "u8",
}  # fmt: skip
LONG = {short: dtype for dtype, short in SHORT.items()}
DTYPE_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in SHORT}
FLOATS = ("inf", "nan")
CONSTANTS = {
    **DTYPE_NAMES, "strided": torch.strided, "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
}  # fmt: skip
# Besides ops: items of tuples, and arithmetic on sizes.
CALLS: dict[str, Any] = {
    f"operator.{f.__name__}": f
    for f in (
        operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv,
        operator.mod, operator.neg, operator.pow,
    )
}  # fmt: skip
CALLS |= {f"torch.{f.__name__}": f for f in (torch.sym_int, torch.sym_float, torch.sym_max, torch.sym_min)}
CALL_NAMES = {function: name for name, function in CALLS.items()}
PREAMBLE = '''"""{header}"""

import math
import operator

import torch

import octavo.compiler.ops  # noqa: F401

inf, nan, device = math.inf, math.nan, torch.device
aten, octavo = torch.ops.aten, torch.ops.octavo
'''


def print_graph(graph_module: GraphModule, header: str = "") -> str:
    """A Python module: WEIGHTS (name -> type) and forward(w, inputs...), grouped by the user's lines."""
    names = _Symbols()
    lines = [PREAMBLE.format(header=header.replace("\\", "/")), "WEIGHTS = {"]
    nodes = list(graph_module.graph.nodes)
    for node in nodes:
        if node.op == "get_attr":
            lines.append(f'    "{node.target}": "{_type(node.meta["val"], names)}",')
    inputs = [n for n in nodes if n.op == "placeholder"]
    lines += ["}", "", "", "def forward("]
    lines.append("    w,")
    lines += [f'    {n.name}: "{_type(n.meta["val"], names)}",' for n in inputs]
    lines.append("):")
    place = ""
    for node in nodes:
        if node.op == "call_function":
            origin = _origin(node)
            if origin and origin != place:
                place = origin
                lines.append(f"    # {origin}")
            lines.append(f"    {node.name} = {_call(node)}  # {_type(node.meta.get('val'), names)}")
        elif node.op == "output":
            lines.append(f"    return ({', '.join(_argument(a) for a in node.args[0])},)")
    return "\n".join(lines) + "\n"


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
    return " | ".join(part for part in (module_path(node), line) if part)


def _call(node: Node) -> str:
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    return f"{_target(node.target)}({', '.join(arguments)})"


def _target(target: Any) -> str:
    if target in CALL_NAMES:
        return CALL_NAMES[target]
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    raise IllegalGraphError(f"dump: {target} is not an op that has a name in the text form")


def _argument(value: Any) -> str:
    if isinstance(value, Node):
        return f'w["{value.target}"]' if value.op == "get_attr" else value.name
    if isinstance(value, list | tuple):
        inner = ", ".join(_argument(v) for v in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner},)"
    if isinstance(value, torch.device):
        return f'device("{value}")'
    return str(value) if isinstance(value, torch.dtype | float) else repr(value)


def load_graph(text: str, weights: Mapping[str, Tensor] | nn.Module | None = None) -> GraphModule:
    """The graph that `text` describes. Without `weights` they are on the meta device.

    Raises IllegalGraphError with the line of anything that `print_graph` does not write.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise IllegalGraphError(f"dump: the text is not Python: {error or 'nested too deep'}") from None
    declared: Any = None
    function: ast.FunctionDef | None = None
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and _is_name(statement.targets[0], "WEIGHTS"):
            declared = _literal(statement.value)
        elif isinstance(statement, ast.FunctionDef) and statement.name == "forward":
            function = statement
    if not isinstance(declared, dict) or function is None:
        raise IllegalGraphError("dump: expected WEIGHTS and a function forward; is this a dump of octavo?")
    try:
        return _Loader(declared, weights).load(function)
    except RecursionError:
        raise IllegalGraphError("dump: an argument is nested too deep") from None


def _literal(value: ast.expr) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, TypeError, SyntaxError, RecursionError) as error:
        raise IllegalGraphError(f"dump: line {value.lineno}: expected a literal ({error})") from None


def _is_name(value: ast.expr, name: str) -> bool:
    return isinstance(value, ast.Name) and value.id == name


class _Loader:
    """Builds a graph from the parsed text."""

    def __init__(self, declared: dict[str, str], weights: Mapping[str, Tensor] | nn.Module | None) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.graph = Graph()
        self.root = nn.Module()
        self.nodes: dict[str, Node] = {}
        self.sizes: dict[str, Any] = {}
        self.weights = {name: self._weight(name, kind, weights) for name, kind in declared.items()}

    def load(self, function: ast.FunctionDef) -> GraphModule:
        for argument in function.args.args[1:]:
            if not isinstance(argument.annotation, ast.Constant):
                raise IllegalGraphError(f"dump: line {argument.lineno}: input {argument.arg} has no type")
            node = self.graph.placeholder(argument.arg)
            node.meta["val"] = self._input(argument.arg, str(argument.annotation.value))
            self.nodes[argument.arg] = node
        for statement in function.body:
            self._statement(statement)
        return GraphModule(self.root, self.graph)

    def _weight(self, name: str, kind: str, weights: Mapping[str, Tensor] | nn.Module | None) -> Node:
        dtype, sizes = _parse_type(kind)
        shape = [int(s) for s in sizes]
        if weights is None:
            tensor = torch.empty(shape, dtype=dtype, device="meta")
        else:
            tensor = held(weights, name) if isinstance(weights, nn.Module) else weights[name]
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise IllegalGraphError(
                f"dump: weight {name} is {tensor.dtype} {list(tensor.shape)}, the text says {kind}"
            )
        hold(self.root, name, tensor)
        node = self.graph.get_attr(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def _input(self, name: str, kind: str) -> Any:
        dtype, sizes = _parse_type(kind)
        static = [s.isdigit() for s in sizes]
        # Sizes differ from each other so that no two symbols are taken for one.
        concrete = [
            int(s) if fixed else 11 + i for i, (s, fixed) in enumerate(zip(sizes, static, strict=True))
        ]
        example = torch.empty(concrete, dtype=dtype)
        dims = [DimDynamic.STATIC if fixed else DimDynamic.DYNAMIC for fixed in static]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        value = self.mode.from_tensor(example, source=ConstantSource(name), symbolic_context=context)
        shape = [self.sizes.setdefault(s, d) for s, d in zip(sizes, value.shape, strict=True)]
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
            self.graph.output(tuple(self._value(e) for e in statement.value.elts))
            return
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            raise IllegalGraphError(f"dump: line {statement.lineno}: expected `name = op(...)` or a return")
        (target,) = statement.targets
        if not isinstance(target, ast.Name):
            raise IllegalGraphError(f"dump: line {statement.lineno}: expected one name on the left")
        call = statement.value
        args = tuple(self._value(a) for a in call.args)
        kwargs = {str(k.arg): self._value(k.value) for k in call.keywords}
        node = self.graph.create_node("call_function", _resolve(call.func), args, kwargs, name=target.id)
        try:
            set_meta(node, self.mode)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            text = f"{ast.unparse(call.func)} does not take these arguments"
            raise IllegalGraphError(f"dump: line {statement.lineno}: {text} ({_first_line(error)})") from None
        self.nodes[target.id] = node

    def _value(self, value: ast.expr) -> Any:
        if isinstance(value, ast.Name):
            if value.id in FLOATS:
                return float(value.id)
            if value.id not in self.nodes:
                raise IllegalGraphError(f"dump: line {value.lineno}: {value.id} is not defined above")
            return self.nodes[value.id]
        if isinstance(value, ast.Subscript):
            name = _literal(value.slice)
            if name not in self.weights:
                raise IllegalGraphError(f"dump: line {value.lineno}: {name} is not in WEIGHTS")
            return self.weights[name]
        if isinstance(value, ast.List):
            return [self._value(e) for e in value.elts]
        if isinstance(value, ast.Tuple):
            return tuple(self._value(e) for e in value.elts)
        if (
            isinstance(value, ast.UnaryOp)
            and isinstance(value.operand, ast.Name)
            and value.operand.id in FLOATS
        ):
            return -float(value.operand.id)
        if isinstance(value, ast.Attribute) and _is_name(value.value, "torch") and value.attr in CONSTANTS:
            return CONSTANTS[value.attr]
        if isinstance(value, ast.Call) and _is_name(value.func, "device"):
            return torch.device(_literal(value.args[0]))
        return _literal(value)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _parse_type(kind: str) -> tuple[torch.dtype, list[str]]:
    found = re.fullmatch(r"(\w+)\[(.*)\]", kind)
    if found is None or found.group(1) not in LONG:
        raise IllegalGraphError(f"dump: {kind!r} is not a type such as bf16[1, T, 576]")
    return LONG[found.group(1)], [s.strip() for s in found.group(2).split(",") if s.strip()]


def _resolve(function: ast.expr) -> Any:
    name = ast.unparse(function)
    if name in CALLS:
        return CALLS[name]
    parts = name.split(".")
    if len(parts) == 3 and parts[0] in ("aten", "octavo"):
        try:
            return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
        except AttributeError:
            pass
    raise IllegalGraphError(f"dump: line {function.lineno}: {name} is not an op of aten or octavo")
