"""Verification by enumeration: what comes out is distributed as plain decoding, to rounding; wrong rules are seen."""

from functools import cache
from types import ModuleType

import numpy as np
import pytest
from drafted import (
    Shape,
    Tokens,
    Verify,
    World,
    chain_of,
    coupled,
    path_to,
    plain_round,
    round_law,
    sequence_law,
    total_variation,
    true_law,
)
from wrong_verify import FAULTS_OF_RULES, Fault

from octavo.compiler.errors import ExecutionError
from octavo.runtime.speculative import verify
from octavo.runtime.speculative.verify import verify_block, verify_tokens

EXACT = 1e-12
TWO_ARE_LEFT = (
    2  # a world in which p - q is positive for two of three tokens, so that a second sibling is not certain
)
PLAIN = Shape(())
TREES = {
    "two": Shape((-1, -1)),
    "three": Shape((-1, -1, -1)),
    "two, each with one": Shape((-1, -1, 0, 1)),
    "two behind one": Shape((-1, 0, 0)),
}
MIXED = {
    "fixed": Shape((-1, -1, -1, 0, 0), frozenset(range(5))),
    "fixed first": Shape((-1, -1, -1, 0, 1), frozenset({0, 4})),
    "fixed between": Shape((-1, -1, -1, 0, 0), frozenset({1, 3})),
    "fixed last": Shape((-1, -1, 0, 0), frozenset({1, 3})),
}
VERIFIES: dict[str, Verify] = {"tokens": verify_tokens, "block": verify_block}


def off(shape: Shape, verify: Verify, world: World) -> float:
    """How far one round, with plain decoding behind it, is from plain decoding."""
    none = (0,) * len(shape.parents)
    length = 1 + max((len(path_to(shape.parents, none, node)) for node in range(len(none))), default=0)
    law = sequence_law(world, lambda before: (PLAIN, plain_round) if before else (shape, verify), length)
    assert abs(sum(law.values()) - 1) < EXACT
    return total_variation(law, true_law(world, length))


@pytest.mark.parametrize("name", VERIFIES)
@pytest.mark.parametrize(("seed", "num_zero"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("shape", [chain_of(0), chain_of(1), chain_of(2), chain_of(2, 0), chain_of(3, 1)])
def test_a_chain_is_exact(name: str, seed: int, num_zero: int, shape: Shape) -> None:
    assert off(shape, VERIFIES[name], World(3, seed, num_zero)) < EXACT


@pytest.mark.parametrize("rule", VERIFIES.values())
def test_three_drafts_are_exact(rule: Verify) -> None:
    assert off(chain_of(3), rule, World(3, 7)) < EXACT


def test_the_coupling_is_exact() -> None:
    for shape in (chain_of(2), chain_of(2, 0, 1)):
        assert off(shape, coupled, World(3, 7)) < EXACT


@pytest.mark.parametrize("name", [*TREES, *MIXED])
@pytest.mark.parametrize("is_without_replacement", [False, True])
def test_a_tree_is_exact(name: str, is_without_replacement: bool) -> None:
    shape = {**TREES, **MIXED}[name]
    for is_told_exactly in (True, False) if is_without_replacement else (True,):
        wanted = Shape(shape.parents, shape.fixed, is_without_replacement, is_told_exactly)
        assert off(wanted, verify_tokens, World(3, TWO_ARE_LEFT)) < EXACT


@pytest.mark.parametrize("is_without_replacement", [False, True])
def test_a_tree_of_drafts_that_exclude_tokens_is_exact(is_without_replacement: bool) -> None:
    for seed in range(2):
        shape = Shape((-1, -1, 0), is_without_replacement=is_without_replacement)
        assert off(shape, verify_tokens, World(3, seed, num_zero=1)) < EXACT


@pytest.mark.parametrize("rule", ["tokens", "block", "all"])
def test_a_sequence_of_rounds_is_exact(rule: str) -> None:
    """Three tokens, by rounds that draft at most what is left; a round goes on where the last one stopped."""
    world = World(3, 5)

    def of(before: Tokens) -> tuple[Shape, Verify]:
        shape = chain_of(2 - len(before)) if before else chain_of(2)
        if rule == "all":
            own = ((Shape((-1, -1, 0)), verify_tokens), (chain_of(2), verify_block), (chain_of(1), coupled))
            return own[sum(before) % 3 if before else 0]
        return shape, VERIFIES[rule]

    verifies = cache(of)
    law = sequence_law(world, verifies, 3)
    assert len(law) == 27
    assert total_variation(law, true_law(world, 3)) < EXACT


@pytest.mark.parametrize("seed", range(2))
def test_a_block_keeps_more_than_token_after_token(seed: int) -> None:
    world = World(3, seed)
    accepted = {
        name: sum(
            (len(tokens) - 1) * weight for tokens, weight in round_law(world, chain_of(3), rule, ()).items()
        )
        for name, rule in VERIFIES.items()
    }
    assert accepted["block"] > accepted["tokens"] + 1e-3


def worst(module: ModuleType) -> float:
    """The farthest that any kind of draft is off."""
    world = World(3, TWO_ARE_LEFT)
    assert np.count_nonzero(world.target(()) > world.proposer(())) == 2
    trees = [Shape((-1, -1, -1)), Shape((-1, -1), is_without_replacement=True, is_told_exactly=False)]
    mixed = [Shape((-1, -1), frozenset({0})), Shape((-1, -1), frozenset({0}), True)]
    return max(
        *(off(shape, module.verify_tokens, world) for shape in (chain_of(2), *trees, *mixed)),
        *(off(shape, module.verify_block, world) for shape in (chain_of(2), chain_of(2, 0))),
    )


@pytest.mark.parametrize("fault", FAULTS_OF_RULES, ids=lambda fault: fault.name)
def test_enumeration_sees_a_wrong_rule(fault: Fault) -> None:
    module = fault.seeded()
    try:
        distance = worst(module)
    except (ExecutionError, AssertionError):
        distance = 1.0
    assert distance > 1e-3


def test_enumeration_sees_nothing_where_nothing_is_wrong() -> None:
    assert worst(verify) < EXACT
