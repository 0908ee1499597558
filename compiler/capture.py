"""nn.Module -> graph in ragged-token form.

In: input_ids (1, T) and position_ids (1, T), and of a draft head features (1, T, F). Out: logits (1, T, vocab), and
behind them the hidden states (1, T, hidden) that were asked for. T is symbolic. Weights become `get_attr` nodes under
the model's own names; tied weights keep one. Nothing is rewritten here.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, export
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from octavo.compiler.errors import CaptureError
from octavo.compiler.few_experts import experts_apart
from octavo.compiler.functional import make_functional
from octavo.compiler.meta_model import has_values, on_cpu
from octavo.compiler.model_call import (
    EXAMPLE_LEN,
    Caller,
    caller_of,
    example_features,
    library_of,
    parts_as_ops,
    reads_features,
)
from octavo.compiler.origin import where
from octavo.compiler.program import FEATURES
from octavo.compiler.token_mixing import require_tokens_apart
from octavo.passes.rewrite import fake_mode, hold

# Files of torch, of this package and of a library's machinery, which lie between the model's line and an error.
NOT_THE_MODELS = re.compile(r"/torch/|/octavo/|/transformers/(?!models/)|^<")


@dataclass
class Captured:
    """A captured model.

    graph_module  placeholders input_ids, position_ids, and of a draft head features; the logits are its first output,
                  the others are hidden states
    model_info    name, vocab_size, num_layers (None if unknown), max_model_len, eos_token_ids, bos_token_id
    route         "interface" when the model's library named its attention, "patterns" otherwise
    """

    graph_module: GraphModule
    model_info: dict[str, Any]
    route: str
    notes: list[str] = field(default_factory=list)


def capture(model: nn.Module, features: Sequence[int] | None = None) -> Captured:
    """Export `model`. Raises CaptureError with the model's own source line when it cannot be done.

    features  hidden states that are outputs too, by the numbers of compiler/hidden_states.py
    """
    library = library_of(model)
    with _evaluating(model):
        caller = caller_of(model, features)
        if library is None:
            with parts_as_ops(model):
                graph_module = _export_experts(model, caller)
            return Captured(
                graph_module, _info(model, _known(model), graph_module.meta["longest"]), "patterns"
            )
        with library.layers_as_ops(model):
            graph_module = _export_experts(model, caller, library.explanation)
        if has_values(model):
            library.require_positions_from_zero(model)
        return Captured(graph_module, _info(model, library.description(model), None), "interface")


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and afterwards every module's own mode again."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def reference_logits(model: nn.Module, input_ids: Tensor) -> Tensor:
    """Logits (1, T, vocab) of the model itself for one sequence (1, T): what every graph is compared with."""
    return reference_outputs(model, input_ids)[0]


def reference_outputs(
    model: nn.Module, input_ids: Tensor, given: Tensor | None = None, features: Sequence[int] | None = None
) -> tuple[Tensor, ...]:
    """Logits (1, T, vocab) of the model itself for one sequence (1, T), and the hidden states that it makes.

    given     what a draft head reads beside the tokens, (1, T, F)
    features  of a target, as in `capture`
    """
    positions = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
    with _evaluating(model):
        return caller_of(model, features)(model, input_ids, positions, given)


class _Wrapped(nn.Module):
    """One calling convention for every model."""

    def __init__(self, model: nn.Module, caller: Caller) -> None:
        super().__init__()
        self.model = model
        self.caller = caller

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, features: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        return self.caller(self.model, input_ids, position_ids, features)


def _export_experts(
    model: nn.Module,
    caller: Caller,
    explain: Callable[[Exception], str | None] = lambda _: None,
) -> GraphModule:
    """Export with loops over experts recorded, and with one weight in place of those of equal experts.

    What looks like such a loop and cannot be followed may be none: it is exported as it is written, if that can be.
    """
    has_stacks = False
    try:
        with experts_apart(model) as experts:
            has_stacks = bool(experts.counts)

            def call(
                module: nn.Module, ids: Tensor, positions: Tensor, given: Tensor | None
            ) -> tuple[Tensor, ...]:
                with experts.loops():
                    return caller(module, ids, positions, given)

            graph_module = _export(_Wrapped(model, call), explain)
        experts.put_together(graph_module)
        return graph_module
    except CaptureError as refused:
        if not has_stacks:
            raise
        try:
            return _export(_Wrapped(model, caller), explain)
        except CaptureError as error:
            # what the graph holds says more than that a loop could not be followed; what was not exported does not
            is_less = error.__cause__ is not None or isinstance(error, _UnknownSize)
            raise (refused if is_less else error) from None


def _export(wrapped: _Wrapped, explain: Callable[[Exception], str | None] = lambda _: None) -> GraphModule:
    """`explain` says of an error in the model's code what its library knows of it."""
    device = next((p.device for p in wrapped.parameters()), torch.device("cpu"))
    example = {
        "input_ids": torch.arange(EXAMPLE_LEN, device=device)[None] % 2,
        "position_ids": torch.arange(EXAMPLE_LEN, device=device)[None],
        **example_features(wrapped.model, device),
    }
    shapes = {name: {1: Dim.AUTO} for name in example}
    try:
        with torch.no_grad():
            program = export(wrapped, (), kwargs=example, dynamic_shapes=shapes, strict=False)
            graph_module = _functional(program)
    except CaptureError as error:
        known = ".py:" in str(error)  # some say themselves where they are
        raise CaptureError(str(error) if known else f"{error}{_place(error, wrapped.model)}") from error
    except Exception as error:
        place, meaning = _place(error, wrapped.model), explain(error)
        if meaning is not None:
            raise CaptureError(f"{meaning}{place}") from error
        raise CaptureError(
            f"capture: torch.export failed on {type(wrapped.model).__name__} ({type(error).__name__}: "
            f"{_first_line(error)}){place}; the model must run on one sequence of any length "
            "without Python control flow that depends on token values"
        ) from error
    _require_known_sizes(graph_module.graph)
    require_tokens_apart(graph_module.graph)  # before lengths, which loops over tokens fix too
    if not has_values(wrapped.model):
        on_cpu(graph_module, wrapped.model)
    longest = (
        _unify_lengths(graph_module, program, type(wrapped.model).__name__),
        *_learned(graph_module.graph),
    )
    graph_module.meta["longest"] = min((n for n in longest if n is not None), default=None)
    return graph_module


