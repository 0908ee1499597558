"""The matcher: orders, repeated variables, backtracking, and what it says of a near miss."""

from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from stages import BF16, FP32
from torch import fx

from octavo.passes.pattern import (
    Through,
    Trace,
    Var,
    add,
    aten,
    call,
    cast,
    describe,
    is_constant,
    matches,
    mul,
    number,
    root_targets,
    size,
    target_name,
)

ADD, MUL, NEG, EXP = aten.add.Tensor, aten.mul.Tensor, aten.neg.default, aten.exp.default


class Small(LoweredGraph):
    """x and y (1, T, 8), and calls on them."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = (self.tokens(name, (8,), FP32) for name in "xy")


def found(pattern: Any, root: fx.Node, *names: str) -> list[tuple[str, ...]]:
    """What the variables are bound to, one row for each way to match."""
    return [tuple(str(match[name]) for name in names) for match in matches(pattern, root)]


def miss(pattern: Any, root: fx.Node) -> tuple[int, str]:
    trace = Trace()
    assert list(matches(pattern, root, trace)) == []
    return trace.depth, trace.reason


def test_commutative_calls_match_in_both_orders() -> None:
    g = Small()
    pattern = mul(call(NEG, args=(Var("a"),)), Var("b"))
    for terms in ((g.function(NEG, g.x), g.y), (g.y, g.function(NEG, g.x))):
        assert found(pattern, g.function(MUL, *terms), "a", "b") == [("x", "y")]
    assert found(mul(Var("a"), Var("b")), g.function(MUL, g.x, g.y), "a", "b") == [("x", "y"), ("y", "x")]


def test_other_calls_match_in_their_order_only() -> None:
    g = Small()
    pattern = call(aten.sub.Tensor, args=(call(NEG, args=(Var("a"),)), Var("b")))
    negative = g.function(NEG, g.x)
    assert found(pattern, g.function(aten.sub.Tensor, negative, g.y), "a") == [("x",)]
    assert found(pattern, g.function(aten.sub.Tensor, g.y, negative), "a") == []


def test_one_name_is_one_value() -> None:
    g = Small()
    square = mul(Var("a"), Var("a"))
    assert found(square, g.function(MUL, g.x, g.x), "a") == [("x",), ("x",)]
    assert miss(square, g.function(MUL, g.x, g.y)) == (1, "a is x and y")
    power = call(aten.clamp.default, args=(Var("a"), Var("n"), Var("n")))
    assert found(power, g.function(aten.clamp.default, g.x, 2, 2), "n") == [("2",)]
    assert miss(power, g.function(aten.clamp.default, g.x, 2, 3)) == (1, "n is 2 and 3")


def test_backtracks_over_a_choice_made_deep_inside() -> None:
    g = Small()
    # Only the second order of the inner product leaves y for the outer one.
    inner = g.function(MUL, g.x, g.y)
    outer = g.function(ADD, inner, g.function(NEG, g.y))
    pattern = add(mul(Var("a"), Var("b")), call(NEG, args=(Var("a"),)))
    assert found(pattern, outer, "a", "b") == [("y", "x")]


def test_sees_through_any_number_of_casts_deepest_first() -> None:
    g = Small()
    up = g.function(aten._to_copy.default, g.function(aten._to_copy.default, g.x, dtype=BF16), dtype=FP32)
    names = found(call(NEG, args=(cast(Var("a")),)), g.function(NEG, up), "a")
    assert names == [("x",), ("_to_copy_default",), ("_to_copy_default_1",)]


def test_lists_match_by_length_and_element() -> None:
    g = Small()
    joined = g.function(aten.cat.default, [g.x, g.y], -1)
    assert found(call(aten.cat.default, args=([Var("a"), Var("b")],)), joined, "a", "b") == [("x", "y")]
    assert miss(call(aten.cat.default, args=([Var("a")],)), joined) == (1, "expected 1 values, got [x, y]")


def test_nodes_and_bindings_of_a_match() -> None:
    g = Small()
    root = g.function(NEG, g.function(EXP, g.x))
    (match,) = matches(call(NEG, args=(call(EXP, args=(Var("a"),), bind="power"),)), root)
    assert match.root is root
    assert [str(n) for n in match.nodes] == ["neg_default", "exp_default"]
    assert str(match["power"]) == "exp_default"


def test_trailing_arguments_are_free_and_missing_ones_are_not() -> None:
    g = Small()
    root = g.function(aten.sum.dim_IntList, g.x, [-1], True)
    assert found(call(aten.sum.dim_IntList, args=(Var("a"),)), root, "a") == [("x",)]
    pattern = call(aten.sum.dim_IntList, args=(Var("a"), [-1], True, Var("dtype")))
    assert miss(pattern, root) == (1, "sum_dim_int_list has 3 arguments, expected 4")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (call(NEG, args=(call(EXP, args=(Var("a"),)),)), (1, "expected aten.exp, got mul_tensor (aten.mul)")),
        (call(NEG, args=(mul(Var("a"), 3.0),)), (2, "expected 3.0, got 2.0")),
        (call(NEG, args=(mul(call(EXP, args=(Var("a"),)), 2.0),)), (2, "expected aten.exp, got x")),
        (call(NEG, args=(Var("a", lambda _: "is no weight"),)), (1, "a: is no weight")),
    ],
)
def test_near_miss_names_what_was_expected_and_found(pattern: Any, expected: tuple[int, str]) -> None:
    g = Small()
    assert miss(pattern, g.function(NEG, g.function(MUL, g.x, 2.0))) == expected


def test_the_furthest_attempt_is_the_one_reported() -> None:
    g = Small()
    root = g.function(MUL, g.function(NEG, g.function(EXP, g.x)), g.function(EXP, g.y))
    pattern = mul(call(NEG, args=(call(EXP, args=(call(EXP, args=(Var("a"),)),)),)), Var("b"))
    assert miss(pattern, root) == (3, "expected aten.exp, got x")


def test_size_and_roots() -> None:
    pattern = cast(mul(call(NEG, args=(Var("a"),)), [call(EXP, args=(Var("b"),)), 2]))
    assert size(pattern) == 3
    assert root_targets(pattern) == (aten._to_copy.default, aten.mul.Tensor, aten.mul.Scalar)
    assert root_targets(Var("a")) == ()
    assert size(Through((NEG,), Var("a"))) == 0


def test_names_and_numbers() -> None:
    assert target_name(torch.ops.octavo.rope.default) == "octavo.rope"
    assert target_name(len) == "len"
    assert describe("silu") == "'silu'"
    assert (number(1e-5), number(2)) == (None, None)
    assert (number(True), number("2")) == ("is not a number", "is not a number")


def test_constants_are_weights_and_factories_without_chance() -> None:
    g = Small()
    made = g.function(aten.arange.default, 4)
    assert is_constant(g.weight("w", torch.ones(2))) and is_constant(made)
    assert not is_constant(g.x) and not is_constant(g.function(NEG, made))
    assert not is_constant(g.function(aten.rand.default, [4]))
