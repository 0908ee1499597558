"""Rules, what a pass reports, and how a rule is applied. No rule mentions a backend."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.fx import GraphModule, Node

from octavo.compiler.origin import where
from octavo.compiler.precision import QuantizedWeight
from octavo.passes.pattern import Match, Trace, matches, root_targets, size
from octavo.passes.rewrite import Builder, Site, replace

Exactness = Literal["bitwise", "reassociates", "quantizes"]


@dataclass(frozen=True)
class Rule:
    """A pattern and what replaces it.

    reject       a reason with numbers not to rewrite this match, or None
    replacement  builds the new value from the match
    inputs       names of the pattern's variables that are values of the graph
    """

    name: str
    pattern: Any
    replacement: Callable[[Builder, Match], Node]
    inputs: tuple[str, ...]
    reject: Callable[[Match], str | None] = lambda _: None


@dataclass(frozen=True)
class Rejection:
    """A match that was left alone, or a place that nearly matched."""

    node: str
    where: str
    reason: str


@dataclass
class Proof:
    """Filled in by verification: distinct sites executed, the worst error seen and its bound."""

    sites: int = 0
    worst: float = 0.0
    bound: float = 0.0


@dataclass
class PassReport:
    """What a pass did. `matched` counts rewritten sites, `proof` covers the distinct ones among them."""

    name: str
    exactness: Exactness = "bitwise"
    sites: list[Site] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    near_misses: list[Rejection] = field(default_factory=list)
    nodes_before: int = 0
    nodes_after: int = 0
    ms: float = 0.0
    proof: Proof = field(default_factory=Proof)
    notes: dict[str, Any] = field(default_factory=dict)
    skipped: str | None = None

    @property
    def matched(self) -> int:
        return sum(site.stands_for for site in self.sites)

    @property
    def changed(self) -> bool:
        return bool(self.sites) or self.nodes_before != self.nodes_after

    def reject(self, node: Node, reason: str) -> None:
        self.rejected.append(Rejection(node.name, where(node), reason))


Pass = Callable[[GraphModule], PassReport]
# Proves a site of a pass that quantises as soon as it is made, while its weights are there; raises PassError.
Prove = Callable[[PassReport, Site, Sequence[QuantizedWeight]], None]


def run_pass(one: Pass, graph_module: GraphModule) -> PassReport:
    """Run a pass with its counts and time; what it left unused goes, and the graph is linted."""
    start, before = time.perf_counter(), len(graph_module.graph.nodes)
    report = one(graph_module)
    graph_module.graph.eliminate_dead_code()
    graph_module.graph.lint()
    graph_module.recompile()
    alive = {n.name for n in graph_module.graph.nodes}
    report.near_misses = [miss for miss in report.near_misses if miss.node in alive]
    report.nodes_before, report.nodes_after = before, len(graph_module.graph.nodes)
    report.ms = (time.perf_counter() - start) * 1e3
    return report


def apply_rules(rules: Sequence[Rule], graph_module: GraphModule, report: PassReport) -> PassReport:
    """Apply every rule at every node, later nodes first: the largest match is found before its parts."""
    for node in reversed(list(graph_module.graph.nodes)):
        for rule in rules:
            if node.op == "call_function" and node.users and apply_rule(rule, graph_module, node, report):
                break
    return report


def apply_rule(rule: Rule, graph_module: GraphModule, node: Node, report: PassReport) -> bool:
    """Rewrite the match that ends in `node`, if there is one and the rule does not reject it."""
    if node.target not in root_targets(rule.pattern):
        return False
    trace = Trace()
    reason: str | None = None
    for found in matches(rule.pattern, node, trace):
        refusal = rule.reject(found)
        if refusal is None:
            break
        reason = reason or refusal
    else:
        if reason is not None:
            report.reject(node, reason)
        elif 2 * trace.depth > size(rule.pattern) > 1:
            report.near_misses.append(Rejection(node.name, where(node), f"{rule.name}: {trace.reason}"))
        return False
    inputs = [found[name] for name in rule.inputs if isinstance(found.values.get(name), Node)]
    report.sites.append(replace(graph_module, [node], lambda b: [rule.replacement(b, found)], inputs))
    return True
