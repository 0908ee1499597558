"""Lowered graph + chosen kernels -> Program: every buffer once, one step per launch, in graph order."""

import operator
from collections.abc import Mapping

import sympy
import torch
from torch import fx

from octavo.codegen.kernel import Arg, KernelSpec
from octavo.codegen.row import result_dtype
from octavo.compiler.dims import (
    CACHE_NAME,
    dim_names,
    dtype_name,
    is_view,
    leaving_items,
    makes_logits,
    output_name,
    output_number,
    to_dim,
)
from octavo.compiler.errors import CodegenError
from octavo.compiler.legality import COLLECTIVES, named_arguments, op
from octavo.compiler.mesh import ONE_RANK
from octavo.compiler.origin import where
from octavo.compiler.page_groups import page_windows
from octavo.compiler.program import FEATURES, ITEM_BYTES, Buffer, BufferKind, Dim, Program, Step, step_input
from octavo.passes.plan_memory import ALIGNMENT, MemoryReport

ORDER: tuple[BufferKind, ...] = ("input", "cache", "weight", "output", "workspace")


def emit(
    module: fx.GraphModule, specs: Mapping[fx.Node, KernelSpec], memory: MemoryReport, page_size: int
) -> Program:
    """The launch program of a lowered graph whose memory is planned.

    specs   the kernel of every octavo node
    Buffers come in ORDER, those of a kind as the graph meets them. A weight that several nodes read, under
    one name or several, is one buffer with the first name. Token tensors lose the graph's leading 1: logits
    are (L, vocab). Raises CodegenError for a node without a kernel or memory, and for an argument
    that cannot be bound.
    """
    emitter = _Emitter(module, memory)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            emitter.add_placeholder(node)
        elif node.op == "get_attr":
            emitter.add_weight(node)
        elif node.op == "call_function":
            emitter.add_call(node, specs.get(node))
    buffers = sorted(emitter.buffers.values(), key=_place)
    weights = {buffer.name for buffer in buffers if buffer.kind == "weight"}
    return Program(
        tuple(buffers), tuple(emitter.steps), emitter.workspace, page_size, page_windows(module.graph),
        module.meta.get("mesh", ONE_RANK),
        {name: shard for name, shard in module.meta.get("shards", {}).items() if name in weights},
        tuple(module.meta.get("expert_layers", ())),
    )  # fmt: skip


def _place(buffer: Buffer) -> tuple[int, int]:
    """Logits before features, and these by their numbers."""
    number = int(buffer.name.rpartition("_")[2]) + 1 if buffer.name.startswith(f"{FEATURES}_") else 0
    return ORDER.index(buffer.kind), number if buffer.kind == "output" else 0


