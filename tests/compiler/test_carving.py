"""Neurons that work together become experts, those with most energy are shared, and the router finds who matters."""

import pytest
import torch
from torch import Tensor

from octavo.compiler.carving import Carving, carve, cluster, ridge, width_of
from octavo.compiler.options import CarveConfig

HIDDEN, TOPICS, WIDTH, TOKENS = 12, 3, 16, 400
CONFIG = CarveConfig(4, 1, 1, balance=False)


def made(seed: int = 0, skew: tuple[float, ...] = (1.0, 1.0, 1.0)) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, hidden, down and each neuron's topic (-1: active for all): a token is of one topic, which x shows."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.multinomial(torch.tensor(skew), TOKENS, True, generator=generator)
    x = torch.randn(TOKENS, HIDDEN, generator=generator) * 0.1
    x[:, :TOPICS] += torch.nn.functional.one_hot(topic, TOPICS)
    owner = torch.cat([torch.arange(TOPICS).repeat(WIDTH), torch.full((WIDTH,), -1)])
    owner = owner[torch.randperm(len(owner), generator=generator)]
    size = torch.where(owner == -1, 5.0, torch.where(owner == topic[:, None], 2.0, 0.01))
    hidden = size * torch.randn(TOKENS, len(owner), generator=generator)
    return x, hidden, torch.randn(HIDDEN, len(owner), generator=generator), owner


def test_topics_become_experts_and_what_is_always_active_is_shared() -> None:
    x, hidden, down, owner = made()
    found = carve(x, hidden, down, CONFIG)
    assert owner[found.shared].tolist() == [-1] * WIDTH
    topics = owner[found.routed]
    assert bool((topics == topics[:, :1]).all()) and sorted(topics[:, 0].tolist()) == [0, 1, 2]
    neurons = torch.cat([found.shared, found.routed.flatten()])
    assert sorted(neurons.tolist()) == list(range(4 * WIDTH))
    # The router chooses the expert of the token's topic.
    chosen = topics[(x @ found.router.T + found.bias).argmax(1), 0]
    assert float((chosen == x[:, :TOPICS].argmax(1)).double().mean()) > 0.99
    mask = found.selected(x, 1)
    assert mask.sum(1).tolist() == [2 * WIDTH] * TOKENS and bool(mask[:, found.shared].all())
    assert bool((mask[:, found.routed[0]] == (chosen == topics[0, 0])[:, None]).all())
    assert found.loads.tolist() == [int((chosen == t).sum()) for t in topics[:, 0]]
    assert torch.equal(found.loads, found.balanced)


def test_the_bias_levels_loads() -> None:
    x, hidden, down, _ = made(1, (6.0, 2.0, 1.0))
    plain = carve(x, hidden, down, CONFIG)
    moved = carve(x, hidden, down, CarveConfig(4, 1, 1))
    assert torch.equal(moved.loads, plain.loads) and torch.equal(moved.router, plain.router)
    assert int(plain.loads.max()) > 240 > 140 > int(moved.balanced.max())
    whole = carve(x, hidden, down, CarveConfig(4, 1, 3))
    assert torch.equal(whole.bias, carve(x, hidden, down, CarveConfig(4, 1, 3, balance=False)).bias)
    assert bool(whole.selected(x, 3).all())


@pytest.mark.parametrize(
    ("intermediate", "experts", "width"),
    [(1536, 8, 192), (1536, 10, 144), (48, 8, 6), (50, 4, 12), (3, 4, 0)],
)
def test_widths_are_whole_blocks_where_they_can_be(intermediate: int, experts: int, width: int) -> None:
    assert width_of(intermediate, CarveConfig(experts, 1, 1)) == width


def test_what_does_not_divide_is_shared() -> None:
    x, hidden, down, _ = made()
    found: Carving = carve(x, hidden, down, CarveConfig(5, 0, 2))  # 64 neurons: five of 12
    assert found.routed.shape == (5, 12) and len(found.shared) == 4
    alone: Carving = carve(x, hidden, down, CarveConfig(4, 0, 2))
    assert alone.routed.shape == (4, 16) and len(alone.shared) == 0


def test_clusters_are_of_equal_size_and_by_angle() -> None:
    directions = torch.eye(3).repeat_interleave(4, 0) * torch.arange(1.0, 13)[:, None]
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    owners = cluster(directions[order], 3)
    assert all(len({*owners[order // 4 == group].tolist()}) == 1 for group in range(3))
    # Seven rows of one direction fill a cluster and a part of the other.
    assert torch.bincount(cluster(torch.cat([torch.eye(2)[:1]] * 7 + [torch.eye(2)[1:]]), 2)).tolist() == [
        4,
        4,
    ]
    assert torch.bincount(cluster(torch.zeros(6, 2), 3)).tolist() == [2, 2, 2]


def test_ridge_finds_a_linear_map_up_to_what_experts_share() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 5, generator=generator) + 3.0
    weight, bias = torch.randn(4, 5, generator=generator), torch.randn(4, generator=generator)
    wanted = x @ weight.T + bias
    found, offset = ridge(x, wanted)
    scores = x @ found.T + offset
    expected = wanted - wanted.mean(1, keepdim=True)
    assert float((scores - expected).norm() / expected.norm()) < 0.02
    assert float(scores.sum(1).abs().max()) < 1e-4
    assert torch.isfinite(ridge(torch.zeros(3, 5), torch.zeros(3, 4))[0]).all()