class _UnknownSize(CaptureError):
    """A graph with sizes that token values give."""


def _require_known_sizes(graph: Graph) -> None:
    """Raise CaptureError for sizes that only token values give: experts that gather their own tokens, say."""
    for node in graph.nodes:
        for value in tree_leaves(node.meta.get("val")):
            if isinstance(value, Tensor | torch.SymInt) and free_unbacked_symbols(value):
                raise _UnknownSize(
                    f"capture: what {node.name} makes has a size or value that token values give ({where(node)}); a "
                    "program has one form for every step: compute every row and mask, or use stacked experts that "
                    "the library's experts interface serves"
                )


def _functional(program: torch.export.ExportedProgram) -> GraphModule:
    """The graph without writes. The framework's way to it costs twice as much as the export, so it comes last."""
    calls = [
        n.target for n in program.graph.nodes if n.op == "call_function" and n.target is not operator.getitem
    ]
    graph_module = _with_named_weights(program)
    if all(isinstance(t, torch._ops.OpOverload) and not t._schema.is_mutable for t in calls):
        return graph_module
    ops_only = all(isinstance(t, torch._ops.OpOverload) for t in calls)
    if ops_only and make_functional(graph_module):
        return graph_module
    return _with_named_weights(program.run_decompositions({}))


def _unify_lengths(graph_module: GraphModule, program: torch.export.ExportedProgram, name: str) -> int | None:
    """All inputs have one symbolic length. Returns the longest that the model's own slices allow, if any."""
    inputs = {n.name: n for n in graph_module.graph.nodes if n.op == "placeholder"}
    length = inputs.get(FEATURES, inputs["input_ids"]).meta["val"].shape[1]
    if isinstance(length, int) or length.node.expr.is_number:
        raise CaptureError(
            f"capture: {name} fixed the sequence length to {length} while it was traced; some of its code "
            "turns the length into a Python number (a list, a loop, int()); keep it a size of a tensor"
        )
    for node in inputs.values():
        value = node.meta["val"]
        if value.shape[1] != length:
            # The model does not read it, so nothing else has tied the two symbols together.
            with fake_mode(graph_module):
                node.meta["val"] = torch.empty((1, length, *value.shape[2:]), dtype=value.dtype)
    bounds = program.range_constraints.get(length.node.expr)
    upper = None if bounds is None else bounds.upper
    return int(upper) if upper is not None and upper.is_Integer and int(upper) < 1 << 31 else None


