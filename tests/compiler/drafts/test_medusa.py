"""Medusa's heads: each by itself, from the same hidden state."""

import pytest
import torch
from heads import IDS, head_of, results, step_of, target_of
from torch.nn import functional as F

from octavo.compiler.drafts.medusa import MedusaHeads
from octavo.compiler.errors import OptionError


def test_every_head_is_blocks_and_a_product() -> None:
    heads = head_of("medusa")
    assert isinstance(heads, MedusaHeads)
    ids, positions, features = step_of(heads, 4)
    (logits,) = results(heads, ids, positions, features)
    assert logits.shape == (1, 4, 3 * len(IDS))
    for number, got in enumerate(logits.chunk(3, -1)):
        x = features
        for weight, bias in zip(heads.blocks, heads.biases, strict=True):
            x = x + F.silu(F.linear(x, weight[number], bias[number]))
        torch.testing.assert_close(got, F.linear(x, heads.vocab[number]), rtol=1e-4, atol=1e-4)


def test_fresh_heads_guess_as_the_target_does() -> None:
    target = target_of("medusa")
    features = torch.randn(1, 3, 64)
    heads = MedusaHeads.for_target(target, 2, IDS)
    wanted = F.linear(features, target.lm_head.weight[IDS]).repeat(1, 1, 2)
    torch.testing.assert_close(results(heads, *step_of(heads, 3)[:2], features)[0], wanted)
    assert len(heads.trained_parameters()) == 3  # one block


def test_they_can_be_trained() -> None:
    heads = head_of("medusa").train()
    heads(*step_of(heads, 3)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in heads.parameters())


@pytest.mark.parametrize(("heads", "layers"), [(0, 1), (1, 0)])
def test_none_are_refused(heads: int, layers: int) -> None:
    with pytest.raises(OptionError, match="expected 1 head and 1 block or more"):
        MedusaHeads.for_target(target_of("medusa"), heads, None, layers)
