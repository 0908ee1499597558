"""Random graphs, rewritten rightly and wrongly at random: the proof accepts the former and refuses the latter.

The oracle is plain torch on inputs of its own: a rewrite counts as wrong if it changes them by more than rounding.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lowered import LoweredGraph
from stages import FP32
from torch import Tensor, fx
from torch.fx import Interpreter

from octavo.compiler.errors import PassError
from octavo.compiler.verify import prove_report
from octavo.passes.pattern import aten
from octavo.passes.rewrite import Site, replace
from octavo.passes.rule import PassReport

WIDTH, CALLS, SEEDS = 8, 7, 60
UNARY = (
    (aten.neg.default, ()), (aten.sigmoid.default, ()), (aten.tanh.default, ()), (aten.silu.default, ()),
    (aten.softmax.int, (-1,)), (aten.flip.default, ([2],)), (aten.roll.default, ([1], [2])),
    (aten.roll.default, ([1], [1])), (aten.mul.Tensor, (0.5,)), (aten.add.Tensor, (1e-3,)),
    (aten.pow.Tensor_Scalar, (2,)),
)  # fmt: skip
BINARY = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)
# Targets with their further arguments, and the values (inputs first, then earlier calls) that each reads.
Program = list[tuple[Any, tuple[Any, ...], list[int]]]


def random_program(dice: random.Random) -> Program:
    """Each call reads the last value, so that none is dead."""
    program: Program = []
    for index in range(CALLS):
        last = index + 1
        if dice.random() < 0.5:
            target, rest = dice.choice(UNARY)
            program.append((target, rest, [last]))
        else:
            program.append((dice.choice(BINARY), (), [last, dice.randrange(last + 1)]))
    return program


def damaged(program: Program, dice: random.Random) -> Program:
    """One call has another target, other operands, a slightly other number, or is left out."""
    result = [*program]
    index = dice.randrange(CALLS)
    target, rest, reads = program[index]
    kind = dice.choice(("target", "operands", "number", "left out"))
    if kind == "number" and rest and isinstance(rest[0], float):
        result[index] = (target, (rest[0] * 1.001,), reads)
    elif kind == "operands" and len(reads) == 2:
        result[index] = (target, rest, [reads[0], (reads[1] + 1) % (index + 2)])
    elif kind == "left out":
        result[index] = (aten.alias.default, (), reads[:1])
    elif len(reads) == 2:
        result[index] = (dice.choice(BINARY), rest, reads)
    else:
        other, numbers = dice.choice(UNARY)
        result[index] = (other, numbers, reads)
    return result


def built(program: Program, call: Callable[..., fx.Node], inputs: list[fx.Node]) -> fx.Node:
    values = [*inputs]
    for target, rest, reads in program:
        values.append(call(target, *(values[i] for i in reads), *rest))
    return values[-1]


def site(before: Program, after: Program) -> Site:
    graph = LoweredGraph()
    inputs = [graph.tokens(name, (WIDTH,), FP32) for name in "xy"]
    root = built(before, graph.function, inputs)
    graph_module = graph.finish(root)
    return replace(graph_module, [root], lambda b: [built(after, b.call, inputs)], inputs)


def largest_difference(one: Site) -> float:
    """Relative, over inputs of many sizes, in fp64."""
    generator, worst = torch.Generator().manual_seed(7), 0.0
    for scale in (1e-3, 0.3, 1.0, 2.0):
        given = [torch.randn(1, 9, WIDTH, generator=generator).double() * scale for _ in "xy"]
        before, after = (Interpreter(form).run(*given)[0] for form in (one.before, one.after))
        assert isinstance(before, Tensor) and isinstance(after, Tensor)
        worst = max(worst, float((before - after).abs().max() / before.abs().max().clamp_min(1e-30)))
    return worst


def refusal(one: Site) -> str:
    try:
        prove_report(PassReport("fuzz", "reassociates", sites=[one]), {})
    except PassError as error:
        return str(error)
    return ""


def test_what_is_the_same_is_proven() -> None:
    for seed in range(SEEDS // 4):
        program = random_program(random.Random(seed))
        assert refusal(site(program, [*program])) == "", seed


def test_what_differs_is_refused() -> None:
    wrong = 0
    for seed in range(SEEDS):
        dice = random.Random(seed)
        program = random_program(dice)
        one = site(program, damaged(program, dice))
        if largest_difference(one) > 1e-6:
            wrong += 1
            assert "is not equal to what it replaced" in refusal(one), f"seed {seed} survived"
    assert wrong > SEEDS / 2


@pytest.mark.parametrize("factor", [1 + 1e-9, 1 - 1e-7])
def test_a_difference_far_below_the_dtype_shows_in_fp64(factor: float) -> None:
    right: Program = [(aten.mul.Tensor, (0.5,), [1])]
    assert "fp64" in refusal(site(right, [(aten.mul.Tensor, (0.5 * factor,), [1])]))