def _learned(graph: Graph) -> list[int]:
    """Rows of the tables that positions are looked up in as they are."""
    lookups = (n for n in graph.nodes if n.target is torch.ops.aten.embedding.default)
    return [
        n.args[0].meta["val"].shape[0] for n in lookups if getattr(n.args[1], "name", "") == "position_ids"
    ]


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:300]


def _place(error: Exception, model: nn.Module) -> str:
    """` in model.layers.0 at modeling.py:212`: the innermost module and line that are the model's own."""
    paths = {id(module): path for path, module in model.named_modules()}
    path = line = ""
    traceback = error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if not NOT_THE_MODELS.search(file):
            line = f"{file}:{traceback.tb_lineno}"
        path = paths.get(id(traceback.tb_frame.f_locals.get("self")), path)
        traceback = traceback.tb_next
    return "".join(f" {word} {part}" for word, part in (("in", path), ("at", line)) if part)


# Address, dtype, shape and strides: what makes two tensors the same weight.
Identity = tuple[int, torch.dtype, torch.Size, tuple[int, ...]]


def _with_named_weights(program: torch.export.ExportedProgram) -> GraphModule:
    """The exported graph with parameters, buffers and constants as attributes."""
    written = [s.target for s in program.graph_signature.output_specs if s.kind is not OutputKind.USER_OUTPUT]
    if written:
        raise CaptureError(
            f"capture: the model writes to {', '.join(str(t).removeprefix('model.') for t in written[:3])} while it "
            "runs: state outside attention, or weights that change with every call; make the forward pass pure"
        )
    root = nn.Module()
    graph = Graph()
    copies: dict[Node, Node] = {}
    names: dict[Identity, str] = {}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    parameters: set[str] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder" and specs[node.name].kind is InputKind.USER_INPUT:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        elif node.op == "placeholder":
            target = str(specs[node.name].target)
            copies[node] = _weight(root, graph, program, target, node, names)
            if specs[node.name].kind is InputKind.PARAMETER:
                parameters.add(str(copies[node].target))
        elif node.op == "output":
            graph.output(tuple(copies[result] for result in node.args[0]))
        else:
            copies[node] = graph.node_copy(node, lambda n: copies[n])
    for node in graph.nodes:
        _strip_wrapper(node)
    graph_module = GraphModule(root, graph)
    graph_module.meta["parameters"] = frozenset(parameters)
    graph_module.graph.lint()
    return graph_module


def _strip_wrapper(node: Node) -> None:
    """Module paths as the user's model has them, without the wrapper around it."""
    stack = node.meta.get("nn_module_stack")
    if stack:
        inner = {
            k: (p.removeprefix("model").removeprefix("."), kind) for k, (p, kind) in list(stack.items())[1:]
        }
        node.meta["nn_module_stack"] = inner


def _weight(
    root: nn.Module, graph: Graph, program: torch.export.ExportedProgram, target: str, node: Node,
    names: dict[Identity, str],
) -> Node:  # fmt: skip
    tensor = program.state_dict[target] if target in program.state_dict else program.constants[target]
    assert isinstance(tensor, Tensor), f"{target} is a {type(tensor).__name__}"
    tensor = tensor.detach()
    identity = (
        tensor.untyped_storage()._cdata if tensor.is_meta else tensor.data_ptr(),
        tensor.dtype, tensor.shape, tensor.stride(),
    )  # fmt: skip
    # Two names for one tensor (tied weights) are one weight. Empty tensors share the null pointer.
    name = names.setdefault(identity, target.removeprefix("model.")) if tensor.numel() else target
    hold(root, name, tensor)
    result = graph.get_attr(name)
    result.meta = dict(node.meta)
    return result


def _known(model: nn.Module) -> dict[str, Any]:
    """What a draft head says of itself."""
    return dict(getattr(model, "model_info", {})) if reads_features(model) else {}


def _info(model: nn.Module, known: dict[str, Any], longest: int | None) -> dict[str, Any]:
    base: dict[str, Any] = {
        "name": type(model).__name__, "vocab_size": None, "num_layers": None, "max_model_len": longest,
        "eos_token_ids": [], "bos_token_id": None,
    }  # fmt: skip
    return {**base, **known}
