"""Experts that lie apart (a module each), as one stack of each of their weights while a model is captured.

A parameter of an exported model costs milliseconds, and hundreds of experts in dozens of layers have tens of thousands.
So equal experts lend their weights: while this is active each weight is a stand-in that expert_loops records, and the
list that holds the experts has one weight, of all of them, in their place. Afterwards everything is as it was.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from octavo.compiler.expert_loops import ExpertLoops
from octavo.compiler.lazy_values import Lazy, empty_on_meta
from octavo.passes.rewrite import hold

HELD = "all_"  # what a list's own parameters are called meanwhile


@dataclass(frozen=True)
class Stack:
    """One weight of equal experts: of the list at `path`, each expert's `name`."""

    path: str
    name: str
    holder: nn.Module
    weights: tuple[Tensor, ...]

    @property
    def attribute(self) -> str:
        return HELD + self.name.replace(".", "_")

    @property
    def target(self) -> str:
        return f"{self.path}.{self.attribute}"


@dataclass(frozen=True)
class Experts:
    """What a model has of experts: stacks of those that lie apart, and the numbers of all."""

    stacks: tuple[Stack, ...]
    counts: frozenset[int]
    stand_ins: tuple[Lazy, ...]
    active: list[ExpertLoops]

    @contextlib.contextmanager
    def loops(self) -> Iterator[None]:
        """What is active while the model runs."""
        if not self.counts:
            yield
            return
        with ExpertLoops(self.counts, self.stand_ins) as mode:
            self.active.append(mode)
            try:
                yield
            finally:
                self.active.remove(mode)

    def put_together(self, graph_module: GraphModule) -> None:
        """The captured graph with the stacks' values in place of what stood for them."""
        parameters = graph_module.meta.get("parameters", frozenset())
        for stack in self.stacks:
            nodes = [n for n in graph_module.graph.find_nodes(op="get_attr") if n.target == stack.target]
            name = f"{stack.path}.{stack.name}"
            if nodes:
                hold(graph_module, name, torch.stack([w.detach() for w in stack.weights]))
                delattr(graph_module.get_submodule(stack.path), stack.attribute)
            for node in nodes:
                node.target = name
                parameters = parameters - {stack.target} | {name}
        graph_module.meta["parameters"] = parameters
        graph_module.recompile()


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)  # their weights have three axes and are no stacks


@contextlib.contextmanager
def experts_apart(model: nn.Module) -> Iterator[Experts]:
    """Equal experts of `model` lend their weights."""
    stacks: list[Stack] = []
    stand_ins: list[Lazy] = []
    active: list[ExpertLoops] = []
    counts = {
        int(p.shape[0])
        for module in model.modules() if not isinstance(module, CONVOLUTIONS)
        for p in module.parameters(recurse=False) if p.dim() > 2 and p.shape[0] > 1
    }  # fmt: skip
    with contextlib.ExitStack() as undo:
        for path, module in list(model.named_modules()):
            if (
                path
                and isinstance(module, nn.ModuleList | nn.ModuleDict)
                and _are_experts(list(module.children()))
            ):
                counts.add(len(module))
                for name in dict(next(module.children()).named_parameters()):
                    stack = _stack(path, name, module)
                    stacks.append(stack)
                    stand_ins += _lend(stack, list(module.children()), undo)
                for number, expert in enumerate(module.children()):
                    _speak_for(expert, (path, number), active, undo)
        yield Experts(tuple(stacks), frozenset(counts), tuple(stand_ins), active)


def _stack(path: str, name: str, module: nn.Module) -> Stack:
    return Stack(path, name, module, tuple(child.get_parameter(name) for child in module.children()))


def _lend(stack: Stack, experts: Sequence[nn.Module], undo: contextlib.ExitStack) -> list[Lazy]:
    first = stack.weights[0].detach()
    whole = nn.Parameter(first[None].expand(len(experts), *first.shape), requires_grad=False)
    stack.holder._parameters[stack.attribute] = whole
    undo.callback(stack.holder._parameters.pop, stack.attribute)
    path, _, leaf = stack.name.rpartition(".")
    reader = _reader(stack)
    found = []
    for number, expert in enumerate(experts):
        owner = expert.get_submodule(path)
        undo.callback(_give_back, owner, leaf, dict(owner._parameters))
        del owner._parameters[leaf]
        like = empty_on_meta(first.shape, first.dtype)
        owner.__dict__[leaf] = like
        found.append(Lazy("weight", None, (reader, number), {}, like))
    return found


def _speak_for(
    expert: nn.Module, place: tuple[str, int], active: list[ExpertLoops], undo: contextlib.ExitStack
) -> None:
    """The forward pass of one of several equal experts, which need not all run."""
    forward = expert.forward

    def recorded(*args: Any, **kwargs: Any) -> Any:
        path, number = place
        return (
            active[-1].of_expert(path, number, forward, args, kwargs) if active else forward(*args, **kwargs)
        )

    before = expert.__dict__.get("forward")
    expert.__dict__["forward"] = recorded
    undo.callback(_restore, expert, before)


def _restore(expert: nn.Module, forward: Any) -> None:
    if forward is None:
        del expert.__dict__["forward"]
    else:
        expert.__dict__["forward"] = forward


def _reader(stack: Stack) -> Callable[[], Tensor]:
    """What the weights of all experts are at the moment, which an export exchanges."""
    return lambda: stack.holder._parameters[stack.attribute]  # type: ignore[return-value]


def _give_back(owner: nn.Module, leaf: str, parameters: dict[str, nn.Parameter | None]) -> None:
    del owner.__dict__[leaf]
    owner._parameters.clear()
    owner._parameters.update(parameters)


def _are_experts(modules: Sequence[nn.Module]) -> bool:
    """Equal modules that each make rows as wide as they get out of one or two inner products of another width."""
    if len(modules) < 2 or any(next(m.buffers(), None) is not None for m in modules):
        return False
    forms = [_form(m) for m in modules]
    parameters = [p for m in modules for p in m.parameters()]
    if any(form != forms[0] for form in forms[1:]) or len({id(p) for p in parameters}) != len(parameters):
        return False
    return _is_mlp([tuple(p.shape) for p in modules[0].parameters()])


def _form(module: nn.Module) -> Any:
    """Types, sizes and attributes: what must be equal for modules to compute alike."""
    shapes = [(n, tuple(p.shape), p.dtype, p.device) for n, p in module.named_parameters()]
    attributes = [
        (path, type(m), {k: v for k, v in vars(m).items() if not isinstance(v, dict | Tensor)})
        for path, m in module.named_modules()
    ]
    return shapes, attributes


def _is_mlp(shapes: Sequence[tuple[int, ...]]) -> bool:
    """Two or three matrices (with biases) that lead from one width to another and back."""
    matrices = [s for s in shapes if len(s) == 2]
    if len(matrices) not in (2, 3) or any(len(s) not in (1, 2) for s in shapes):
        return False
    widths = sorted({d for s in matrices for d in s})
    for hidden in widths:
        others = [s for s in matrices if hidden in s]
        if len(others) == len(matrices) and len(widths) <= 3:
            return True
    return False
