"""Text -> graph: what `print_graph` writes, or what a user made of it. Parsed, never executed."""

import ast
from collections.abc import Mapping
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import octavo.compiler.ops  # noqa: F401  (registers the ops that the text names)
from octavo.compiler.dump import CALLS, CONSTANTS, LONG, NAMESPACES, NO_SOURCE, ORIGIN
from octavo.compiler.errors import IllegalGraphError
from octavo.compiler.type_rules import declared as declared_parts
from octavo.compiler.types import Part, Role, part_from_text
from octavo.passes.rewrite import held, hold, set_meta

FLOATS = ("inf", "nan")
ROLES = tuple(f"{role} of " for role in get_args(Role))
# What a name means in the text, so that none of them can be a value's.
RESERVED = {"w", "torch", "math", "operator", "device", "slice", *NAMESPACES, *FLOATS}


def load_graph(
    text: str, weights: Mapping[str, Tensor] | nn.Module | None = None, file: str | None = None
) -> GraphModule:
    """The graph that `text` describes. Without `weights` they are on the meta device.

    file  what messages call the text
    Raises IllegalGraphError with the line of anything that `print_graph` does not write, of an op that does
    not take its arguments, and of a weight that is not there or not what the text says.
    """
    loader = _Loader(text, weights, file)
    try:
        return loader.load(*loader.parse())
    except RecursionError:
        raise IllegalGraphError(f"{file or 'dump'}: an argument is nested too deep") from None


