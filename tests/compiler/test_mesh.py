"""Ranks, coordinates and groups."""

from octavo.compiler.mesh import AXES, Mesh


def test_a_rank_has_the_coordinates_that_give_it_back() -> None:
    mesh = Mesh(dp=3, ep=2, tp=4)
    assert mesh.world == 24
    for rank in range(24):
        own = mesh.coordinates(rank)
        assert mesh.rank(*(own[axis] for axis in AXES)) == rank


def test_tp_is_innermost_and_dp_outermost() -> None:
    mesh = Mesh(dp=2, ep=2, tp=2)
    assert mesh.group(5, "tp") == (4, 5)
    assert mesh.group(5, "ep") == (5, 7)
    assert mesh.group(5, "dp") == (1, 5)


def test_groups_of_an_axis_hold_every_rank_once() -> None:
    mesh = Mesh(dp=2, ep=3, tp=2)
    for axis in AXES:
        groups = list(mesh.groups(axis))
        assert all(len(group) == mesh.size(axis) for group in groups)
        assert sorted(rank for group in groups for rank in group) == list(range(12))
        assert all(mesh.group(rank, axis) == group for group in groups for rank in group)
