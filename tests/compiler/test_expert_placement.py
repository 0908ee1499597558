"""Every expert is somewhere, exactly one rank answers a token, and loads are spread."""

import itertools
import random

import pytest

from octavo.compiler.errors import OptionError
from octavo.compiler.expert_placement import (
    ExpertPlacement,
    balanced_placement,
    balancedness,
    contiguous_placement,
    expert_tables,
    placements_from_json,
    placements_to_json,
    rank_loads,
)
from octavo.compiler.mesh import Mesh

MESHES = [Mesh(dp, ep, tp) for dp, ep, tp in itertools.product((1, 2, 3), (1, 2), (1, 2))]


def zipf(num_experts: int, seed: int) -> list[float]:
    loads = [1000.0 / (1 + i) for i in range(num_experts)]
    random.Random(seed).shuffle(loads)
    return loads


def test_contiguous_experts_divide_or_the_first_ranks_have_one_more() -> None:
    assert contiguous_placement(4, 2).experts == ((0, 1), (2, 3))
    uneven = contiguous_placement(5, 3)
    assert uneven.experts == ((0, 1), (2, 3), (4,))
    assert (uneven.num_experts, uneven.num_local, uneven.local(2)) == (5, 2, (4, 4))
    assert contiguous_placement(2, 3).local(2) == (0,)  # a rank without experts still has weights of the size


