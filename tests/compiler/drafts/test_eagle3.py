"""An EAGLE-3 head reads three hidden states of its target, or its own, in the place that each has."""

import torch
from heads import IDS, head_of, results, step_of, target_of
from models import llama
from torch.nn import functional as F

from octavo.compiler.drafts.eagle3 import Eagle3Head, default_features


def test_features_are_the_targets_or_its_own() -> None:
    head = head_of("eagle3")
    assert isinstance(head, Eagle3Head)
    ids, positions, features = step_of(head, 5)
    targets, own = features[..., :192], features[..., 192:]
    zeros = torch.zeros_like(own)
    first = results(head, ids, positions, torch.cat((targets, zeros), -1))
    mixed = F.linear(targets, head.fc.weight)
    second = results(head, ids, positions, torch.cat((torch.zeros_like(targets), mixed), -1))
    for one, other in zip(first, second, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(first[0], results(head, ids, positions, features)[0])


def test_attention_reads_the_token_beside_the_state() -> None:
    head = head_of("eagle3")
    assert isinstance(head, Eagle3Head)
    layer = head.midlayer
    token, hidden = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    angles = head.rotary_emb(hidden, torch.zeros(1, 1, dtype=torch.int64))
    with torch.no_grad():
        got = layer(token, hidden, angles)
        # one token attends to itself alone: its value is what comes out
        both = torch.cat((layer.input_layernorm(token), layer.hidden_norm(hidden)), -1)
        value = layer.self_attn.v_proj(both).view(2, 16).repeat_interleave(2, 0).reshape(1, 1, 64)
        x = hidden + layer.self_attn.o_proj(value)
        torch.testing.assert_close(got, x + layer.mlp(layer.post_attention_layernorm(x)))


def test_what_it_reads_of_which_target() -> None:
    assert default_features(llama(num_hidden_layers=7)) == (2, 3, 4)
    assert default_features(llama(num_hidden_layers=4)) == (0, 2, 3)
    head = head_of("eagle3")
    assert head.facts == {"kind": "eagle3", "target_features": [2, 3, 4], "own_width": 64}
    assert head.features_width == 4 * 64
    chosen = Eagle3Head.for_target(target_of("eagle3"), IDS, (1, 2))
    assert chosen.target_features == (1, 2) and chosen.features_width == 3 * 64


def test_its_last_product_is_its_own() -> None:
    target = target_of("eagle3")
    for ids in (None, IDS):
        head = Eagle3Head.for_target(target, ids)
        assert head.lm_head is not target.lm_head
        rows = target.lm_head.weight if ids is None else target.lm_head.weight[ids]
        assert torch.equal(head.lm_head.weight, rows)
