"""Rules: alternatives, rejections, near misses, what is reported, and what a pass leaves behind."""

import torch
from lowered import LoweredGraph
from stages import FP32, count
from torch import fx

from octavo.passes.pattern import Match, Var, aten, call, cast, mul
from octavo.passes.rewrite import Builder
from octavo.passes.rule import PassReport, Rejection, Rule, apply_rules, run_pass

NEG, EXP, MUL = aten.neg.default, aten.exp.default, aten.mul.Tensor


def negative(build: Builder, found: Match) -> fx.Node:
    return build.call(NEG, found["a"])


DOUBLE_NEG = Rule("double_neg", call(NEG, args=(call(NEG, args=(Var("a"),)),)), negative, ("a",))


def applied(rules: list[Rule], graph_module: fx.GraphModule) -> PassReport:
    return run_pass(lambda g: apply_rules(rules, g, PassReport("test")), graph_module)


def negated(times: int) -> tuple[fx.GraphModule, list[fx.Node]]:
    g = LoweredGraph()
    nodes = [g.tokens("x", (4,), FP32)]
    for _ in range(times):
        nodes.append(g.function(NEG, nodes[-1]))
    return g.finish(nodes[-1]), nodes


def test_reports_counts_and_time() -> None:
    graph_module, _ = negated(2)
    report = applied([DOUBLE_NEG], graph_module)
    assert (report.matched, report.nodes_before, report.nodes_after, report.changed) == (1, 4, 3, True)
    assert report.ms > 0
    assert report.sites[0].node == "neg_default_1"


def test_unchanged_graph_is_reported_as_such() -> None:
    graph_module, _ = negated(1)
    report = applied([DOUBLE_NEG], graph_module)
    assert (report.matched, report.changed, report.nodes_before) == (0, False, report.nodes_after)


def test_later_nodes_come_first_so_the_largest_match_wins() -> None:
    graph_module, nodes = negated(3)
    triple = Rule("triple", call(NEG, args=(DOUBLE_NEG.pattern,)), negative, ("a",))
    report = applied([triple, DOUBLE_NEG], graph_module)
    assert report.matched == 1
    assert count(graph_module, NEG) == 1
    assert report.sites[0].node == nodes[3].name


def test_the_first_rule_that_fits_is_taken() -> None:
    graph_module, _ = negated(2)
    other = Rule("other", DOUBLE_NEG.pattern, lambda b, f: b.call(EXP, f["a"]), ("a",))
    applied([other, DOUBLE_NEG], graph_module)
    assert (count(graph_module, EXP), count(graph_module, NEG)) == (1, 0)


def test_a_rejected_way_to_match_does_not_hide_another() -> None:
    g = LoweredGraph()
    x, y = (g.tokens(name, (4,), FP32) for name in "xy")
    graph_module = g.finish(g.function(MUL, x, y))
    only_y = Rule(
        "only_y",
        mul(Var("a"), Var("b")),
        negative,
        ("a", "b"),
        lambda f: None if f["a"] is y else "a is not y",
    )
    report = applied([only_y], graph_module)
    assert (report.matched, report.rejected) == (1, [])
    assert [str(n) for n in graph_module.graph.nodes if n.target is NEG for n in n.args] == ["y"]


def test_if_every_way_is_rejected_the_first_reason_is_reported() -> None:
    g = LoweredGraph()
    graph_module = g.finish(g.function(MUL, g.tokens("x", (4,), FP32), g.tokens("y", (4,), FP32)))
    never = Rule("never", mul(Var("a"), Var("b")), negative, ("a",), lambda f: f"{f['a']} is 4 wide, not 8")
    report = applied([never], graph_module)
    assert report.rejected == [Rejection("mul_tensor", "node mul_tensor", "x is 4 wide, not 8")]
    assert count(graph_module, MUL) == 1


def missed(depth: int) -> list[Rejection]:
    """Near misses of a rule of four calls where the first `depth` are there."""
    g = LoweredGraph()
    value = g.function(EXP, g.tokens("x", (4,), FP32))
    for _ in range(depth):
        value = g.function(NEG, value)
    pattern = Var("a")
    for _ in range(4):
        pattern = call(NEG, args=(pattern,))  # type: ignore[assignment]
    report = applied([Rule("four", pattern, negative, ("a",))], g.finish(value))
    assert report.matched == 0
    return report.near_misses


def test_more_than_half_of_a_pattern_is_a_near_miss() -> None:
    assert missed(2) == []
    (miss,) = missed(3)
    assert miss == Rejection(
        "neg_default_2", "node neg_default_2", "four: expected aten.neg, got exp_default (aten.exp)"
    )


def test_near_misses_of_nodes_that_are_gone_are_forgotten() -> None:
    graph_module, nodes = negated(2)

    def pass_(g: fx.GraphModule) -> PassReport:
        report = PassReport("test", near_misses=[Rejection(n.name, "", "close") for n in nodes[1:]])
        return apply_rules([DOUBLE_NEG], g, report)

    assert run_pass(pass_, graph_module).near_misses == []


def test_a_match_through_casts_does_not_start_at_a_dead_node() -> None:
    g = LoweredGraph()
    x = g.tokens("x", (4,), FP32)
    g.function(NEG, g.function(NEG, x))  # nobody reads it
    graph_module = g.finish(
        g.function(NEG, g.function(aten._to_copy.default, g.function(NEG, x), dtype=FP32))
    )
    rule = Rule("cast_neg", call(NEG, args=(cast(call(NEG, args=(Var("a"),))),)), negative, ("a",))
    assert applied([rule], graph_module).matched == 1


def test_constants_bound_by_a_pattern_are_no_inputs_of_the_site() -> None:
    g = LoweredGraph()
    graph_module = g.finish(g.function(MUL, g.tokens("x", (4,), FP32), 3.0))
    rule = Rule("scale", mul(Var("a"), Var("n")), lambda b, f: b.call(MUL, f["a"], f["n"]), ("a", "n"))
    (site,) = applied([rule], graph_module).sites
    assert [n.name for n in site.before.graph.nodes if n.op == "placeholder"] == ["x"]
    assert torch.equal(site.after(torch.ones(2))[0], 3 * torch.ones(2))