def test_pieces_are_the_runs_of_the_whole_weights() -> None:
    placement = ExpertPlacement(((0, 1, 2), (2, 5), (3, 4, 6)))
    assert [placement.pieces(rank) for rank in range(3)] == [
        ((0, 3),),
        ((2, 3), (5, 6), (5, 6)),  # the place without an expert repeats the last
        ((3, 5), (6, 7)),
    ]
    weights = list("abcdefg")
    for rank in range(3):
        taken = [w for start, stop in placement.pieces(rank) for w in weights[start:stop]]
        assert taken == [weights[e] for e in placement.local(rank)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("redundant", [0, 1, 4])
def test_one_rank_answers_each_token_of_each_source(mesh: Mesh, redundant: int) -> None:
    """As the ops define it: a rank's own table, the owner along dp, the place there, the expert in that place."""
    if redundant and mesh.world == 1:
        return
    loads = zipf(10, 3)
    for placement in (
        contiguous_placement(10, mesh.world, redundant),
        balanced_placement(loads, mesh.world, redundant),
    ):
        tables = expert_tables(placement, mesh, loads)
        for d, expert in itertools.product(range(mesh.dp), range(10)):
            answers = []
            for e, t in itertools.product(range(mesh.ep), range(mesh.tp)):
                entry = tables[mesh.rank(d, e, t)][expert]
                if entry >= 0:
                    owner, place = divmod(entry, placement.num_local)
                    answers.append((mesh.rank(owner if mesh.dp > 1 else d, e, t), place))
            assert len(answers) == 1
            rank, place = answers[0]
            assert placement.experts[rank][place] == expert  # never a repeat: those lie behind


def test_a_source_takes_its_own_replica_and_others_are_shared_out() -> None:
    placement = ExpertPlacement(((0, 1), (0, 2), (3,), (4,)))  # expert 0 on two of four ranks
    owners = [table[0] // placement.num_local for table in expert_tables(placement, Mesh(dp=4))]
    assert owners[:2] == [0, 1] and sorted(owners[2:]) == [0, 1]
    busy = expert_tables(
        placement, Mesh(dp=4), [1.0, 9.0, 1.0, 1.0, 1.0]
    )  # rank 0 has enough to do with expert 1
    assert [table[0] // placement.num_local for table in busy] == [0, 1, 1, 1]
    assert [table[1] for table in busy] == [0 * 2 + 1] * 4


def test_the_most_loaded_are_replicated_and_loads_level() -> None:
    loads = [8.0, 1.0, 1.0, 1.0, 1.0, 4.0]
    placement = balanced_placement(loads, 4, redundant=3)
    assert [len(ranks) for ranks in placement.replicas()] == [3, 1, 1, 1, 1, 2]
    lone = balanced_placement([10.0, *[1.0] * 8], 2)
    assert [len(held) for held in lone.experts] == [4, 5]  # as few beside the loaded one as places allow
    mesh, skewed = Mesh(dp=8), zipf(64, 0)
    before = balancedness(rank_loads(contiguous_placement(64, 8), mesh, skewed))
    packed = balancedness(rank_loads(balanced_placement(skewed, 8), mesh, skewed))
    replicated = balancedness(rank_loads(balanced_placement(skewed, 8, 8), mesh, skewed))
    assert before < packed < replicated and replicated > 0.85
    for found in (before, packed, replicated):
        assert 1 / 8 <= found <= 1
    assert sum(rank_loads(balanced_placement(skewed, 8, 8), mesh, skewed)) == pytest.approx(sum(skewed))


@pytest.mark.parametrize("seed", range(30))
def test_no_rank_holds_an_expert_twice_or_more_than_its_share(seed: int) -> None:
    rng = random.Random(seed)
    ranks, experts = rng.randint(1, 6), rng.randint(1, 9)
    redundant = rng.randint(0, experts * (ranks - 1))
    loads = [rng.choice([0.0, 1.0, rng.random() * 100]) for _ in range(experts)]
    placement = balanced_placement(loads, ranks, redundant)
    assert placement.num_experts == experts and all(placement.replicas())
    assert sum(map(len, placement.experts)) == experts + redundant
    assert all(len({*held}) == len(held) and sorted(held) == list(held) for held in placement.experts)
    assert placement.num_local == -(-(experts + redundant) // ranks)


def test_groups_of_experts_stay_within_a_node() -> None:
    loads = [9.0, 8.0, 7.0, 6.0, *[2.0] * 4, *[1.0] * 8]
    placement = balanced_placement(loads, 4, redundant=4, nodes=2, groups=4)
    nodes = [{e for held in placement.experts[n : n + 2] for e in held} for n in (0, 2)]
    assert [{e // 4 for e in node} for node in nodes] == [
        {0, 3},
        {1, 2},
    ]  # two each, the lightest with the heaviest
    assert [sum(len(held) for held in placement.experts[n : n + 2]) for n in (0, 2)] == [10, 10]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            ([1.0, 2.0], 2, 3),
            "redundant experts: expected 0 to 2, as none of 2 can be twice on one of 2 rank",
        ),
        (([1.0, 2.0], 2, -1), "redundant experts: expected 0 to 2"),
        (([1.0, -2.0], 2), "loads: expected a finite number of at least 0"),
        (([], 2), "loads: expected a finite number"),
        (([1.0] * 4, 3, 0, 2, 2), "num_ranks: expected a multiple of the 2 nodes, got 3"),
        (([1.0] * 4, 4, 0, 2, 1), "groups: expected a multiple of the 2 nodes, got 1"),
        (([1.0] * 5, 4, 0, 2, 2), "experts: expected a multiple of the 2 groups, got 5"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(given: tuple[object, ...], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        balanced_placement(*given)  # type: ignore[arg-type]


def test_json_holds_placements_and_refuses_others() -> None:
    placements = [balanced_placement(zipf(9, seed), 3, 2) for seed in range(3)]
    assert placements_from_json(placements_to_json(placements)) == placements
    for text, said in (
        ("{", "expected what `octavo balance` writes"),
        ("[]", "expected what"),
        ('{"layers": [[[0], [2]]]}', "layer 0: expected every expert on a rank, expert 1 is on none"),
        ('{"layers": [[[], []]]}', "expert 0 is on none"),
        ('{"layers": [[[0, 0], [1]]]}', "once and ascending"),
        ('{"layers": [[[-1, 0], [1]]]}', "once and ascending"),
    ):
        with pytest.raises(OptionError, match=said):
            placements_from_json(text)
