"""Patterns over FX graphs and their matcher, with a trace of the nearest miss. Changes nothing."""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

import octavo.compiler.ops  # noqa: F401  (registers the ops that patterns name)

aten = torch.ops.aten
Target = Callable[..., Any]
Number = int | float


@dataclass(frozen=True)
class Var:
    """Any value; one name binds one value everywhere. accept returns a reason to refuse, or None."""

    name: str
    accept: Callable[[Any], str | None] | None = None


@dataclass(frozen=True)
class Call:
    """A call of one of `targets` with these arguments; fewer than the node has leaves the rest free.

    commutative tries the first two arguments in both orders. bind gives the node itself a name.
    """

    targets: tuple[Target, ...]
    args: tuple[Any, ...] = ()
    commutative: bool = False
    bind: str | None = None


@dataclass(frozen=True)
class Through:
    """`inner`, or `inner` below any number of calls of `targets` (casts, broadcasts)."""

    targets: tuple[Target, ...]
    inner: Any


@dataclass
class Match:
    """What a pattern found: the node it ends in, values by name, and every node it covers."""

    root: Node
    values: dict[str, Any] = field(default_factory=dict)
    nodes: tuple[Node, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def with_value(self, name: str, value: Any) -> "Match":
        return Match(self.root, {**self.values, name: value}, self.nodes)

    def with_node(self, node: Node) -> "Match":
        return Match(self.root, self.values, (*self.nodes, node))


@dataclass
class Trace:
    """The attempt of a failed match that got furthest; of several, the first, whose order is the pattern's."""

    depth: int = 0
    reason: str = ""

    def miss(self, match: Match, reason: str) -> None:
        if len(match.nodes) > self.depth or not self.reason:
            self.depth, self.reason = len(match.nodes), reason


def call(*targets: Target, args: tuple[Any, ...] = (), bind: str | None = None) -> Call:
    return Call(targets, args, False, bind)


def mul(a: Any, b: Any, bind: str | None = None) -> Call:
    return Call((aten.mul.Tensor, aten.mul.Scalar), (a, b), True, bind)


def add(a: Any, b: Any, bind: str | None = None) -> Call:
    return Call((aten.add.Tensor, aten.add.Scalar), (a, b), True, bind)


def cast(inner: Any) -> Through:
    """`inner` with or without dtype conversions around it: what differs between fp32 and bf16 captures."""
    return Through((aten._to_copy.default,), inner)


def matches(pattern: Any, root: Node, trace: Trace | None = None) -> Iterator[Match]:
    """Every way in which `pattern` ends in `root`; `trace` tells how far the attempts got."""
    return _search(pattern, root, Match(root), trace if trace is not None else Trace())


def size(pattern: Any) -> int:
    """Number of calls in a pattern: what a complete match covers at least."""
    if isinstance(pattern, Call):
        return 1 + sum(size(a) for a in pattern.args)
    if isinstance(pattern, Through):
        return size(pattern.inner)
    if isinstance(pattern, tuple | list):
        return sum(size(p) for p in pattern)
    return 0


def root_targets(pattern: Any) -> tuple[Target, ...]:
    """Targets that the last node of a match can have."""
    if isinstance(pattern, Through):
        return (*pattern.targets, *root_targets(pattern.inner))
    return pattern.targets if isinstance(pattern, Call) else ()


def _search(pattern: Any, value: Any, found: Match, trace: Trace) -> Iterator[Match]:
    if isinstance(pattern, Var):
        yield from _search_var(pattern, value, found, trace)
    elif isinstance(pattern, Through):
        # Deepest first: the value below all conversions is the one a rule wants.
        if isinstance(value, Node) and value.target in pattern.targets:
            yield from _search(pattern, value.args[0], found.with_node(value), trace)
        yield from _search(pattern.inner, value, found, trace)
    elif isinstance(pattern, Call):
        yield from _search_call(pattern, value, found, trace)
    elif isinstance(pattern, list | tuple):
        if isinstance(value, list | tuple) and len(value) == len(pattern):
            yield from _search_all(list(zip(pattern, value, strict=True)), found, trace)
        else:
            trace.miss(found, f"expected {len(pattern)} values, got {value}")
    elif operator.eq(pattern, value) is True:
        yield found
    else:
        trace.miss(found, f"expected {pattern}, got {describe(value)}")


def _search_var(pattern: Var, value: Any, found: Match, trace: Trace) -> Iterator[Match]:
    if pattern.name in found.values and found.values[pattern.name] is not value:
        if isinstance(value, Node) or found.values[pattern.name] != value:
            trace.miss(
                found, f"{pattern.name} is {describe(found.values[pattern.name])} and {describe(value)}"
            )
            return
    reason = pattern.accept(value) if pattern.accept is not None else None
    if reason is not None:
        trace.miss(found, f"{pattern.name}: {reason}")
        return
    yield found.with_value(pattern.name, value)


def _search_call(pattern: Call, value: Any, found: Match, trace: Trace) -> Iterator[Match]:
    if not isinstance(value, Node) or value.op != "call_function" or value.target not in pattern.targets:
        trace.miss(found, f"expected {target_name(pattern.targets[0])}, got {describe(value)}")
        return
    found = found.with_node(value)
    if pattern.bind is not None:
        found = found.with_value(pattern.bind, value)
    if len(pattern.args) > len(value.args):
        trace.miss(found, f"{value} has {len(value.args)} arguments, expected {len(pattern.args)}")
        return
    pairs = list(zip(pattern.args, value.args, strict=False))
    yield from _search_all(pairs, found, trace)
    if pattern.commutative:
        swapped = [(pattern.args[1], value.args[0]), (pattern.args[0], value.args[1]), *pairs[2:]]
        yield from _search_all(swapped, found, trace)


def _search_all(pairs: list[tuple[Any, Any]], found: Match, trace: Trace) -> Iterator[Match]:
    if not pairs:
        yield found
        return
    (pattern, value), *rest = pairs
    for partial in _search(pattern, value, found, trace):
        yield from _search_all(rest, partial, trace)


def arguments(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a call, whose types are its schema's business."""
    return node.args


def is_constant(node: Node) -> bool:
    """A weight, or a call without inputs that always gives the same (arange or full of fixed sizes)."""
    target = node.target
    if node.op == "call_function" and not node.all_input_nodes and isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags
    return node.op == "get_attr"


def target_name(target: Any) -> str:
    """`aten.mul`, `octavo.rope`, `getitem`."""
    text = str(target)
    return ".".join(text.split(".")[:2]) if "." in text else getattr(target, "__name__", text)


def describe(value: Any) -> str:
    if isinstance(value, Node):
        return f"{value.name} ({target_name(value.target)})" if value.op == "call_function" else value.name
    return repr(value)


def number(value: Any) -> str | None:
    """Accepts Python numbers, for constants such as eps."""
    return None if isinstance(value, int | float) and not isinstance(value, bool) else "is not a number"
