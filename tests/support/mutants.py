"""Faults seeded into passes one at a time, and what the checks say of each.

A mutant is the real pass with one thing wrong: a kind of call that it makes comes out differently, one of its own
functions is exchanged, or its result is damaged. It runs on the graph as the pass finds it.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest import mock

import torch
from stages import FP32, SETTINGS, captured, copied
from torch.fx import GraphModule, Node

from octavo.compiler.errors import IllegalGraphError, OctavoError, PassError
from octavo.compiler.legality import is_attention
from octavo.compiler.pipeline import PIPELINE, Step, apply_step
from octavo.compiler.verify import prove_report
from octavo.passes.pattern import aten
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport

Call = Callable[..., Node]
# What a mutant makes instead of a call: given how to make calls, and the call's own arguments.
Change = Callable[..., Node]


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One fault.

    op, change  each call of `op` by the pass comes out as `change` makes it
    exchange    (module or class, name, what takes its place; it is called with what it replaces first)
    damage      what is done to the graph once the pass is through
    turn        which run of the pass, where the pipeline has several
    in_place    what the message says of the place
    """

    name: str
    step: str
    op: Any = None
    change: Change | None = None
    model: str = "llama"
    dtype: torch.dtype = FP32
    in_place: str = r"layers\.\d+\."
    exchange: tuple[Any, str, Callable[..., Any]] | None = None
    damage: Callable[[GraphModule], None] | None = None
    turn: int = 0

    @property
    def index(self) -> int:
        return [i for i, step in enumerate(PIPELINE) if step.name == self.step][self.turn]

    @contextlib.contextmanager
    def injected(self) -> Iterator[None]:
        original = Builder.call

        def call(builder: Builder, target: Any, *args: Any, **options: Any) -> Node:
            make = functools.partial(original, builder)
            if target is self.op and self.change is not None:
                return self.change(make, *args, **options)
            return make(target, *args, **options)

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(Builder, "call", call))
            if self.exchange is not None:
                owner, name, function = self.exchange
                right = getattr(owner, name)
                wrong = functools.wraps(right)(lambda *args, **options: function(right, *args, **options))
                stack.enter_context(mock.patch.object(owner, name, wrong))
            yield

    def wrong_step(self) -> Step:
        step = PIPELINE[self.index]

        def wrong(graph_module: GraphModule, **settings: int) -> PassReport:
            with self.injected():
                report = step.run(graph_module, **settings)
            if self.damage is not None:
                self.damage(graph_module)
            return report

        wrong.__name__ = step.name
        return dataclasses.replace(step, run=wrong)


@cache
def _stages(model: str, dtype: torch.dtype) -> tuple[tuple[str, ...], list[GraphModule]]:
    """The attentions of the captured model, and its graph before each pass, as far as it gets."""
    graph_module = captured(model, dtype).graph_module
    attentions = tuple(
        n.name for n in graph_module.graph.nodes if n.op == "call_function" and is_attention(n)
    )
    stages = []
    with contextlib.suppress(OctavoError):
        for step in PIPELINE:
            stages.append(copied(graph_module))
            apply_step(step, graph_module, SETTINGS)
    return attentions, stages


def verdict(mutant: Mutant) -> str:
    """The error that the mutant meets; "survived" if none."""
    attentions, stages = _stages(mutant.model, mutant.dtype)
    try:
        for report in apply_step(mutant.wrong_step(), copied(stages[mutant.index]), SETTINGS, attentions):
            prove_report(report, {})
    except (PassError, IllegalGraphError) as error:
        return str(error)
    return "survived"


def is_caught(mutant: Mutant, text: str) -> bool:
    """Whether the message names the pass, the node, its place in the model and the user's source line."""
    return bool(re.match(rf"{mutant.step}: .*node \w+.*{mutant.in_place}.*\.py:\d+", text))


def check_of(text: str) -> str:
    """What caught it."""
    if "is not equal to what it replaced" in text:
        return "proof"
    return "-" if text == "survived" else "count" if re.search(r"expected \d+ attentions", text) else "rule"


def said(text: str) -> str:
    """The first words, without the pass and the place."""
    text = text.rpartition(" is not equal to what it replaced: ")[2].partition(" (after: ")[0]
    return re.sub(r"^\w+: ", "", text)[:62]


def with_argument(op: Any, index: int, new: Any) -> Change:
    """The same call with another argument; `new` is a value, or makes one of the call's arguments."""

    def change(call: Call, *args: Any, **options: Any) -> Node:
        value = new(call, *args) if callable(new) else new
        return call(op, *args[:index], value, *args[index + 1 :], **options)

    return change


def swapped(op: Any, first: int, second: int) -> Change:
    def change(call: Call, *args: Any) -> Node:
        mixed = list(args)
        mixed[first], mixed[second] = args[second], args[first]
        return call(op, *mixed)

    return change


def without(op: Any, count: int) -> Change:
    """The call with its first `count` arguments only."""
    return lambda call, *args: call(op, *args[:count])


def also(op: Any, *more: Any) -> Change:
    """The call with arguments that follow those that it has."""
    return lambda call, *args: call(op, *args, *more)


def then(op: Any, function: Any, *rest: Any) -> Change:
    """`function` of the call's result."""
    return lambda call, *args, **options: call(function, call(op, *args, **options), *rest)


def through(op: Any, index: int, function: Any, *rest: Any) -> Change:
    """The same call with `function` applied to one of its arguments."""
    return with_argument(op, index, lambda call, *args: call(function, args[index], *rest))


def times(op: Any, index: int, factor: float) -> Change:
    """The same call with a number multiplied."""
    return with_argument(op, index, lambda call, *args: args[index] * factor)


def reordered(*order: int) -> Change:
    return lambda call, parts, *rest: call(aten.cat.default, [parts[i] for i in order], *rest)


def one_later(index: int) -> Callable[..., Node]:
    return lambda call, *args: call(aten.add.Tensor, args[index], 1)
