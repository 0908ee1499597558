"""The bias moves against the loads, by the rule, until they are equal; weights never see it."""

import pytest
import torch

from octavo.compiler.errors import OptionError
from octavo.compiler.expert_bias import Selection, balance_bias
from octavo.compiler.expert_placement import balancedness


def test_one_round_is_the_rule() -> None:
    """Three tokens choose expert 0, one expert 1; the mean is one."""
    logits = torch.tensor(
        [[3.0, 0.0, 1.0, -9.0], [3.0, 0.0, 1.0, -9.0], [3.0, 0.0, 1.0, -9.0], [0.0, 0.0, 1.0, -9.0]]
    )
    found = balance_bias(logits, Selection(1), torch.tensor([0.0, 0.375, 0.0, 0.0]), 0.25, 1)
    assert found.loads.tolist() == [[3, 1, 0, 0]]  # sigmoid(0) + 0.375 is more than sigmoid(1)
    assert found.bias.tolist() == [-0.25, 0.375, 0.25, 0.25]  # an expert with the mean load stays
    assert balance_bias(logits[:2], Selection(2), rounds=1, speed=1.0).bias.tolist() == [-1.0, 1.0, -1.0, 1.0]


def test_loads_level() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(600, 8, generator=generator) + torch.linspace(-2, 2, 8)
    selection = Selection(2)
    found = balance_bias(logits, selection, speed=0.002, rounds=400)
    before, after = (balancedness(found.loads[i].double().tolist()) for i in (0, -1))
    assert before < 0.5 and after > 0.95
    assert balancedness(selection.loads(logits, found.bias).double().tolist()) > 0.95
    assert found.loads.sum(1).tolist() == [1200] * 400
    grouped = balance_bias(logits, Selection(2, "sigmoid", 4, 1), speed=0.002, rounds=400)
    assert balancedness(grouped.loads[-1].double().tolist()) > 0.9 and not torch.equal(
        grouped.bias, found.bias
    )


def test_batches_follow_each_other_and_start_again() -> None:
    logits = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    found = balance_bias(logits, Selection(1), speed=1e-6, rounds=3, batch=2)
    assert found.loads.tolist() == [[1, 1], [2, 0], [1, 1]]
    with pytest.raises(OptionError, match="expected logits of calibration tokens"):
        balance_bias(logits[:0], Selection(1))