class _Emitter:
    """What emit gathers while it walks the graph. names: a node's buffer, or one for each of its results."""

    def __init__(self, module: fx.GraphModule, memory: MemoryReport) -> None:
        self.module = module
        self.sizes: dict[sympy.Symbol, str] = dim_names(module.graph)
        self.buffers: dict[str, Buffer] = {}
        self.names: dict[fx.Node, tuple[str, ...]] = {}
        self.weights: dict[tuple[object, ...], str] = {}
        self.steps: list[Step] = []
        self.planned = memory.workspace.text
        self.scratch: dict[str, None] = {}

    @property
    def workspace(self) -> Dim:
        """Planned values first, then scratch memory: launches with scratch of one size share it."""
        return " + ".join((self.planned, *self.scratch))

    def add_placeholder(self, node: fx.Node) -> None:
        if (filled := step_input(node.name)) is not None:
            dtype, shape = filled
            self._add(node, Buffer(node.name, "input", dtype, shape))
        elif node.name == FEATURES:
            value = node.meta["val"]
            self._add(node, Buffer(FEATURES, "input", dtype_name(value), self._shape(value)[1:]))
        elif CACHE_NAME.fullmatch(node.name):
            self._add(
                node, Buffer(node.name, "cache", dtype_name(node.meta["val"]), self._shape(node.meta["val"]))
            )
        else:
            raise CodegenError(f"emit: expected an input of a step or a cache, got placeholder {node.name}")

    def add_weight(self, node: fx.Node) -> None:
        weight: object = operator.attrgetter(str(node.target))(self.module)
        assert isinstance(weight, torch.Tensor), f"{node.target} is no tensor"
        place = weight.data_ptr() if weight.device.type != "meta" else id(weight)
        identity = (place, weight.dtype, tuple(weight.shape), weight.stride())
        name = self.weights.setdefault(identity, str(node.target))
        self._add(node, Buffer(name, "weight", dtype_name(weight), tuple(weight.shape)))

    def add_call(self, node: fx.Node, spec: KernelSpec | None) -> None:
        if is_view(node) or node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            shown = self.names[source]
            self.names[node] = shown if is_view(node) else (shown[node.args[1]],)  # type: ignore[index]
            return
        if op(node) in COLLECTIVES:
            self._add_collective(node)
            return
        if spec is None:
            raise CodegenError(f"emit: no kernel was chosen for {node.target} ({where(node)})")
        if node.meta.get("val") is not None:
            self._add_results(node)
        self._add_scratch(node, spec)
        for launch in spec.launches:
            args = tuple(self._bind(node, launch, arg) for arg in launch.args)
            self.steps.append(Step(launch.name, args, launch.grid, launch.when))

    def _add_collective(self, node: fx.Node) -> None:
        """Buffers in the order of the schema, then the results; other arguments are options, the axis for itself."""
        given = named_arguments(node)
        axis = given.pop("axis")
        if op(node) == "octavo::arrived":  # the memory is the dispatch's
            self.names[node] = tuple(self.names[n][0] for n in node.args[:4])  # type: ignore[index]
            self.steps.append(Step("arrived", self.names[node], axis=axis))
            return
        self._add_results(node)
        tensors = [name for name, value in given.items() if isinstance(value, fx.Node) or value is None]
        read = [self.names[given[name]][0] if given[name] is not None else "" for name in tensors]
        options = tuple(value for name, value in given.items() if name not in tensors)
        name = op(node).removeprefix("octavo::")
        self.steps.append(Step(name, (*read, *self.names[node]), axis=axis, options=options))

    def _add_results(self, node: fx.Node) -> None:
        value = node.meta["val"]
        results = tuple(value) if isinstance(value, tuple | list) else (value,)
        number = output_number(node)
        if number is not None:
            self._add(node, self._output(number, result_dtype(node)))
            return
        places = node.meta.get("buffer")
        if places is None:
            raise CodegenError(
                f"emit: expected a place in the workspace, run plan_memory first ({where(node)})"
            )
        leaving = leaving_items(node)
        buffers = tuple(
            self._output(leaving[index], dtype_name(result))
            if index in leaving
            else Buffer(
                place.name,
                "workspace",
                "fp32" if makes_logits(node) else dtype_name(result),
                self._result_shape(result),
                place.offset.text,
            )
            for index, (place, result) in enumerate(
                zip(places if isinstance(places, tuple) else (places,), results, strict=True)
            )
        )
        self._add(node, *buffers)

    def _output(self, number: int, dtype: str) -> Buffer:
        """In the shape in which it leaves the graph, which may be a view of what a kernel makes."""
        value = self.module.graph.output_node().args[0][number].meta["val"]  # type: ignore[index, union-attr]
        return Buffer(output_name(number), "output", dtype, self._shape(value)[1:])

    def _add_scratch(self, node: fx.Node, spec: KernelSpec) -> None:
        """Scratch lies after all planned values, so a launch's scratch meets nothing that lives."""
        end = self.planned
        for name, dtype, shape in spec.scratch:
            buffer = Buffer(f"{node.name}.{name}", "workspace", dtype, shape, end)
            self.buffers[buffer.name] = buffer
            count = " * ".join(f"({size})" for size in (*shape, ITEM_BYTES[dtype]))
            end = f"{end} + ({count} + {ALIGNMENT - 1}) // {ALIGNMENT} * {ALIGNMENT}"
        if spec.scratch:
            self.scratch[end.removeprefix(f"{self.planned} + ")] = None

    def _bind(self, node: fx.Node, launch: KernelSpec, arg: Arg) -> str | int | float:
        """The buffer or the expression that an argument of a launch stands for; the rules are Row's."""
        if arg.kind == "scalar":
            return arg.value
        name = self._buffer(node, arg)
        if self.buffers[name].dtype != arg.dtype:
            raise CodegenError(
                f"emit: {launch.name} reads or writes {arg.name} as {arg.dtype}, but {name} is "
                f"{self.buffers[name].dtype} ({where(node)})"
            )
        return name

    def _buffer(self, node: fx.Node, arg: Arg) -> str:
        name = arg.name.removesuffix("_ptr").removesuffix("_desc")
        given = named_arguments(node)
        if name in given and isinstance(given[name], fx.Node):
            return self.names[given[name]][0]
        if f"{node.name}.{name}" in self.buffers:
            return f"{node.name}.{name}"
        stem, _, index = name.partition("_")
        if stem == "out" and node in self.names:
            return self.names[node][int(index or 0)]
        raise CodegenError(
            f"emit: kernel argument {arg.name} is neither an argument of the op nor a result ({where(node)})"
        )

    def _add(self, node: fx.Node, *buffers: Buffer) -> None:
        for buffer in buffers:
            known = self.buffers.setdefault(buffer.name, buffer)
            assert known == buffer, f"two buffers are named {buffer.name}"
        self.names[node] = tuple(buffer.name for buffer in buffers)

    def _shape(self, value: torch.Tensor) -> tuple[Dim, ...]:
        return tuple(to_dim(size, self.sizes) for size in value.shape)

    def _result_shape(self, value: torch.Tensor) -> tuple[Dim, ...]:
        """Without the leading 1 of token tensors; block scales in tiles have none."""
        shape = self._shape(value)
        return shape[1:] if len(shape) > 1 else shape