class _Loader:
    """Builds a graph from a text."""

    def __init__(self, text: str, weights: Mapping[str, Tensor] | nn.Module | None, file: str | None) -> None:
        self.text = text
        self.file = file
        self.given = weights
        self.shape_env = ShapeEnv()
        self.mode = FakeTensorMode(shape_env=self.shape_env)
        self.graph = Graph()
        self.root = nn.Module()
        self.nodes: dict[str, Node] = {}
        self.sizes: dict[str, Any] = {}
        self.weights: dict[str, Node] = {}
        self.origins = _origins(text)
        self.lines = text.split("\n")
        self.parts: dict[str, Part] = {}

    def refuse(self, place: Any, reason: str) -> IllegalGraphError:
        """The error for a part of the text (or its line)."""
        line = place if isinstance(place, int) else place.lineno
        return IllegalGraphError(
            f"{self.file}:{line}: {reason}" if self.file else f"dump: line {line}: {reason}"
        )

    def parse(self) -> tuple[ast.Dict, ast.FunctionDef]:
        """The table of weights and the function."""
        name = self.file or "dump"
        try:
            tree = ast.parse(self.text)
        except SyntaxError as error:
            raise self.refuse(error.lineno or 1, f"the text is not Python: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise IllegalGraphError(f"{name}: the text is not Python: {error or 'nested too deep'}") from None
        declared: ast.expr | None = None
        function: ast.FunctionDef | None = None
        for statement in tree.body:
            if isinstance(statement, ast.Assign) and _is_name(statement.targets[0], "WEIGHTS"):
                declared = statement.value
            elif isinstance(statement, ast.FunctionDef) and statement.name == "forward":
                function = statement
        if declared is None or function is None:
            raise IllegalGraphError(
                f"{name}: expected WEIGHTS and a function forward; is this a dump of octavo?"
            )
        if not isinstance(declared, ast.Dict):
            raise self.refuse(declared, f"expected a literal, got {ast.unparse(declared)[:60]}")
        return declared, function

    def load(self, declared: ast.Dict, function: ast.FunctionDef) -> GraphModule:
        for key, value in zip(declared.keys, declared.values, strict=True):
            name = str(self._literal(key or value))
            self._weight(value, name, str(self._literal(value)))
            self._part(value, name)
        for argument in function.args.args[1:]:
            if not isinstance(argument.annotation, ast.Constant):
                raise self.refuse(argument, f"input {argument.arg} has no type")
            node = self.graph.placeholder(argument.arg)
            node.meta["val"] = self._input(argument, str(argument.annotation.value))
            self.nodes[argument.arg] = node
        for statement in function.body:
            self._statement(statement)
        if not any(n.op == "output" for n in self.graph.nodes):
            raise self.refuse(function, "expected forward to end with `return (name,)`")
        graph_module = GraphModule(self.root, self.graph)
        declared_parts(graph_module).update(self.parts)
        return graph_module

    def _part(self, place: ast.expr, name: str) -> None:
        """What a comment behind a weight says that it holds of a quantised value."""
        comment = (
            self.lines[(place.end_lineno or place.lineno) - 1].encode()[place.end_col_offset or 0 :].decode()
        )
        text = comment.lstrip(", ").removeprefix("# ")
        if not text.startswith(ROLES):
            return
        try:
            self.parts[name] = part_from_text(text)
        except IllegalGraphError as error:
            raise self.refuse(place, str(error)) from None

    def _weight(self, place: ast.expr, name: str, kind: str) -> None:
        dtype, shape = self._type(place, kind, fixed=True)
        tensor = self._tensor(place, name, dtype, shape)
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise self.refuse(
                place, f"weight {name} is {tensor.dtype} {list(tensor.shape)}, the text says {kind}"
            )
        hold(self.root, name, tensor)
        node = self.graph.get_attr(name)
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        self.weights[name] = node

    def _tensor(self, place: ast.expr, name: str, dtype: torch.dtype, shape: list[Any]) -> Tensor:
        if self.given is None:
            return torch.empty(shape, dtype=dtype, device="meta")
        try:
            return held(self.given, name) if isinstance(self.given, nn.Module) else self.given[name]
        except (AttributeError, KeyError):
            raise self.refuse(place, f"weight {name} is not among those that came with the text") from None

    def _input(self, argument: ast.arg, kind: str) -> Any:
        dtype, sizes = self._type(argument, kind)
        static = [isinstance(s, int) for s in sizes]
        # Sizes differ from each other so that no two symbols are taken for one.
        concrete = [s if fixed else 11 + i for i, (s, fixed) in enumerate(zip(sizes, static, strict=True))]
        example = torch.empty(concrete, dtype=dtype)
        dims = [DimDynamic.STATIC if fixed else DimDynamic.DYNAMIC for fixed in static]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dims)
        source = ConstantSource(argument.arg)
        value = self.mode.from_tensor(example, source=source, symbolic_context=context)
        shape = [self.sizes.setdefault(s, d) for s, d in zip(sizes, value.shape, strict=True)]
        with self.mode:
            return torch.empty(shape, dtype=dtype)

    def _type(self, place: Any, kind: str, fixed: bool = False) -> tuple[torch.dtype, list[Any]]:
        """Dtype and sizes of `bf16[1, T, 576]`; fixed: no symbol among them."""
        dtype, _, sizes = kind.removesuffix("]").partition("[")
        shape = [int(s) if s.strip().isdigit() else s.strip() for s in sizes.split(",") if s.strip()]
        names = [s for s in shape if isinstance(s, str)]
        if dtype not in LONG or not kind.endswith("]") or (names and fixed):
            raise self.refuse(place, f"{kind!r} is not a type such as bf16[1, T, 576]")
        if not all(name.isidentifier() for name in names):
            raise self.refuse(place, f"{kind!r}: a size of an input is a number or a name")
        return LONG[dtype], shape

    def _statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Return) and isinstance(statement.value, ast.Tuple):
            self.graph.output(tuple(self._value(e) for e in statement.value.elts))
            return
        if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
            raise self.refuse(statement, "expected `name = op(...)` or a return")
        target, call = statement.targets[0], statement.value
        if len(statement.targets) != 1 or not isinstance(target, ast.Name):
            raise self.refuse(statement, "expected one name on the left")
        if target.id in RESERVED:
            raise self.refuse(statement, f"{target.id} has a meaning in dumps; choose another name")
        args = tuple(self._value(a) for a in call.args)
        kwargs = {str(k.arg): self._value(k.value) for k in call.keywords}
        node = self.graph.create_node("call_function", self._resolve(call.func), args, kwargs, name=target.id)
        node.meta.update(self.origins[statement.lineno])
        known = len(self.shape_env.replacements)
        try:
            set_meta(node, self.mode)
        except Exception as error:  # every kind: ops complain in ways of their own
            text = f"{ast.unparse(call.func)} does not take these arguments"
            raise self.refuse(statement, f"{text} ({_first_line(error)})") from None
        if len(self.shape_env.replacements) != known:
            raise self.refuse(
                statement, "this fixes a size that must stay free: the numbers of tokens differ"
            )
        self.nodes[target.id] = node

    def _value(self, value: ast.expr) -> Any:
        match value:
            case ast.Name(id=name) if name in FLOATS:
                return float(name)
            case ast.Name(id=name):
                if name not in self.nodes:
                    raise self.refuse(value, f"{name} is not defined above")
                return self.nodes[name]
            case ast.Subscript():
                name = self._literal(value.slice)
                if not _is_name(value.value, "w") or name not in self.weights:
                    raise self.refuse(value, f"{name} is not in WEIGHTS")
                return self.weights[name]
            case ast.List():
                return [self._value(e) for e in value.elts]
            case ast.Tuple():
                return tuple(self._value(e) for e in value.elts)
            case ast.Dict():
                keys = [self._literal(k or value) for k in value.keys]
                return dict(zip(keys, map(self._value, value.values), strict=True))
            case ast.UnaryOp(op=ast.USub(), operand=ast.Name(id=name)) if name in FLOATS:
                return -float(name)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name) if name in CONSTANTS:
                return CONSTANTS[name]
            case ast.Call(func=ast.Name(id="device"), args=[device], keywords=[]):
                return torch.device(str(self._literal(device)))
            case ast.Call(func=ast.Name(id="slice"), args=[_, _, _] as ends, keywords=[]):
                return slice(*map(self._value, ends))
        return self._literal(value)

    def _literal(self, value: ast.expr) -> Any:
        try:
            return ast.literal_eval(value)
        except (ValueError, TypeError, SyntaxError, RecursionError) as error:
            raise self.refuse(value, f"expected a literal ({error})") from None

    def _resolve(self, function: ast.expr) -> Any:
        name = ast.unparse(function)
        if name in CALLS:
            return CALLS[name]
        parts = name.split(".")
        if len(parts) == 3 and parts[0] in NAMESPACES:
            try:
                return getattr(getattr(getattr(torch.ops, parts[0]), parts[1]), parts[2])
            except AttributeError:
                pass
        raise self.refuse(function, f"{name} is not an op of aten or octavo")


def _is_name(value: ast.expr, name: str) -> bool:
    return isinstance(value, ast.Name) and value.id == name


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _origins(text: str) -> dict[int, dict[str, Any]]:
    """Line number -> what the comment above says of the module and the user's line, as nodes carry it."""
    origins: dict[int, dict[str, Any]] = {}
    current: dict[str, Any] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if line.startswith("    # "):
            current = origin(line.removeprefix("    # "))
        origins[number] = current
    return origins


def origin(comment: str) -> dict[str, Any]:
    """`model.norm | modeling.py:67  return x` -> metadata of a node; either half may be missing."""
    found = ORIGIN.fullmatch(comment)
    path = found["path"] if found is not None else comment
    meta: dict[str, Any] = {}
    if path and path != NO_SOURCE:
        meta["nn_module_stack"] = {path: (path, "")}
    if found is not None:
        file, _, line = found["line"].rpartition(":")
        meta["stack_trace"] = f'  File "{file}", line {line}, in forward\n    {found["code"] or ""}'
    return meta
